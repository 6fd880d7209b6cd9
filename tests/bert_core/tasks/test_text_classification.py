"""Text classification: answers beside transformers' pipeline rules, and every message."""

from typing import Any

import numpy as np
import pytest

from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.tasks.text_classification import (
    TextClassification,
    TextClassificationOptions,
    TextClassificationParameters,
)
from tests import tiny

TASK = TextClassification(["ham", "maybe", "spam"])
LOGITS = list(np.array([[0.5, -1.0, 2.0], [3.0, 3.0, -800.0]], dtype=np.float32))


def parameters(**fields: object) -> TextClassificationParameters:
    return TextClassificationParameters(**fields)  # type: ignore[arg-type]


def answers_of(chosen: TextClassificationParameters | None = None) -> list[Any]:
    return TASK.decode([], [], LOGITS, chosen)


def test_answers_are_all_labels_with_the_best_first() -> None:
    first, second = answers_of()
    assert [answer["label"] for answer in first] == ["spam", "ham", "maybe"]
    assert [answer["label"] for answer in second] == ["ham", "maybe", "spam"]  # ties keep the order
    exact = np.exp([2.0, 0.5, -1.0]) / np.exp([2.0, 0.5, -1.0]).sum()
    assert [answer["score"] for answer in first] == pytest.approx(exact)
    assert sum(answer["score"] for answer in second) == pytest.approx(1.0)


def test_top_k_keeps_the_best() -> None:
    assert [len(answer) for answer in answers_of(parameters(top_k=2))] == [2, 2]
    assert [len(answer) for answer in answers_of(parameters(top_k=99))] == [3, 3]


def test_scores_may_be_sigmoids_or_logits() -> None:
    with np.errstate(all="raise"):
        sigmoids = answers_of(parameters(function_to_apply="sigmoid"))
    assert sigmoids[0][0]["score"] == pytest.approx(1 / (1 + np.exp(-2.0)))
    assert sigmoids[1][2]["score"] == 0.0
    assert answers_of(parameters(function_to_apply="none"))[0][0]["score"] == 2.0


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="top_k: wanted at least 1, got 0"):
        parameters(top_k=0)
    past_the_types = parameters()
    object.__setattr__(past_the_types, "function_to_apply", "argmax")
    with pytest.raises(InputError, match="wanted one of softmax, sigmoid, none, got 'argmax'"):
        past_the_types.__post_init__()


def test_a_label_unseen_in_training_is_named_with_those_there_are() -> None:
    tokenizer = tiny.tokenizer(["a"])
    rows = [{"text": "a", "label": "ham"}, {"text": "a", "label": "eggs"}]
    message = "row 2: its label 'eggs' is not one of the model's, which are ham, maybe, spam"
    with pytest.raises(CorpusError, match=message):
        TASK.encode(rows, tokenizer, 8, labelled=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"wanted at least two labels, found 0 \(no rows\)"),
        ([{"text": "a", "label": "x"}], r"wanted at least two labels, found 1 \(x\)"),
    ],
)
def test_rows_unusable_for_training_are_refused(rows: list[dict], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        TextClassification.from_rows(rows)


SEVERAL = TextClassification(["a", "b", "c"], TextClassificationOptions(multi_label=True))


def test_with_several_labels_each_has_a_chance_of_its_own() -> None:
    rows = [{"text": "x", "labels": ["a", "c"]}, {"text": "y", "labels": []}]
    tokenizer = tiny.tokenizer(["a"])
    windows = SEVERAL.encode(rows, tokenizer, 8, labelled=True)
    assert [window.labels["labels"].tolist() for window in windows] == [[[1, 0, 1]], [[0, 0, 0]]]
    answers = SEVERAL.decode(rows, windows, [np.array([3.0, -1, 2]), np.array([-2.0, 0.1, -3])])
    assert answers[0][0]["score"] == pytest.approx(1 / (1 + np.exp(-3.0)))
    metrics = SEVERAL.metrics(SEVERAL.compare(rows, answers))
    # Of the labels a, b and c: right twice; b is predicted once too often.
    assert metrics["accuracy"] == 0.5
    assert metrics["micro_f1"] == pytest.approx(2 * 2 / (3 + 2))
    assert metrics["macro_f1"] == pytest.approx(2 / 3)


def test_rows_of_no_label_are_scored_apart() -> None:
    rows = [{"text": "x", "label": label} for label in ("ham", "spam", "oos", "oos")]
    task = TextClassification.from_rows(rows, TextClassificationOptions(out_of_scope="oos"))
    answers = [[{"label": label, "score": 1.0}] for label in ("ham", "oos", "oos", "ham")]
    metrics = task.metrics(task.compare(rows, answers))
    assert metrics["in_scope_accuracy"] == metrics["out_of_scope_recall"] == 0.5
    with pytest.raises(ConfigError, match="out_of_scope: wanted one of the labels, got 'none'"):
        TextClassification.from_rows(rows, TextClassificationOptions(out_of_scope="none"))


def test_answers_of_a_model_with_other_labels_are_wrong_not_an_error() -> None:
    rows = [{"text": "x", "label": "ham"}, {"text": "y", "label": "spam"}]
    answers = [[{"label": "ham", "score": 1.0}], [{"label": "eggs", "score": 1.0}]]
    assert TASK.metrics(TASK.compare(rows, answers))["accuracy"] == 0.5


def test_f1_is_that_of_the_requested_label() -> None:
    """A tenth fraud, none of it found: no F1 may look good without saying whose it is."""
    rows = [{"text": "a", "label": "fraud" if place % 10 == 0 else "legit"} for place in range(100)]
    answers = [[{"label": "legit", "score": 1.0}]] * 100
    both = TextClassification.from_rows(rows)
    metrics = both.metrics(both.compare(rows, answers))
    assert (metrics["f1_of_fraud"], round(metrics["f1_of_legit"], 3)) == (0.0, 0.947)
    assert "f1" not in metrics
    asked = TextClassification.from_rows(rows, TextClassificationOptions(positive_label="fraud"))
    assert [name for name in asked.metrics(asked.compare(rows, answers)) if "f1_of" in name] == [
        "f1_of_fraud"
    ]
    assert asked.is_comparable(both)
    with pytest.raises(ConfigError, match="positive_label: wanted one of the labels, got 'spam'"):
        TextClassification.from_rows(rows, TextClassificationOptions(positive_label="spam"))
    several = TextClassificationOptions(multi_label=True, positive_label="x")
    listed = [{"text": "a", "labels": ["x"]}, {"text": "b", "labels": ["y"]}]
    task = TextClassification.from_rows(listed, several)
    given = [[{"label": "x", "score": 0.9}]] * 2
    assert task.metrics(task.compare(listed, given))["f1_of_x"] == pytest.approx(2 / 3)
