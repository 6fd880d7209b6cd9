from typing import Any

from bert_core.tasks.digests import row_digests
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification


def test_a_row_is_recognised_by_what_it_asks() -> None:
    names = ["text", "text_pair"]
    one, other = {"text": "an axis", "label": "x"}, {"text": "an axis", "text_pair": "a row"}
    (digest,) = row_digests([one], names).tolist()
    same: list[dict[str, Any]] = [
        {"label": "y", "text_pair": None, "text": " an\taxis "},
        {"text": "an axis"},
    ]
    assert row_digests(same, names).tolist() == [digest, digest]
    unlike: list[dict[str, Any]] = [
        other,
        {"text": "an ax"},
        {"text": "an axis a row"},
        {"text": ["an axis"]},
    ]
    assert len({digest, *row_digests(unlike, names).tolist()}) == 5
    assert row_digests([], names).tolist() == []
    assert (
        TextClassification.digests([one, other]).tolist()
        == row_digests([one, other], names).tolist()
    )


def test_questions_about_one_passage_belong_together() -> None:
    rows = [
        {"question": question, "context": context, "answers": []}
        for question, context in (("Who?", "An axis."), ("What?", "An axis."), ("Who?", "A row."))
    ]
    first, second, third = QuestionAnswering.groups(rows).tolist()
    assert first == second != third
    assert len(set(QuestionAnswering.digests(rows).tolist())) == 3
