"""Entities beside conlleval's own rules, written down a second time from its source."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_core.metrics.entities import (
    SCHEMES,
    Entity,
    Scheme,
    breaks,
    entities_of,
    entity_metrics,
    recognised,
    tags_of,
)

TAGS = ["O", *(f"{prefix}-{kind}" for prefix in "BIESLU" for kind in ("per", "loc"))]
SENTENCE = st.lists(st.tuples(st.sampled_from(["per", "loc", "a-b", None]), st.integers(1, 4)))
"""Kinds, None for words outside, and how many words each has."""
Layout = list[tuple[str | None, int]]


def conlleval(tags: list[str]) -> set[tuple[str, int, int]]:
    """Chunks by conlleval's startOfChunk and endOfChunk, with E and L as its end and S and U as its
    single; and with an end before every B, which conlleval lacks after an E of the same type."""
    chunks, begin, before, before_kind = set(), 0, "O", ""
    for place, whole in enumerate([*tags, "O"]):
        tag, _, kind = whole.partition("-")
        tag = {"L": "E", "U": "S"}.get(tag, tag)
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


BIOE = ["O", *(f"{prefix}-{kind}" for prefix in "BIE" for kind in "xy")]
SEQUENCES = [
    tags
    for length in range(1, 6)
    for tags in product(BIOE, repeat=length)
    if not any(begin == f"B{end[1:]}" for end, begin in pairwise(tags) if end[0] == "E")
]


def test_entities_are_those_that_conlleval_itself_found() -> None:
    """The script of 2004-01-26 (sha256 73474d28…, Perl 5.36) was given these tags as the right ones
    and our entities, written as BIO, as the found ones: 57,604 phrases, found and correct 57,604.

    seqeval 1.2.2 finds the same in all 7,380 sequences of up to four tags, also with S.
    """
    assert len(SEQUENCES) == 16627
    assert sum(len(entities_of(tags)) for tags in SEQUENCES) == 57604


@pytest.mark.parametrize(
    ("tags", "seqeval", "conlleval_phrases"),
    [
        (["E-x", "B-x"], [("x", 0, 1), ("x", 1, 2)], 1),
        (["B-x", "E-x", "B-x"], [("x", 0, 2), ("x", 2, 3)], 1),
        (["E-x", "B-x", "E-x", "B-y"], [("x", 0, 1), ("x", 1, 3), ("y", 3, 4)], 2),
    ],
)
def test_a_beginning_after_an_end_is_another_entity_as_in_seqeval(
    tags: list[str], seqeval: list[tuple[str, int, int]], conlleval_phrases: int
) -> None:
    """By seqeval 1.2.2's `get_entities`, and by the script above, which has no such rule."""
    assert [tuple(entity) for entity in entities_of(tags)] == seqeval
    assert len(seqeval) > conlleval_phrases


def laid_out(layout: Layout) -> list[Entity]:
    entities, place = [], 0
    for kind, words in layout:
        if kind is not None:
            entities.append(Entity(kind, place, place + words))
        place += words
    return entities


def rendered(layout: Layout, scheme: Scheme) -> list[str]:
    """Tags as the schemes' authors say: of each word where in its entity it stands, and of IOB1
    (Ramshaw and Marcus 1995) what stands before it."""
    tags: list[str] = []
    for number, (kind, words) in enumerate(layout):
        for word in range(words):
            first, last = word == 0, word == words - 1
            if kind is None:
                prefix = "O"
            elif scheme == "IOB1":
                follows = number > 0 and layout[number - 1][0] == kind
                prefix = "B" if first and follows else "I"
            elif scheme == "BIO":
                prefix = "B" if first else "I"
            else:
                single, end = ("S", "E") if scheme == "BIOES" else ("U", "L")
                prefix = single if first and last else "B" if first else end if last else "I"
            tags.append(prefix if kind is None else f"{prefix}-{kind}")
    return tags


@pytest.mark.parametrize("scheme", SCHEMES)
@given(layout=SENTENCE)
def test_entities_are_written_in_a_scheme_and_read_back(scheme: Scheme, layout: Layout) -> None:
    tags, entities = rendered(layout, scheme), laid_out(layout)
    assert entities_of(tags) == entities
    assert tags_of(entities, len(tags), scheme) == tags
    assert breaks(tags, scheme) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@given(layouts=st.lists(SENTENCE))
def test_the_scheme_recognised_is_one_that_no_tag_breaks(
    scheme: Scheme, layouts: list[Layout]
) -> None:
    sentences = [rendered(layout, scheme) for layout in layouts]
    found, broken = recognised(sentences)
    assert broken == 0
    assert sentences == [rendered(layout, found) for layout in layouts]
    assert recognised(sentences, scheme) == (scheme, 0)


@given(st.lists(st.lists(st.sampled_from(TAGS), max_size=8), max_size=4))
def test_no_scheme_is_broken_by_fewer_tags_than_the_one_recognised(
    sentences: list[list[str]],
) -> None:
    found, broken = recognised(sentences)
    counts = [sum(breaks(tags, scheme) for tags in sentences) for scheme in SCHEMES]
    assert broken == min(counts)
    assert found == SCHEMES[counts.index(broken)]  # the first of several


@pytest.mark.parametrize(
    ("tags", "scheme", "broken"),
    [
        ("", "BIO", 0),
        ("O O", "BIO", 0),
        ("B-per O B-loc", "BIO", 0),
        ("I-per O I-loc", "IOB1", 0),
        ("I-per B-per", "IOB1", 0),
        ("I-per I-loc I-loc", "IOB1", 0),
        ("B-per I-per O I-loc O B-loc", "BIO", 1),
        ("S-per O B-loc E-loc B-per O", "BIOES", 1),
        ("U-per", "BILOU", 0),
        ("B-per L-per O I-loc", "BILOU", 1),
    ],
)
def test_tags_are_of_the_scheme_that_the_fewest_break(
    tags: str, scheme: Scheme, broken: int
) -> None:
    assert recognised([tags.split()]) == (scheme, broken)


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


def test_tags_that_a_scheme_would_not_have_there_are_counted() -> None:
    tags = ["O", "I-per", "I-per", "B-loc", "I-per", "E-per", "O"]
    assert {scheme: breaks(tags, scheme) for scheme in SCHEMES} == {
        "BIO": 3,  # B-per, and B-per I-per at the end
        "IOB1": 2,  # I-loc, and I-per at the end
        "BIOES": 4,  # B-per E-per S-loc B-per
        "BILOU": 5,  # B-per L-per U-loc B-per L-per
    }


def test_precision_recall_and_f1_are_of_all_rows_together() -> None:
    counts = {"correct": [1, 1], "predicted": [2, 1], "wanted": [1, 3]}
    found = entity_metrics({name: np.array(each) for name, each in counts.items()})
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["recall"] == 0.5
    assert found["f1"] == pytest.approx(2 * 2 / (3 + 4))
    nothing = {name: np.array([0]) for name in counts}
    assert entity_metrics(nothing) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}
