"""Several annotators of the same texts: whose labels are taken, and how far they agree."""

from typing import Any

import pytest

from bert_core.tasks.annotators import agreement, items_of, names_of, taken_of

TEXTS = ["Ada left Rome"] * 3 + ["b"] * 2 + ["c"]


def record(item: int, annotator: str | None, **more: Any) -> dict[str, Any]:
    return {"item": item, "annotator": annotator, **more}


def labelled(*labels: str) -> list[dict[str, Any]]:
    names = ("x", "y", "z", "x", "y", "x")
    items = (1, 1, 1, 2, 2, 3)
    return [
        record(item, name, label=label, labels=[label])
        for item, name, label in zip(items, names, labels, strict=True)
    ]


def test_items_are_those_of_several_annotators() -> None:
    records = labelled(*"aabaaa")
    assert items_of(records, TEXTS) == [[0, 1, 2], [3, 4]]
    assert names_of(records) == ["x", "y", "z"]
    others = [record(1, "x"), record(1, "x"), record(1, None), record(1, "y")]
    assert items_of(others, ["a"] * 3 + ["another text"]) == []


def test_each_annotator_is_a_row_or_one_alone() -> None:
    records = labelled(*"aabaaa")
    items = items_of(records, TEXTS)
    assert taken_of(records, items, "each").records == records
    taken = taken_of(records, items, "y")
    assert [each is not None for each in taken.records] == [False, True, False, False, True, False]
    assert taken.left_out == {"of other annotators": 4}


def test_the_majority_of_single_labels_is_the_most_frequent() -> None:
    records = labelled(*"abbabc")
    taken = taken_of(records, items_of(records, TEXTS), "majority")
    first, *others = taken.records
    assert first is not None
    assert (first["label"], first["labels"]) == ("b", ["b"])
    assert others == [None, None, None, None, records[5]]
    assert taken.left_out == {"without a majority": 1}, "a and b, once each"


def test_an_annotator_who_labelled_a_text_twice_has_one_vote_the_last() -> None:
    names, labels = ("x", "x", "y", "z"), ("a", "b", "b", "a")
    records = [record(1, name, label=each) for name, each in zip(names, labels, strict=True)]
    taken = taken_of(records, [[0, 1, 2, 3]], "majority")
    assert taken.records[0] is not None
    assert taken.records[0]["label"] == "b"


def test_the_majority_of_several_labels_and_spans_is_more_than_half() -> None:
    spans: list[Any] = [[0, 3, "person"], [9, 13, "place"]]
    by_name = {"start": 0, "end": 3, "label": "person", "text": "Ada"}
    records = [
        record(1, "x", labels=["a", "b"], label=["a", "b"], spans=spans, tone="good"),
        record(1, "y", labels=["b", "c"], label=["b", "c"], spans=[by_name], tone="bad"),
        record(1, "z", labels=["b"], label="b", spans=[[8, 13, "place"]], tone="good"),
    ]
    [agreed, *others] = taken_of(records, [[0, 1, 2]], "majority").records
    assert agreed is not None
    assert others == [None, None]
    assert (agreed["labels"], agreed["label"], agreed["tone"]) == (["b"], "b", "good")
    assert agreed["spans"] == spans[:1]
    [agreed, *_] = taken_of(records, [[0, 1]], "majority").records
    assert agreed is not None
    assert (agreed["spans"], agreed["tone"]) == (spans[:1], None)


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ("abbaba", "3 annotators of 2 texts: Krippendorff's alpha -0.333 for labels"),
        ("aaabba", "3 annotators of 2 texts: Krippendorff's alpha 1.000 for labels"),
    ],
)
def test_agreement_on_labels_is_told(labels: str, told: str) -> None:
    records = labelled(*labels)
    assert agreement(records, items_of(records, TEXTS), TEXTS) == told


def test_kappa_is_told_if_all_have_labelled_all() -> None:
    two = labelled(*"aabbaa")[:2] + labelled(*"aabbaa")[3:5]
    told = agreement(two, [[0, 1], [2, 3]], TEXTS[:4])
    assert told.endswith("Cohen's kappa 0.000 for labels")
    three = labelled(*"aabbaa")[:3]
    assert "Fleiss' kappa -0.500 for labels" in agreement(three, [[0, 1, 2]], TEXTS[:3])


def test_agreement_on_spans_is_of_parts_of_words_and_of_exact_spans() -> None:
    spans = ([[0, 3, "person"], [9, 13, "place"]], [[0, 3, "person"], [4, 13, "place"]])
    records = [record(1, name, spans=each) for name, each in zip("xy", spans, strict=True)]
    told = agreement(records, [[0, 1]], TEXTS[:2])
    assert told == (
        "2 annotators of 1 text: Krippendorff's alpha 0.545, Cohen's kappa 0.500, F1 0.500 for "
        "spans"
    )
    broken = [record(1, "x", spans=[{"start": None}, 3]), record(1, "y", spans=None)]
    assert agreement(broken, [[0, 1]], TEXTS[:2]) == "2 annotators of 1 text: no labels"
