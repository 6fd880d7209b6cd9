"""What holds for every task of the registry: a new one is tested the day it is added."""

import numpy as np
import pytest
import torch
import transformers

from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.errors import CorpusError
from bert_core.model.hf import architecture, encoder_config_from_huggingface
from bert_core.tasks.base import Parameters, Task
from bert_core.tasks.registry import TASKS

ROWS = {
    "text-classification": [
        {"text": "the sea is blue", "label": "sea"},
        {"text": "a tree", "label": "land"},
        {"text": "sea sea the tree " * 20, "label": "sea"},
    ]
}
CONFIG = encoder_config_from_huggingface(
    {
        "vocab_size": 10,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
    }
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = ["the", "sea", "is", "blue", "tree"]
    return Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=True)


@pytest.fixture(params=TASKS, name="task")
def each_task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param].from_rows(ROWS[request.param])


def test_labels_are_sorted_and_do_not_depend_on_the_order_of_rows(task: Task) -> None:
    assert task.labels == sorted(task.labels)
    assert type(task).from_rows(ROWS[task.name][::-1]).labels == task.labels


def test_rows_become_ids_of_limited_length_and_labels(task: Task, tokenizer: Tokenizer) -> None:
    encoded = task.encode(ROWS[task.name], tokenizer, max_length=16)
    assert len(encoded.ids) == len(ROWS[task.name])
    assert max(len(ids) for ids in encoded.ids) == 16
    assert encoded.labels is not None
    assert len(encoded.labels) == len(encoded.ids)


def test_rows_without_labels_are_encoded_too(task: Task, tokenizer: Tokenizer) -> None:
    rows = [{key: value for key, value in row.items() if key != "label"} for row in ROWS[task.name]]
    assert task.encode(rows, tokenizer, max_length=16).labels is None


def test_every_row_gets_an_answer(task: Task) -> None:
    logits = np.random.default_rng(0).normal(size=(4, len(task.labels))).astype(np.float32)
    assert len(task.decode(logits)) == 4
    assert isinstance(task.parameters(), Parameters)


def test_perfect_predictions_have_a_perfect_primary_metric(
    task: Task, tokenizer: Tokenizer
) -> None:
    labels = task.encode(ROWS[task.name], tokenizer, max_length=16).labels
    assert labels is not None
    metrics = task.metrics(labels, labels)
    assert metrics[task.primary_metric] == 1.0


def test_its_objective_and_its_class_at_hugging_face_exist(task: Task) -> None:
    with torch.device("meta"):
        assert task.build_objective(CONFIG).name == task.objective
    assert hasattr(transformers, architecture(CONFIG, frozenset({task.objective})))


def test_a_row_that_lacks_a_field_is_named(task: Task) -> None:
    rows = [*ROWS[task.name], {"sentence": "hello"}]
    with pytest.raises(CorpusError, match=r"row 4: wanted a field 'label' .* found only sentence"):
        type(task).from_rows(rows)
