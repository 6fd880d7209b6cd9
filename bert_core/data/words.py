"""Words of a text and their parts, defined once for every task and tokenizer.

Tokenizers disagree: WordPiece splits at punctuation, SentencePiece at white space only, byte-level
BPE between letters and digits too. So words are found in the characters, and pieces are mapped to
them. White space separates words. A part of a word is a punctuation mark, repeated or not, or what
stands between two; in scripts that are written without spaces, every character. What normalisation
removes, such as U+200B, belongs to no part, and a word that has nothing else is no evidence of
anything.
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
# As people write them: no space before the first, none after the second, none before the third.
_CLOSING = re.compile(r"[.,;:!?%)\]}»”’…]+")
_OPENING = re.compile(r"[(\[{«“‘¿¡]+")
_SUFFIX = re.compile(r"['’](?:s|d|m|t|re|ve|ll)", re.IGNORECASE)


class _Kinds(dict[int, str]):
    """Code point → kind of character, filled as they occur; for `str.translate`."""

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
    """The kind of each character."""
    return text.translate(_KINDS)


def is_evidence(text: str) -> bool:
    """Whether anything is left of a text when what normalisation may remove is gone: white space,
    control and format characters (U+200B), marks that combine with nothing (U+FE0F, U+0301)."""
    return _EVIDENCE.search(kinds_of(text)) is not None


def parts_of(text: str) -> Spans:
    """The parts of all words of a text, in order; combining marks belong to what they mark."""
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
    """The units of a text from its parts and the characters of its pieces.

    A part of which no piece is left is in no unit.
    """
    none = np.empty(0, dtype=np.int64)
    if not len(parts) or not len(offsets):
        return Units(none.reshape(0, 2), none, none, none)
    # The first part of which a piece has characters; pieces of white space have none.
    part = np.minimum(np.searchsorted(parts[:, 1], offsets[:, 0], side="right"), len(parts) - 1)
    pieces = np.flatnonzero((parts[part, 0] < offsets[:, 1]) & (offsets[:, 0] < offsets[:, 1]))
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
    """For each unit, whether it may go on with the word of the one before it.

    It does not after white space; nor where no space would be in any case, in scripts without; nor
    between two punctuation marks, such as `).`, which are seldom one word.
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
    """The punctuation marks that stand within words, such as those of `1,2-dichloro`, rather than
    as words of their own between two others; sorted.

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
    """For each unit, whether it is certainly of the word of the one before it: at one of `marks`
    with something else right before and after it."""
    kinds, inner = kinds_of(text), np.zeros(len(spans), dtype=bool)
    for place in range(1, len(spans) - 1):
        start, end = spans[place]
        if end - start == 1 and text[start] in marks and _INNER.match(kinds, start):
            inner[place : place + 2] = True
    return inner


def glue_of(tokens: Sequence[str]) -> Bool[np.ndarray, "words"]:
    """For each word, whether people write it without a space before it.

    So are punctuation marks after a word and a bracket before one, `'s`, and scripts without
    spaces. Quotes, which may open or close, get one, and so do marks that would become a longer
    one.
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
    """Words with a space before each but the first and those that are `glued`, and the characters
    of each."""
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    spaces = np.ones_like(lengths) if glued is None else (~glued).astype(np.int64)
    spaces[:1] = 0
    ends = np.cumsum(lengths + spaces)
    text = "".join(" " * space + token for space, token in zip(spaces, tokens, strict=True))
    return text, np.stack([ends - lengths, ends], axis=1)


def crossed(
    glued: Int[np.ndarray, "words"], offsets: Int[np.ndarray, "pieces 2"]
) -> Bool[np.ndarray, "words"]:
    """Which of these characters, ascending, begin within a piece."""
    if not len(offsets):
        return np.zeros(len(glued), dtype=bool)
    before = np.searchsorted(offsets[:, 0], glued, side="left") - 1
    reach = np.maximum.accumulate(offsets[:, 1])
    return (before >= 0) & (reach[before] > glued)
