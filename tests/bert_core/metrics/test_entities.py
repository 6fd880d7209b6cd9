"""Entities beside conlleval's own rules, written down a second time from its source."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_core.metrics.entities import breaks, entities_of, entity_metrics

TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("per", "loc"))]


def conlleval(tags: list[str]) -> set[tuple[str, int, int]]:
    """Chunks by conlleval's startOfChunk and endOfChunk, with E as its end and S as its single."""
    chunks, begin, before, before_kind = set(), 0, "O", ""
    for place, whole in enumerate([*tags, "O"]):
        tag, _, kind = whole.partition("-")
        ends = (
            before in ("E", "S")
            or (before in ("B", "I") and tag in ("B", "S", "O"))
            or (before not in ("O",) and before_kind != kind)
        )
        starts = tag in ("B", "S") or (
            tag in ("E", "I") and (before in ("E", "S", "O") or before_kind != kind)
        )
        if before != "O" and ends:
            chunks.add((before_kind, begin, place))
        if starts:
            begin = place
        before, before_kind = tag, kind
    return chunks


@settings(max_examples=500)
@given(st.lists(st.sampled_from(TAGS), max_size=12))
def test_entities_are_conllevals_whatever_the_tags(tags: list[str]) -> None:
    assert {tuple(entity) for entity in entities_of(tags)} == conlleval(tags)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-per I-per O B-loc", [("per", 0, 2), ("loc", 3, 4)]),
        ("I-per I-per B-per", [("per", 0, 2), ("per", 2, 3)]),  # IOB1
        ("B-per I-loc", [("per", 0, 1), ("loc", 1, 2)]),
        ("S-per B-loc E-loc", [("per", 0, 1), ("loc", 1, 3)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_of_each_scheme(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert [tuple(entity) for entity in entities_of(tags.split())] == found


def test_tags_that_continue_nothing_are_counted() -> None:
    assert breaks(["O", "I-per", "I-per", "B-loc", "I-per", "E-per", "O"]) == 2
    assert breaks(["B-per", "I-per", "O", "S-loc", "B-loc", "E-loc"]) == 0


def test_precision_recall_and_f1_are_of_all_rows_together() -> None:
    counts = {"correct": [1, 1], "predicted": [2, 1], "wanted": [1, 3]}
    found = entity_metrics({name: np.array(each) for name, each in counts.items()})
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["recall"] == 0.5
    assert found["f1"] == pytest.approx(2 * 2 / (3 + 4))
    nothing = {name: np.array([0]) for name in counts}
    assert entity_metrics(nothing) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
