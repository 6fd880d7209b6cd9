"""What counts as wrong, and how sure an answer is, task by task."""

from typing import Any

import numpy as np
import pytest

from bert_core.tasks.base import Task
from bert_core.tasks.fill_mask import FillMask
from bert_core.tasks.multiple_choice import MultipleChoice
from bert_core.tasks.next_sentence import NextSentence
from bert_core.tasks.question_answering import QuestionAnswering, QuestionAnsweringOptions
from bert_core.tasks.shapes import Row
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from bert_core.tasks.text_regression import TextRegression


def scored(**scores: float) -> list[dict[str, Any]]:
    order = sorted(scores.items(), key=lambda item: -item[1])
    return [{"label": label, "score": score} for label, score in order]


def mask(score: float, rank: int) -> list[dict[str, Any]]:
    return [{"score": score, "wanted": {"rank": rank, "log_share": -1.0}}]


MULTI = TextClassificationOptions(multi_label=True)
CASES: dict[str, tuple[Task, list[Row], list[Any], list[float], list[float] | None]] = {
    "one label": (
        TextClassification(["ham", "spam"]),
        [{"text": "x", "label": "ham"}, {"text": "y", "label": "ham"}],
        [scored(ham=0.9, spam=0.1), scored(ham=0.3, spam=0.7)],
        [0, 1],
        [0.9, 0.7],
    ),
    "several labels": (
        TextClassification(["a", "b", "c"], MULTI),
        [{"text": "x", "labels": ["a"]}, {"text": "y", "labels": []}],
        [scored(a=0.9, b=0.2, c=0.5), scored(a=0.1, b=0.2, c=0.4)],
        [1, 0],
        [0.9 * 0.8 * 0.5, 0.9 * 0.8 * 0.6],
    ),
    "a number": (
        TextRegression(),
        [{"text": "x", "score": 4.0}, {"text": "y", "score": -1.0}],
        [{"score": 1.5}, {"score": -1.0}],
        [2.5, 0],
        None,
    ),
    "a choice": (
        MultipleChoice(),
        [{"text": "x", "choices": ["a", "b"], "label": 1}] * 2,
        [[{"label": 1, "choice": "b", "score": 0.8}], [{"label": 0, "choice": "a", "score": 0.6}]],
        [0, 1],
        [0.8, 0.6],
    ),
    "a sentence": (
        NextSentence(),
        [{"text": "x", "text_pair": "y", "label": "NotNext"}],
        [scored(IsNext=0.75, NotNext=0.25)],
        [1],
        [0.75],
    ),
    "masks": (
        FillMask(),
        [{"text": "[MASK]", "words": ["a"]}, {"text": "[MASK] [MASK]", "words": ["a", "b"]}],
        [mask(0.5, 1), [mask(0.5, 1), mask(0.4, 3)]],
        [0, 0.5],
        [0.5, 0.2],
    ),
    "a span": (
        QuestionAnswering(),
        [{"question": "q", "context": "c", "answers": [{"text": "blue sea", "answer_start": 0}]}]
        * 3,
        [{"answer": each, "score": 0.5} for each in ("The Blue sea.", "blue", "land")],
        [0, 1 / 3, 1],
        [0.5, 0.5, 0.5],
    ),
    "a span or none": (
        QuestionAnswering(options=QuestionAnsweringOptions(no_answer=True)),
        [{"question": "q", "context": "c", "answers": []}] * 2,
        [{"answer": "", "score": 0.9}, {"answer": "land", "score": 0.6}],
        [0, 1],
        [0.9, 0.6],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_zero_for_a_right_answer_and_grows_with_the_error(
    case: str,
) -> None:
    task, rows, answers, faults, _ = CASES[case]
    np.testing.assert_allclose(task.faults(task.compare(rows, answers)), faults, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_confidence_is_what_the_answer_gives_itself_and_is_right_where_there_is_no_fault(
    case: str,
) -> None:
    task, rows, answers, faults, wanted = CASES[case]
    confidence, claims = task.confidence(answers), task.claims(rows, answers)
    if wanted is None:
        assert (confidence, claims) == (None, None)
        return
    assert claims is not None
    assert confidence is not None
    np.testing.assert_allclose(claims[0], wanted)
    np.testing.assert_allclose(confidence, wanted)
    assert claims[1].tolist() == [fault == 0 for fault in faults]
