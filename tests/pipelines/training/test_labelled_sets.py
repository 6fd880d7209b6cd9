"""Which tasks labelled rows train, and which rows their bundles show."""

import pytest

from bert_core.data.windows import cut_rows
from bert_core.errors import ConfigError
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.text_classification import TextClassification
from pipelines.training.labelled_sets import LabelledSet, shown_rows, trainable_task
from tests import tiny


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


def test_rows_that_are_shown_were_not_trained_on_and_are_read_whole() -> None:
    task = TextClassification(["a", "b"])

    def encoded(*texts: str) -> LabelledSet:
        rows = [{"text": text, "label": "a"} for text in texts]
        windows = task.encode(rows, tiny.tokenizer(), 8, labelled=True)
        return LabelledSet(rows, windows, cut_rows(windows))

    long = "the sea is blue " * 3
    sets = {"train": encoded("the sea"), "selection": encoded(long, "a tree", "the tree")}
    assert shown_rows(task, sets, 3) == ("a tree", "the tree")
    assert shown_rows(task, sets, 0) == ()
    sets["held_out"] = encoded("a blue sea", long)
    assert shown_rows(task, sets, 3) == ("a blue sea",)
    assert shown_rows(task, {"train": sets["train"]}, 3) == ()
    assert shown_rows(task, {"selection": encoded(long)}, 3) == ()
