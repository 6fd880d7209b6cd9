"""Positions in texts, counted in code points here; tools in Java or JavaScript count UTF-16 units,
others bytes of UTF-8. Pure: no files.

Which it is can be recognised in rows whose spans have their own texts.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import numpy as np

PositionUnit = Literal["characters", "UTF-16 units", "bytes"]
_WIDTHS = {"UTF-16 units": (1, 1, 1, 2), "bytes": (1, 2, 3, 4)}
"""How many units the characters take whose UTF-8 has 1, 2, 3 and 4 bytes."""
_BOUNDS = (0x80, 0x800, 0x10000)


def characters_at(text: str, positions: Sequence[int], unit: PositionUnit) -> list[int | None]:
    """Return the same positions in code points; None for a position within a character, or outside
    the text."""
    if unit == "characters":
        return [place if 0 <= place <= len(text) else None for place in positions]
    kinds = np.searchsorted(_BOUNDS, [ord(each) for each in text], side="right")
    starts = np.append(0, np.cumsum(np.array(_WIDTHS[unit])[kinds]))
    places = np.searchsorted(starts, positions)
    return [
        int(place) if place < len(starts) and starts[place] == position else None
        for place, position in zip(places, positions, strict=True)
    ]


def unit_of(spans: Iterable[tuple[str, int, int, str]]) -> PositionUnit:
    """Return the unit with which the fewest spans differ from their own texts; characters, if other
    units are no better.

    Args:
        spans: text, start, end, and the span's own text; those of a text one after another.
    """
    wrong: dict[PositionUnit, int] = {"characters": 0, "UTF-16 units": 0, "bytes": 0}
    for text, of_text in groupby(spans, key=itemgetter(0)):
        here = list(of_text)
        in_characters = sum(text[start:end] != own for _, start, end, own in here)
        for unit in wrong:
            if unit == "characters" or text.isascii():
                wrong[unit] += in_characters
                continue
            flat = [place for _, start, end, _ in here for place in (start, end)]
            places = characters_at(text, flat, unit)
            for first, last, (_, _, _, own) in zip(places[::2], places[1::2], here, strict=True):
                wrong[unit] += first is None or last is None or text[first:last] != own
    return min(wrong, key=lambda unit: wrong[unit])


def in_characters(
    records: Sequence[Mapping[str, Any]], text: str, spans: str
) -> tuple[Sequence[Mapping[str, Any]], PositionUnit]:
    """Return the records with positions of characters, and the unit that they were in.

    A position within a character, or outside the text, is left as it is: no span fits it.

    Args:
        text: the column of the texts.
        spans: the column of lists of spans, of which some have a `text` of their own.
    """
    unit = unit_of(
        (record[text], span["start"], span["end"], span["text"])
        for record in records
        for span in _spans_in(record, text, spans)
        if isinstance(span.get("text"), str)
    )
    if unit == "characters":
        return records, unit
    return [_converted(record, text, spans, unit) for record in records], unit


def _spans_in(record: Mapping[str, Any], text: str, spans: str) -> list[Mapping[str, Any]]:
    """Return the spans of a record that have whole numbers for positions."""
    cell = record.get(spans)
    if not isinstance(record.get(text), str) or not isinstance(cell, list):
        return []
    return [
        span
        for span in cell
        if isinstance(span, Mapping)
        and all(type(span.get(name)) is int and span[name] >= 0 for name in ("start", "end"))
    ]


def _converted(
    record: Mapping[str, Any], text: str, spans: str, unit: PositionUnit
) -> Mapping[str, Any]:
    if not (sound := _spans_in(record, text, spans)) or record[text].isascii():
        return record
    flat = [span[name] for span in sound for name in ("start", "end")]
    places = iter(characters_at(record[text], flat, unit))
    new = []
    for span in record[spans]:
        if any(span is each for each in sound):
            start, end = next(places), next(places)
            if start is not None and end is not None:
                span = {**span, "start": start, "end": end}
        new.append(span)
    return {**record, spans: new}
