"""Text classification: answers beside transformers' pipeline rules, and every message."""

import numpy as np
import pytest

from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.errors import CorpusError, InputError
from bert_core.tasks.text_classification import (
    TextClassification,
    TextClassificationParameters,
)

TASK = TextClassification(["ham", "maybe", "spam"])
LOGITS = np.array([[0.5, -1.0, 2.0], [3.0, 3.0, -800.0]], dtype=np.float32)


def parameters(**fields: object) -> TextClassificationParameters:
    return TextClassificationParameters(**fields)  # type: ignore[arg-type]


def test_answers_are_all_labels_with_the_best_first() -> None:
    first, second = TASK.decode(LOGITS)
    assert [answer["label"] for answer in first] == ["spam", "ham", "maybe"]
    assert [answer["label"] for answer in second] == ["ham", "maybe", "spam"]  # ties keep the order
    exact = np.exp([2.0, 0.5, -1.0]) / np.exp([2.0, 0.5, -1.0]).sum()
    assert [answer["score"] for answer in first] == pytest.approx(exact)
    assert sum(answer["score"] for answer in second) == pytest.approx(1.0)


def test_top_k_keeps_the_best() -> None:
    assert [len(answer) for answer in TASK.decode(LOGITS, parameters(top_k=2))] == [2, 2]
    assert [len(answer) for answer in TASK.decode(LOGITS, parameters(top_k=99))] == [3, 3]


def test_scores_may_be_sigmoids_or_logits() -> None:
    with np.errstate(all="raise"):
        sigmoids = TASK.decode(LOGITS, parameters(function_to_apply="sigmoid"))
    assert sigmoids[0][0]["score"] == pytest.approx(1 / (1 + np.exp(-2.0)))
    assert sigmoids[1][2]["score"] == 0.0
    assert TASK.decode(LOGITS, parameters(function_to_apply="none"))[0][0]["score"] == 2.0


def test_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="top_k = 0: wanted at least 1"):
        parameters(top_k=0)
    past_the_types = parameters()
    object.__setattr__(past_the_types, "function_to_apply", "argmax")
    with pytest.raises(InputError, match="'argmax': wanted one of softmax, sigmoid, none"):
        past_the_types.__post_init__()


def test_a_label_unseen_in_training_is_named_with_those_there_are() -> None:
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, "a"], lowercase=True)
    rows = [{"text": "a", "label": "ham"}, {"text": "a", "label": "eggs"}]
    message = "row 2: its label 'eggs' is not one of the training rows', which are ham, maybe, spam"
    with pytest.raises(CorpusError, match=message):
        TASK.encode(rows, tokenizer, 8)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"wanted at least two labels, found 0 \(no rows\)"),
        ([{"text": "a", "label": "x"}], r"wanted at least two labels, found 1 \(x\)"),
        ([{"text": "a", "label": 3}], "row 1: wanted a field 'label' that holds text, found 3"),
    ],
)
def test_rows_that_are_no_training_set_are_refused(rows: list[dict], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        TextClassification.from_rows(rows)
