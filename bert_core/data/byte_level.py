"""Where the pre-tokenizer of byte-level BPE splits (RoBERTa, Longformer, ModernBERT)."""

import string

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from jaxtyping import Integer, UInt8
from tokenizers import models, normalizers, pre_tokenizers

from bert_core.data.bulk import BulkEncoder, settings_of, words_at
from bert_core.data.ragged import offsets_of

LETTER, DIGIT, MARK, OTHER, SPACE, WHITE, UNKNOWN = range(7)
"""Kinds of bytes. OTHER is part of a character that is not white space; WHITE is white space apart
from a space; what is UNKNOWN may be white space."""
_SOLID = (LETTER, DIGIT, MARK, OTHER)
_KIND = np.full(256, UNKNOWN, dtype=np.uint8)
_KIND[list(string.ascii_letters.encode())] = LETTER
_KIND[list(string.digits.encode())] = DIGIT
_KIND[list(string.punctuation.encode())] = MARK
_KIND[list(b"\t\n\r")] = WHITE
_KIND[ord(" ")] = SPACE
_KIND[0x80:] = OTHER
# Characters outside ASCII whose kind is not OTHER: all that may be white space, and frequent ones.
_RANGES = (
    ("\u0085", "\u0085", UNKNOWN),
    ("\u00a0", "\u00a0", UNKNOWN),
    ("À", "Ö", LETTER),
    ("Ø", "ö", LETTER),
    ("ø", "ÿ", LETTER),
    ("\u1680", "\u1680", UNKNOWN),
    ("\u2000", "\u200a", UNKNOWN),
    ("\u2010", "\u2027", MARK),
    ("\u2028", "\u2029", UNKNOWN),
    ("\u202f", "\u202f", UNKNOWN),
    ("\u205f", "\u205f", UNKNOWN),
    ("\u3000", "\u3000", UNKNOWN),
)
# ASCII words without an apostrophe: no contraction begins in them, so each is a single match of the
# pre-tokenizer's regular expression.
_PLAIN = r"^ ?[!-&(-~]+$"
BECOMES_ASCII = "\u037e\u1fef\u212a"
"""The characters outside ASCII that NFC turns into ASCII: a semicolon, a grave accent and a K."""
HERE, EARLIER = 1, 2
# Indexed by the kinds of two adjacent bytes, first * 8 + second: HERE if a word begins with the
# second byte, EARLIER if a word begins with the first. "a  b" is cut into "a", " " and " b": "a "
# gives HERE, "  " gives nothing, and " b" gives EARLIER.
_BEGINS = np.zeros(64, dtype=np.uint8)
for _first in (LETTER, DIGIT, MARK):
    for _second in {LETTER, DIGIT, MARK} - {_first}:
        _BEGINS[_first * 8 + _second] = HERE
for _solid in _SOLID:
    _BEGINS[_solid * 8 + SPACE] = _BEGINS[_solid * 8 + WHITE] = HERE
    _BEGINS[SPACE * 8 + _solid] = EARLIER
    _BEGINS[WHITE * 8 + _solid] = HERE | EARLIER


class BulkByteLevel(BulkEncoder):
    """Words are cut where the kind of character changes, and at white space.

    The pre-tokenizer is one regular expression: contractions, else runs of letters, of digits or of
    other characters, each with a space before it if there is one, else white space, except that the
    last character of a run of white space is left for what follows. So a word begins where letters,
    digits and marks change, but not after an apostrophe; with white space after something else; and
    with the last white space before something else. Characters outside ASCII are separated from
    others only where their kind does not matter. The normalizers look at one character at a time,
    or compose it with the marks after it, which are of the same kind.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__(inner)
        if isinstance(inner.normalizer, normalizers.NFC):
            self._added += BECOMES_ASCII  # NFC may turn them into an added token
        self._lowercase = isinstance(inner.normalizer, normalizers.Lowercase)
        self._leading_space = settings_of(inner.pre_tokenizer)["add_prefix_space"]
        if self._leading_space:
            self._of_words = tokenizers.Tokenizer(inner.model)
            self._of_words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            if inner.normalizer is not None:
                self._of_words.normalizer = inner.normalizer

    @classmethod
    def supports(cls, inner: tokenizers.Tokenizer) -> bool:
        splits = settings_of(inner.pre_tokenizer)
        normalizer = settings_of(inner.normalizer).get("type")
        normalized = [
            one.content for one in inner.get_added_tokens_decoder().values() if one.normalized
        ]
        return (
            isinstance(inner.model, models.BPE)
            and not inner.model.dropout
            and splits.get("type") == "ByteLevel"
            and splits["use_regex"]
            and (
                normalizer is None
                or (normalizer == "Lowercase" and not normalized)
                or (normalizer == "NFC" and all(map(str.isascii, normalized)))
            )
        )

    def cut(
        self, data: UInt8[np.ndarray, "bytes"], row_offsets: Integer[np.ndarray, "rows_1"]
    ) -> tuple[pa.BinaryArray, Integer[np.ndarray, "rows_1"]]:
        if self._leading_space:
            data, row_offsets = _with_leading_spaces(data, row_offsets)
        kind = _kinds(data)
        begins_row = np.zeros(len(data) + 1, dtype=bool)
        begins_row[row_offsets] = True
        begins_word = begins_row[:-1]
        begins = _BEGINS[kind[:-1] * np.uint8(8) + kind[1:]]
        begins[begins_word[1:]] = 0
        apostrophes = np.flatnonzero(data[:-1] == ord("'"))
        begins[apostrophes[kind[apostrophes + 1] < OTHER]] = 0
        begins_word[1:] |= (begins & HERE).view(bool)
        begins_word[:-1] |= begins >= EARLIER
        return words_at(begins_word, data, row_offsets)

    def model_inputs(self, words: pa.StringArray) -> pa.StringArray:
        plain = pc.if_else(pc.match_substring_regex(words, _PLAIN), words, None)
        normal = pc.ascii_lower(plain) if self._lowercase else plain
        return pc.replace_substring(normal, " ", "Ġ")


def _with_leading_spaces(
    data: UInt8[np.ndarray, "bytes"], row_offsets: Integer[np.ndarray, "rows_1"]
) -> tuple[UInt8[np.ndarray, "bytes_and_spaces"], Integer[np.ndarray, "rows_1"]]:
    """Insert a space before every row that does not begin with one; empty rows stay empty.

    Returns: the new data and row offsets.
    """
    lacks_space = np.diff(row_offsets) > 0
    lacks_space[lacks_space] = data[row_offsets[:-1][lacks_space]] != ord(" ")
    spaced = np.insert(data, row_offsets[:-1][lacks_space], ord(" "))
    return spaced, row_offsets + offsets_of(lacks_space)


def _kinds(data: UInt8[np.ndarray, "bytes"]) -> UInt8[np.ndarray, "bytes"]:
    kind = _KIND[data]
    leads = np.flatnonzero(data >= 0xC2)
    lead_bytes = data[leads]
    for first, last, kind_of_range in _RANGES:
        *lead, low = first.encode()
        high = last.encode()[-1]
        places = leads[lead_bytes == lead[0]]
        for offset, byte in enumerate(lead[1:], 1):
            places = places[data[places + offset] == byte]
        final = data[places + len(lead)]
        places = places[(low <= final) & (final <= high)]
        for offset in range(len(lead) + 1):
            kind[places + offset] = kind_of_range
    return kind
