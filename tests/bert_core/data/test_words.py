"""Words and their parts: by characters, whatever tokenizer reads them."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_tokenizer
from bert_core.data.windows import pieces_of
from bert_core.data.words import (
    crossed,
    glue_of,
    in_one_word,
    inner_marks,
    is_evidence,
    is_inner,
    joined,
    parts_of,
    units_of,
)
from tests import tiny

TEXTS = ["We asked U.S. and O'Brien: 1,2-dichloro; AT&T (etc.) 北京 は トヨタ. jose\u0301 3€"] * 3
WORDPIECE = tiny.tokenizer([*tiny.pieces(tiny.LETTERS), *".,-'&:;()海京"])
TOKENIZERS = [
    WORDPIECE,
    train_tokenizer("bpe", TEXTS, vocab_size=300, lowercase=False),
    train_tokenizer("unigram", TEXTS, vocab_size=70, lowercase=False),
]
CHARACTERS = st.text("abЖ1.,-'’&()海京はト ก\u0301\u200b\ufe0f\xa0\n€👍", max_size=24)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("asked U.S. to", ["asked", "U", ".", "S", ".", "to"]),
        ("no... --", ["no", "...", "--"]),
        ("Jean-Pierre's IL2", ["Jean", "-", "Pierre", "'", "s", "IL2"]),
        ("我住在北京。", ["我", "住", "在", "北", "京", "。"]),
        ("トヨタは", ["ト", "ヨ", "タ", "は"]),
        ("ไปที่ ไหน", ["ไ", "ป", "ที่", "ไ", "ห", "น"]),  # marks belong to their letter
        ("한국 말", ["한국", "말"]),  # Korean has spaces
        ("jose\u0301 a\u200bb\u00ad c\u200d", ["jose\u0301", "a\u200bb", "c"]),
        ("می\u200cخواهم 👍\ufe0f ا", ["می\u200cخواهم", "👍\ufe0f", "ا"]),
        ("\u200b \ufe0f\u0301 \x00\n", []),
    ],
)
def test_parts_are_divided_by_spaces_punctuation_and_scripts_without_spaces(
    text: str, parts: list[str]
) -> None:
    assert [text[start:end] for start, end in parts_of(text)] == parts
    assert is_evidence(text) == bool(parts)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda one: one.kind)
@given(text=CHARACTERS)
@example(text="Ж海 \u200b")  # pieces after the last part are of no part
def test_units_are_in_order_apart_and_have_the_pieces_between_their_bounds(
    tokenizer: Tokenizer, text: str
) -> None:
    [pieces] = pieces_of(tokenizer, [text])
    parts = parts_of(text)
    units = units_of(parts, pieces.offsets)
    starts = set(parts[:, 0].tolist())
    assert (units.spans[:, 0] < units.spans[:, 1]).all()
    assert (units.spans[1:, 0] >= units.spans[:-1, 1]).all()
    assert set(units.spans[:, 0].tolist()) <= starts
    assert (units.firsts < units.ends).all()
    assert (units.firsts[1:] >= units.ends[:-1]).all()
    for (start, end), first in zip(units.spans, units.firsts, strict=True):
        assert pieces.offsets[first, 0] < end
        assert start < pieces.offsets[first, 1]
    # Every character that is evidence is in a unit, if the tokenizer keeps it.
    inside = np.zeros(len(text), bool)
    for start, end in units.spans:
        inside[start:end] = True
    for start, end in parts:
        kept = ((pieces.offsets[:, 0] < end) & (pieces.offsets[:, 1] > start)).any()
        assert inside[start:end].all() or not kept


def test_a_piece_of_two_parts_makes_them_one_unit() -> None:
    text = "in U.S. now"
    offsets = np.array([[0, 2], [3, 6], [6, 7], [8, 11]])
    units = units_of(parts_of(text), offsets)
    assert [text[start:end] for start, end in units.spans] == ["in", "U.S", ".", "now"]
    assert units.firsts.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "in_one"),
    [
        ("U.S. is", [False, True, True, True, False]),
        ("a).", [False, True, False]),
        ("...!", [False, False]),
        ("北京", [False, False]),
        ("北a", [False, False]),
    ],
)
def test_parts_may_be_of_one_word_where_no_space_and_no_script_without_is(
    text: str, in_one: list[bool]
) -> None:
    assert in_one_word(text, parts_of(text)).tolist() == in_one


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["We", "saw", "U.S.", ",", "O'Brien", "'s", "car", "(", "red", ")", "."],
         "We saw U.S., O'Brien's car (red)."),
        (["He", "said", '"', "no", '"', "!"], 'He said " no "!'),
        (["我", "住", "在", "北京", "。"], "我住在北京。"),
        (["トヨタ", "は", "Toyota", "か"], "トヨタは Toyota か"),
        (["a", "\u200b", ".", "", "b"], "a \u200b .  b"),
        (["in", "U.S.", ".", "...", "海", "海"], "in U.S. . ...海海"),
        ([], ""),
    ],
)  # fmt: skip
def test_words_are_joined_as_people_write_them(tokens: list[str], text: str) -> None:
    whole, spans = joined(tokens, glue_of(tokens))
    assert whole == text
    assert [whole[start:end] for start, end in spans] == tokens
    spaced, spans = joined(tokens)
    assert spaced == " ".join(tokens)
    assert [spaced[start:end] for start, end in spans] == tokens


@given(st.lists(st.text("ab.,'()-海", min_size=1, max_size=4), max_size=8))
def test_a_tokenizer_that_sees_no_spaces_reads_words_alike_however_they_are_joined(
    tokens: list[str],
) -> None:
    both = [joined(tokens)[0], joined(tokens, glue_of(tokens))[0]]
    first, second = (pieces.ids.tolist() for pieces in pieces_of(WORDPIECE, both))
    assert first == second


@pytest.mark.parametrize(
    ("rows", "marks"),
    [
        ([["IL-2", "and/or", "1.5", "AT&T", "U.S.", "."]], "&-./"),
        ([["non", "-", "Indian", "and", "a-b", "x-y", "no", "."], ["a", "-", "b"]], ""),
        ([["I'm", "the", "'", "cat", "'", "I'll"]], ""),
        ([["..", "-", "a-"], []], ""),
    ],
)
def test_marks_within_words_are_those_that_the_rows_have_there(
    rows: list[list[str]], marks: str
) -> None:
    assert inner_marks(rows) == marks


def test_marks_join_only_what_stands_right_beside_them() -> None:
    text = "IL-2 a- -b U.S. x--y a.b"
    joins = is_inner(text, parts_of(text), "-")
    assert [text[start:end] for start, end in parts_of(text)[joins]] == ["-", "2"]


def test_a_word_that_begins_within_a_piece_is_reported() -> None:
    offsets = np.array([[0, 2], [2, 5], [2, 3], [6, 7]])
    assert crossed(np.array([0, 2, 3, 4, 5, 6]), offsets).tolist() == [
        False, False, True, True, False, False
    ]  # fmt: skip
    assert crossed(np.array([0]), np.empty((0, 2), np.int64)).tolist() == [False]
