"""Which tasks labelled rows train."""

import pytest

from bert_core.errors import ConfigError
from bert_core.tasks.catalog import TASKS
from pipelines.training.labelled_sets import trainable_task


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_trained_or_refused_with_the_tasks_whose_models_answer_it(name: str) -> None:
    if TASKS[name].trainable:
        assert trainable_task(name) is TASKS[name]
        return
    others = ", ".join(TASKS[name].shares_head_with)
    message = f"got '{name}', which is not trained: train a model for {others}, and give --task"
    with pytest.raises(ConfigError, match=message):
        trainable_task(name)


def test_an_unknown_task_is_refused_with_those_that_are_trained() -> None:
    with pytest.raises(
        ConfigError, match=r"task: wanted one of text-classification, .*'magic'$"
    ) as raised:
        trainable_task("magic")
    assert "zero-shot" not in str(raised.value)
