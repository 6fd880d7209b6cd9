"""Labelled rows that mark spans of a text by their characters: how they are checked, and the tags
that a tagger learns from them.

Positions are code points of the text as it is given. A span is read from its first to its last part
of a word (`bert_core.data.words`), so white space and characters that normalisation removes at its
ends are no part of it. A span may cut a word: the tagger then learns it for the whole part of the
word, since it cannot tell a part's letters apart, and answers are compared with the span as it is
annotated.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

from bert_core.data.words import Spans, parts_of
from bert_core.errors import InputError
from bert_core.metrics.entities import Entity
from bert_core.tasks.shapes import Label, Row
from bert_core.wording import as_json, shown

Overlaps = Literal["refuse", "longest"]
Mark = tuple[str, int, int]
"""Type or tag, start character, and end character (exclusive)."""


SHOWN = 3
"""How many spans that cut a word a remark shows."""


class Span(TypedDict):
    """A labelled span of a text."""

    start: int
    """Its first character."""
    end: int
    """The character after its last."""
    label: Label
    text: NotRequired[str | None]
    """Its characters, which are compared with those of the row's text."""


def check_spans(row: Row, overlaps: Overlaps | None) -> None:
    """Check the spans of a row against its text.

    Args:
        overlaps: how spans that overlap are treated; None if they may.
    Raises: InputError if a span is not within the text, has a text of its own that differs, or
        overlaps another one although `overlaps` refuses that.
    """
    text = row["text"]
    for span in row["spans"]:
        start, end = span.get("start"), span.get("end")
        if not (_is_whole(start) and _is_whole(end) and isinstance(span.get("label"), str)):
            raise InputError(
                "wanted spans with whole numbers start and end, and a label, got "
                f"{shown(span)}: correct the row, or remove it"
            )
        if not span["label"].strip():
            raise InputError(
                f"wanted a label in every span, got {as_json(span)}: correct the row, or remove it"
            )
        if not 0 <= start < end <= len(text):
            raise InputError(
                f"wanted spans within the text's {len(text):,} characters, got one from {start} "
                f"to {end} ({span['label']}): correct the row, or remove it"
            )
        own = span.get("text")
        if own not in (None, text[start:end]):
            raise InputError(
                f"wanted the span's own text, {as_json(own)}, at {start} to {end}, got "
                f"{as_json(text[start:end])}: correct the row, or remove it"
            )
    if overlaps == "refuse" and (pair := _overlap(marks_in(row))) is not None:
        (label, start, end), (other, begins, ends) = pair
        raise InputError(
            "wanted spans that do not overlap, since a word has one tag, got "
            f"{as_json(text[start:end])} ({label}, {start} to {end}) and "
            f"{as_json(text[begins:ends])} ({other}, {begins} to {ends}): correct the row, remove "
            'it, or set options.overlapping_spans = "longest" to keep the longest of such spans'
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _overlap(marks: Sequence[Mark]) -> tuple[Mark, Mark] | None:
    """Return the first two of the marks, sorted by start, that overlap."""
    for before, mark in pairwise(marks):
        if mark[1] < before[2]:
            return before, mark
    return None


def clipped(spans: Sequence[Mapping[str, Any]], parts: Spans) -> list[Mark]:
    """Return the marks of spans without what is outside the parts of words at their ends, without
    those of which nothing is left, and each only once; sorted by start and end."""
    marks = set[Mark]()
    for span in spans:
        first, end = units_in((span["label"], span["start"], span["end"]), parts)
        if first < end:
            start = max(span["start"], int(parts[first, 0]))
            marks.add((span["label"], start, min(span["end"], int(parts[end - 1, 1]))))
    return sorted(marks, key=lambda mark: (mark[1], mark[2], mark[0]))


def marks_in(row: Row) -> list[Mark]:
    """Return all spans of a row as marks, as `clipped` does."""
    return clipped(row["spans"], parts_of(row["text"]))


def longest(marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks without those that overlap a longer one, or an earlier one of the same
    length, that is kept; sorted by start. The rule of spaCy's `filter_spans`."""
    kept: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark[1] - mark[2], mark[1])):
        place = bisect_left(kept, mark[1], key=lambda other: other[2])
        if place < len(kept) and kept[place][2] == mark[1]:
            place += 1  # ends where the mark begins
        if place == len(kept) or mark[2] <= kept[place][1]:
            kept.insert(place, mark)
    return kept


def is_cutting(mark: Mark, parts: Spans) -> bool:
    """Whether a clipped mark begins or ends within a part of a word."""
    first, end = units_in(mark, parts)
    return bool(parts[first, 0] != mark[1] or parts[end - 1, 1] != mark[2])


def units_in(mark: Mark, units: Spans) -> tuple[int, int]:
    """Return the first unit of which a mark has characters, and the one after the last."""
    first = int(np.searchsorted(units[:, 1], mark[1], side="right"))
    return first, int(np.searchsorted(units[:, 0], mark[2], side="left"))


def entities_in(marks: Sequence[Mark], units: Spans) -> list[Entity]:
    """Return the entities that these spans are, in the units of a text: a unit belongs to the span
    that has most of its characters, or the first of those.

    Args:
        marks: sorted by start, and not overlapping.
    """
    owners = np.full(len(units), -1)
    shares = np.zeros(len(units), dtype=np.int64)
    for place, (_, start, end) in enumerate(marks):
        first, last = units_in(("", start, end), units)
        share = np.minimum(units[first:last, 1], end) - np.maximum(units[first:last, 0], start)
        more = first + np.flatnonzero(share > shares[first:last])
        owners[more], shares[more] = place, share[more - first]
    entities = []
    for place, (label, _, _) in enumerate(marks):
        owned = np.flatnonzero(owners == place)
        if len(owned):
            entities.append(Entity(label, int(owned[0]), int(owned[-1]) + 1))
    return entities


def remarks_on_spans(rows: Sequence[Row], *, may_overlap: bool = False) -> dict[str, int | str]:
    """Return notes on spans that are not learned as they are annotated.

    Args:
        rows: rows with a text and spans.
        may_overlap: whether spans that overlap are learned too.
    """
    empty = trimmed = cutting = overlapping = 0
    examples: list[str] = []
    for row in rows:
        parts = parts_of(row["text"])
        marks = clipped(row["spans"], parts)
        bounds = {(start, end) for _, start, end in marks}
        for span in row["spans"]:
            alone = clipped([span], parts)
            empty += not alone
            trimmed += bool(alone) and (span["start"], span["end"]) not in bounds
        kept = marks if may_overlap else longest(marks)
        overlapping += len(marks) - len(kept)
        for mark in kept:
            if is_cutting(mark, parts):
                cutting += 1
                examples += [] if len(examples) == SHOWN else [_shown_cut(row["text"], mark)]
    return {
        "spans_without_a_word": empty,
        "spans_with_white_space_removed": trimmed,
        "spans_left_out_since_they_overlap": overlapping,
        "spans_that_cut_a_word": f"{cutting:,} ({', '.join(examples)})" if cutting else "",
    }


def _shown_cut(text: str, mark: Mark) -> str:
    """Return a span with brackets in the text around it: `[Lond]oner`."""
    _, start, end = mark
    before = text[:start].split()[-1:] if start and not text[start - 1].isspace() else []
    after = text[end:].split()[:1] if end < len(text) and not text[end].isspace() else []
    return f"{''.join(before)[-20:]}[{text[start:end][-40:]}]{''.join(after)[:20]}"
