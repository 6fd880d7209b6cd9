"""Prodigy's exports: what was accepted, what was rejected, and what nobody decided."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.labelled_formats import LabelledFile, labelled_records


def read(*rows: Any) -> LabelledFile:
    data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    return labelled_records(data, "ner.jsonl", "prodigy")


SPAN = {"start": 0, "end": 3, "label": "x"}
TOKENS = [{"text": "Ada", "start": 0, "end": 3, "id": 0}, {"text": ".", "start": 3, "end": 4}]
ROW = {"text": "Ada.", "spans": [SPAN], "answer": "accept", "_input_hash": 7, "_session_id": "s"}


def test_an_accepted_row_has_its_spans() -> None:
    [record] = read(ROW).records
    assert (record["spans"], record["item"], record["annotator"]) == ([SPAN], 7, "s")
    [record] = read({"text": "Ada", "answer": "accept"}).records
    assert record["spans"] == [], "Prodigy writes no spans where there are none"


def test_spans_of_tokens_have_the_characters_of_these() -> None:
    spans = [{"token_start": 0, "token_end": 1, "label": "x"}]
    [record] = read(ROW | {"spans": spans, "tokens": TOKENS}).records
    [span] = record["spans"]
    assert (span["start"], span["end"]) == (0, 4), "token_end is the last token"
    found = read(
        ROW | {"spans": spans, "tokens": TOKENS[:1]},
        ROW | {"spans": spans},
        ROW | {"spans": [{"token_start": -1, "token_end": 0, "label": "x"}], "tokens": TOKENS},
        ROW | {"spans": [{"label": "x"}]},
        ROW | {"spans": [3]},
    )
    assert len(found.unread) == 5
    assert found.unread[1].startswith("row 1: wanted spans with start and end, or with token_start")


def test_rejected_and_ignored_rows_are_left_out_and_counted() -> None:
    binary = ROW | {"_is_binary": True}
    found = read(ROW, ROW | {"answer": "reject"}, ROW | {"answer": "ignore"}, binary)
    assert len(found.records) == 1
    assert found.left_out == {
        "rejected": 1, "ignored": 1, "about one span of a text (_is_binary)": 1,
    }  # fmt: skip
    assert (
        read(ROW | {"answer": "maybe"})
        .unread[1]
        .startswith(
            'row 1: wanted the answer accept, reject or ignore, got text ("maybe"): correct the row'
        )
    )


def test_a_rejected_label_is_no_label() -> None:
    answers = ("accept", "reject", "ignore")
    found = read(*({"text": answer, "label": "x", "answer": answer} for answer in answers))
    assert [(record["label"], record["labels"]) for record in found.records] == [
        ("x", ["x"]),
        ("not x", []),
    ]
    assert found.left_out == {"ignored": 1}


def test_answers_about_several_labels_of_a_text_are_one_record() -> None:
    asked = [("a", "x", "accept"), ("a", "y", "reject"), ("a", "z", "accept"), ("b", "x", "reject")]
    found = read(*({"text": text, "label": label, "answer": a} for text, label, a in asked))
    assert [(record["text"], record["labels"]) for record in found.records] == [
        ("a", ["x", "z"]),
        ("b", []),
    ]
    assert found.unused == {"rows that are merged into the one about the same text": 2}


@pytest.mark.parametrize(("chosen", "label"), [(["a"], "a"), (["a", "b"], ["a", "b"]), ([], [])])
def test_choices_are_labels(chosen: list[str], label: Any) -> None:
    row = {"text": "t", "options": [{"id": "a"}, {"id": "b"}], "accept": chosen, "answer": "accept"}
    [record] = read(row).records
    assert (record["labels"], record["label"]) == (chosen, label)


def test_categories_of_spacy_are_labels() -> None:
    cats = {"a": 1.0, "b": 0.0, "c": 0.5}
    [record] = read({"text": "t", "cats": cats, "answer": "accept"}).records
    assert record["labels"] == ["a", "c"]


@pytest.mark.parametrize(
    ("name", "rows", "spans", "unused"),
    [
        ("demo.jsonl", 1, 1, {}),
        ("food_ingredients_first200.jsonl", 200, 416, {}),
        ("restaurant_reviews_first200.jsonl", 200, 415, {"versions before a review": 200}),
        ("rel_annotations.jsonl", 149, 466, {"relations": 267}),
    ],
)
def test_real_exports_have_their_published_counts(
    name: str, rows: int, spans: int, unused: dict[str, int], data_dir: Path
) -> None:
    path = data_dir / "prodigy" / name
    found = labelled_records(path.read_bytes(), str(path), "prodigy")
    assert len(found.records) == rows
    assert sum(len(record["spans"]) for record in found.records) == spans
    assert found.unused == unused


def test_real_choices_and_rejected_labels_have_their_published_counts(data_dir: Path) -> None:
    for name, wanted in (
        ("docs_issues_eval.jsonl", {"DOCUMENTATION": 165, "not DOCUMENTATION": 335}),
        ("nel_emerson.jsonl", {"Q312545": 10, "Q48226": 10, "Q215952": 10}),
    ):
        path = data_dir / "prodigy" / name
        found = labelled_records(path.read_bytes(), str(path), "prodigy")
        assert Counter(record["label"] for record in found.records) == wanted
