"""Words of a text and their parts, defined once for every task and tokenizer.

Tokenizers disagree: WordPiece splits at punctuation, SentencePiece at white space only, byte-level
BPE between letters and digits too. So words are found in the characters, and pieces are mapped to
them. White space separates words. A part of a word is a punctuation mark, repeated or not, or the
text between two punctuation marks; in scripts that are written without spaces, every character.
Characters that normalisation removes, such as U+200B, belong to no part; a word of nothing else is
ignored.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

Spans = Int[np.ndarray, "words 2"]
"""Ranges of characters: the first, and the one after the last."""

# Kinds of characters.
SPACE, WORD, PUNCTUATION, UNSPACED, MARK, NOTHING = "swpumn"
_UNSPACED = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF),  # Thai and Lao, Myanmar, Khmer
    (0x3005, 0x3007), (0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F),  # Japanese
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF),  # Chinese characters
)  # fmt: skip
"""Code points of scripts in which no space separates words."""
_PART = re.compile(f"{WORD}(?:[{WORD}{MARK}{NOTHING}]*[{WORD}{MARK}])?|[{PUNCTUATION}{UNSPACED}]m*")
_INNER = re.compile(f"(?<={WORD}){PUNCTUATION}(?={WORD})")
_EVIDENCE = re.compile(f"[{WORD}{PUNCTUATION}{UNSPACED}]")
# How people write: no space before closing marks, after opening marks, or before suffixes.
_CLOSING = re.compile(r"[.,;:!?%)\]}»”’…]+")
_OPENING = re.compile(r"[(\[{«“‘¿¡]+")
_SUFFIX = re.compile(r"['’](?:s|d|m|t|re|ve|ll)", re.IGNORECASE)


class _Kinds(dict[int, str]):
    """Code point → kind of character, for `str.translate`; computed when first looked up."""

    def __missing__(self, code: int) -> str:
        self[code] = kind = _kind(chr(code))
        return kind


_KINDS = _Kinds()


def _kind(character: str) -> str:
    category = unicodedata.category(character)
    if character in "\t\n\r" or category[0] == "Z":
        return SPACE
    if category[0] == "C" or character == "\ufffd":  # BERT's tokenizer cleans text of them
        return NOTHING
    if category[0] == "M":
        return MARK
    if category[0] == "P" or character in string.punctuation:
        return PUNCTUATION
    code = ord(character)
    return UNSPACED if any(first <= code <= last for first, last in _UNSPACED) else WORD


def kinds_of(text: str) -> str:
    """Return the kinds of the characters of `text`, one letter each."""
    return text.translate(_KINDS)


def is_evidence(text: str) -> bool:
    """Whether a text has more than characters that normalisation may remove: white space, control
    and format characters (U+200B), marks that combine with nothing (U+FE0F, U+0301)."""
    return _EVIDENCE.search(kinds_of(text)) is not None


def parts_of(text: str) -> Spans:
    """Return the parts of all words of a text, in order. A combining mark belongs to the character
    that it modifies."""
    spans: list[tuple[int, int]] = []
    for match in _PART.finditer(kinds_of(text)):
        start, end = match.span()
        again = spans and spans[-1][1] == start and text[start:end] == text[start - 1]
        if again and match[0] == PUNCTUATION:
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class Units:
    """The parts of a text that a tokenizer tells apart: parts that share a piece are one unit."""

    spans: Spans
    parts: Int[np.ndarray, "units"]
    """The first part of each."""
    firsts: Int[np.ndarray, "units"]
    """The first piece of each."""
    ends: Int[np.ndarray, "units"]
    """The piece after the last of each."""


def units_of(parts: Spans, offsets: Int[np.ndarray, "pieces 2"]) -> Units:
    """Return the units of a text, given its parts and the characters of its pieces.

    A part without a piece, because normalisation removed it, is in no unit.
    """
    none = np.empty(0, dtype=np.int64)
    if not len(parts) or not len(offsets):
        return Units(none.reshape(0, 2), none, none, none)
    # For each piece, the first part of which it has characters; pieces of white space have none.
    part = np.minimum(np.searchsorted(parts[:, 1], offsets[:, 0], side="right"), len(parts) - 1)
    shared = np.minimum(parts[part, 1], offsets[:, 1]) - np.maximum(parts[part, 0], offsets[:, 0])
    pieces = np.flatnonzero(shared > 0)
    known, index, counts = np.unique(part[pieces], return_index=True, return_counts=True)
    firsts, ends = pieces[index], pieces[index + counts - 1] + 1
    # Parts without a piece of their own belong to the unit whose pieces cover them.
    reach = np.maximum.reduceat(offsets[pieces, 1], index) if len(index) else none
    next_known = np.append(known[1:], len(parts))
    last = np.searchsorted(parts[:, 0], reach, side="left") - 1
    last = np.clip(last, known, next_known - 1)
    spans = np.stack([parts[known, 0], parts[last, 1]], axis=1)
    return Units(spans, known, firsts, ends)


def in_one_word(text: str, spans: Spans) -> Bool[np.ndarray, "units"]:
    """Return for each unit whether it may belong to the same word as the unit before it.

    It may not after white space; nor in scripts without spaces, where a missing space says nothing;
    nor between two punctuation marks, such as `).`, which are seldom one word.
    """
    kinds, going_on = kinds_of(text), np.zeros(len(spans), dtype=bool)
    for place in range(1, len(spans)):
        before, start = spans[place - 1, 1] - 1, spans[place, 0]
        pair = kinds[before], kinds[start]
        going_on[place] = (
            SPACE not in kinds[before:start]
            and UNSPACED not in pair
            and pair != (PUNCTUATION, PUNCTUATION)
        )
    return going_on


def inner_marks(lists: Iterable[Sequence[str]]) -> str:
    """Return the punctuation marks, sorted, that occur more often within words, such as those of
    `1,2-dichloro`, than as separate words between two others.

    Args:
        lists: words of many texts.
    """
    within, alone = Counter[str](), Counter[str]()
    for tokens in lists:
        kinds = [kinds_of(token) for token in tokens]
        for token, of_token in zip(tokens, kinds, strict=True):
            within.update(token[match.start()] for match in _INNER.finditer(of_token))
        glued = glue_of(tokens)
        for place in range(1, len(tokens) - 1):
            pair = kinds[place - 1][-1:], kinds[place + 1][:1]
            if kinds[place] == PUNCTUATION and pair == (WORD, WORD) and not glued[place]:
                alone[tokens[place]] += 1
    return "".join(sorted(mark for mark, count in within.items() if count > alone[mark]))


def is_inner(text: str, spans: Spans, marks: str) -> Bool[np.ndarray, "units"]:
    """Return for each unit whether it certainly belongs to the same word as the unit before it: it
    is one of `marks`, or follows one, with word characters right before and after the mark."""
    kinds, inner = kinds_of(text), np.zeros(len(spans), dtype=bool)
    for place in range(1, len(spans) - 1):
        start, end = spans[place]
        if end - start == 1 and text[start] in marks and _INNER.match(kinds, start):
            inner[place : place + 2] = True
    return inner


def glue_of(tokens: Sequence[str]) -> Bool[np.ndarray, "words"]:
    """Return for each word whether people write it without a space before it.

    They write closing punctuation, words after an opening bracket, suffixes such as `'s`, and
    scripts without spaces that way. Quotes, which may open or close, get a space; so do marks that
    would become a longer mark if joined.
    """
    glued = np.zeros(len(tokens), dtype=bool)
    for place in range(1, len(tokens)):
        before, token = tokens[place - 1], tokens[place]
        if not (is_evidence(before) and is_evidence(token)):
            continue
        pair = {kinds_of(before)[-1], kinds_of(token)[0]}
        if pair == {PUNCTUATION} and before[-1] == token[0]:
            continue
        glued[place] = bool(
            _CLOSING.fullmatch(token)
            or _OPENING.fullmatch(before)
            or (UNSPACED in pair and pair <= {UNSPACED, PUNCTUATION, MARK})
            or (_SUFFIX.fullmatch(token) and WORD in pair)
        )
    return glued


def joined(
    tokens: Sequence[str], glued: Bool[np.ndarray, "words"] | None = None
) -> tuple[str, Spans]:
    """Join words to a text, with a space before each but the first and those that are `glued`.

    Returns: the text, and the range of characters of each word.
    """
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    spaces = np.ones_like(lengths) if glued is None else (~glued).astype(np.int64)
    spaces[:1] = 0
    ends = np.cumsum(lengths + spaces)
    text = "".join(" " * space + token for space, token in zip(spaces, tokens, strict=True))
    return text, np.stack([ends - lengths, ends], axis=1)


def crossed(
    glued: Int[np.ndarray, "words"], offsets: Int[np.ndarray, "pieces 2"]
) -> Bool[np.ndarray, "words"]:
    """Return which of these positions are within a piece, rather than at its beginning.

    Args:
        glued: positions of characters, ascending.
    """
    if not len(offsets):
        return np.zeros(len(glued), dtype=bool)
    before = np.searchsorted(offsets[:, 0], glued, side="left") - 1
    reach = np.maximum.accumulate(offsets[:, 1])
    return (before >= 0) & (reach[before] > glued)
