"""Positions in other units than characters: recognised by the spans' own texts, and converted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_core.data.positions import PositionUnit, characters_at, in_characters, unit_of

ENCODINGS: dict[PositionUnit, tuple[str, int]] = {
    "characters": ("utf-32-le", 4),
    "UTF-16 units": ("utf-16-le", 2),
    "bytes": ("utf-8", 1),
}
TEXT = st.text(st.sampled_from("aé海😀𝔸\u0301 "), max_size=20)


def position(text: str, place: int, unit: PositionUnit) -> int:
    """Counted by Python's encoders."""
    encoding, size = ENCODINGS[unit]
    return len(text[:place].encode(encoding)) // size


@pytest.mark.parametrize("unit", ENCODINGS)
@given(text=TEXT)
def test_positions_in_any_unit_become_characters(unit: PositionUnit, text: str) -> None:
    places = list(range(len(text) + 1))
    given_ = [position(text, place, unit) for place in places]
    assert characters_at(text, given_, unit) == places
    within = sorted({*range(given_[-1] + 3)} - {*given_})
    assert characters_at(text, within, unit) == [None] * len(within)


@pytest.mark.parametrize("unit", ENCODINGS)
def test_the_unit_is_recognised_by_the_spans_own_texts(unit: PositionUnit) -> None:
    text = "😀 naïve Ada in Paris"
    wanted: list[Any] = [
        {"start": 8, "end": 11, "label": "x", "text": "Ada"},
        {"start": 1, "end": 2},
        3,
    ]
    spans: list[Any] = [
        one if one == 3 else one | {n: position(text, one[n], unit) for n in ("start", "end")}
        for one in wanted
    ]
    odd = {"body": "a", "ents": None}
    records, found = in_characters([{"body": text, "ents": spans}, odd], "body", "ents")
    assert found == unit
    assert records == [{"body": text, "ents": wanted}, odd]


def test_characters_are_counted_where_nothing_says_otherwise() -> None:
    assert unit_of([]) == "characters"
    assert unit_of([("😀 Ada", 2, 5, "Eve")]) == "characters", "a wrong text is no evidence"
    broken = [{"text": "😀 Ada", "spans": [{"start": 1, "end": 6, "text": "Ada"}] * 2}]
    sound = {"text": "😀 Ada", "spans": [{"start": 3, "end": 6, "text": "Ada"}] * 3}
    records, unit = in_characters([*broken, sound], "text", "spans")
    assert unit == "UTF-16 units"
    assert records[0] == broken[0], "a position within a character stays, and is refused"
