"""Windows: token sequences that pass through an encoder together, and the positions to score.

A task makes windows of its rows; `bert_core.batches` lays them out as tensors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int, Integer, UInt32

from bert_core.data.tokenizer import Tokenizer

Ids = UInt32[np.ndarray, "_"]
PAD_MULTIPLE = 8
"""The length of a padded sequence, in tokens, is a multiple of this."""
CHARACTERS_PER_ID = 8
"""How much of a long text is tokenized at first, per id that is wanted."""
_SPACE = re.compile(r"(?<=\S)[^\S\x0b\x0c\x1c-\x1f\x85]")
"""White space after something else. The control characters among it separate no words in BERT."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A text of which a sequence does not have all ids."""

    text: str
    """The text as it was tokenized."""
    ids: int
    """How many of its ids the sequence has."""
    name: str = ""
    """Which text of its row it is, such as `text_pair` or `choices[1]`; empty if it is the only one
    that can be cut."""
    from_end: bool = False
    """Whether the sequence has the ids of its end rather than those of its beginning."""
    prompt: int = 0
    """How many characters before the cut are not the row's; negative if the row has more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A sequence of ids, or several that are compared; a long row has more than one window."""

    row: int
    """Which of the encoded rows it belongs to, from 0."""
    ids: tuple[Ids, ...]
    """Its sequences, special tokens included: one, or one per choice."""
    segment_b_start: tuple[int, ...]
    """Where segment 1 begins in each; the sequence's length if there is none."""
    positions: Mapping[str, Int[np.ndarray, "_"]] = field(default_factory=dict)
    """Entry of the batch → which tokens of a single sequence are scored, ascending; of several
    sequences, one token each."""
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Entry of the batch → the right labels, (items, …); empty if they are unknown."""
    origin: Any = None
    """Whatever the task needs to turn scores into an answer, such as the characters of tokens."""
    cuts: tuple[Cut, ...] = ()
    """The texts of which not everything is in it."""
    lacks_answer: bool = False
    """Whether the row's right answer is in none of its windows."""

    @property
    def is_cut(self) -> bool:
        """Whether some part of the row is in none of its windows."""
        return bool(self.cuts) or self.lacks_answer

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences, each padded to the longest."""
        return len(self.ids) * max(map(len, self.ids))

    @property
    def is_unlabelled(self) -> bool:
        """Whether the window should have labels but has none: nothing is learned from it."""
        return bool(self.labels) and not any(map(len, self.labels.values()))


@dataclass(frozen=True, slots=True)
class Pieces:
    """A text in pieces, without special tokens."""

    ids: Ids
    offsets: Int[np.ndarray, "pieces 2"]
    """Range of characters that each covers: the first, and the one after the last."""
    words: Int[np.ndarray, "pieces"]
    """Which word of the text each belongs to, as the tokenizer splits it; -1 for special ones."""


@dataclass(frozen=True, slots=True)
class InputSequence:
    """One or two texts with the special tokens around them."""

    ids: Ids
    segment_b_start: int
    """Where segment 1 begins; the length if there is none."""
    second_start: int
    """Where the second text begins; the length if there is none. The first begins at 1."""
    lengths: tuple[int, ...]
    """How many ids it has of each text."""
    from_end: bool = False
    """Whether they are those of the text's end."""

    def cuts(self, *texts: tuple[str, str, Ids]) -> tuple[Cut, ...]:
        """Return a `Cut` for each of the sequence's texts that was cut.

        Args:
            texts: name, text and all ids of each text.
        """
        return tuple(
            Cut(text, length, name, self.from_end)
            for (name, text, ids), length in zip(texts, self.lengths, strict=True)
            if length < len(ids)
        )


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ids]:
    """Return the ids of each text, without special tokens."""
    return tokenizer.ids(texts)


def first_ids_of(
    tokenizer: Tokenizer, texts: Sequence[str], enough: int | None, *, from_end: bool = False
) -> list[Ids]:
    """Return the ids of each text as `ids_of` does, but for a long text only those of its
    beginning, more than `enough` of them.

    So the rest of a long text takes no time. Texts are cut at white space, where every tokenizer
    here begins a new word.

    Args:
        enough: number of ids; None returns all.
        from_end: whether to return ids of the end of a long text rather than its beginning.
    """
    if enough is None:
        return ids_of(tokenizer, texts)
    ids: list[Ids] = [np.empty(0, np.uint32)] * len(texts)
    remaining = list(range(len(texts)))
    characters = CHARACTERS_PER_ID * (enough + 1)
    while remaining:
        parts = [end_of(texts[at], characters, from_end=from_end) for at in remaining]
        too_few = []
        for at, part, part_ids in zip(remaining, parts, ids_of(tokenizer, parts), strict=True):
            ids[at] = part_ids
            if len(part) < len(texts[at]) and len(part_ids) <= enough:
                too_few.append(at)
        remaining, characters = too_few, 4 * characters
    return ids


def end_of(text: str, characters: int, *, from_end: bool) -> str:
    """Return the first `characters` of a text, or the last, extended to the whole word there."""
    if len(text) <= characters:
        return text
    if from_end:
        start = len(text) - characters
        while start > 0 and not _SPACE.match(text, start):
            start -= 1
        return text[start:]
    space = _SPACE.search(text, characters)
    return text if space is None else text[: space.start()]


def pieces_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Pieces]:
    """Return the pieces of each text, with their characters and words."""
    return [
        Pieces(
            np.array(encoding.ids, dtype=np.uint32),
            np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            np.array([-1 if one is None else one for one in encoding.word_ids], dtype=np.int64),
        )
        for encoding in tokenizer.inner.encode_batch(list(texts), add_special_tokens=False)
    ]


def with_special_tokens(
    tokenizer: Tokenizer,
    first: Ids,
    second: Ids | None = None,
    max_length: int | None = None,
    *,
    from_end: bool = False,
) -> InputSequence:
    """Return `[CLS] first [SEP]`, or `[CLS] first [SEP] second [SEP]` in its model's form.

    Args:
        max_length: maximum number of ids, special ones included; None keeps texts whole. In a pair,
            the longer text is cut first; if both are cut, the longer text gets the odd place, as in
            tokenizers' `longest_first`.
        from_end: whether a text that is cut keeps its end rather than its beginning.
    """
    head, tail = [tokenizer.cls_id], [tokenizer.sep_id]
    if second is None:
        if max_length is not None:
            first = kept_of(first, max_length - 2, from_end=from_end)
        ids = np.concatenate([head, first, tail]).astype(np.uint32)
        return InputSequence(ids, len(ids), len(ids), (len(first),), from_end)
    between = tail * tokenizer.separators
    if max_length is not None:
        room = max_length - len(between) - 2
        keep_first, keep_second = _fitted(len(first), len(second), room)
        first = kept_of(first, keep_first, from_end=from_end)
        second = kept_of(second, keep_second, from_end=from_end)
    ids = np.concatenate([head, first, between, second, tail]).astype(np.uint32)
    second_start = 1 + len(first) + len(between)
    segment_b_start = second_start if tokenizer.has_segments else len(ids)
    lengths = len(first), len(second)
    return InputSequence(ids, segment_b_start, second_start, lengths, from_end)


def kept_of(
    ids: Integer[np.ndarray, "_"], room: int, *, from_end: bool
) -> Integer[np.ndarray, "_"]:
    """Return the first `room` ids of a text; the last if `from_end`."""
    return ids[max(0, len(ids) - room) :] if from_end else ids[:room]


def _fitted(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many ids of two texts to keep, given their numbers and `room` for both."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


def cut_rows(windows: Sequence[Window]) -> int:
    """Count the rows of which some part is in no window."""
    return len({window.row for window in windows if window.is_cut})


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a long text's pieces."""

    first: int
    end: int
    own_end: int
    """Its own pieces end here, and begin at the `own_end` of the slice before: they are farther
    from its ends than from those of any other slice."""

    def holds(self, first: int, last: int) -> bool:
        """Whether the slice contains the pieces from `first` to `last`, both included."""
        return self.first <= first and last < self.end


def slices(pieces: int, room: int, stride: int) -> list[Slice]:
    """Divide a text into slices of at most `room` pieces; adjacent slices share `stride` pieces.

    Every piece is owned by exactly one slice. Raises: ValueError if `stride` is negative or not
    below `room`.

    Args:
        pieces: the number of pieces of the text.
    """
    if not 0 <= stride < room:
        raise ValueError(f"stride: wanted at least 0 and below {room} pieces, got {stride}")
    firsts = [0]
    while firsts[-1] + room < pieces:
        firsts.append(firsts[-1] + room - stride)
    own_ends = [*(first + stride // 2 for first in firsts[1:]), pieces]
    return [
        Slice(first, min(first + room, pieces), own_end)
        for first, own_end in zip(firsts, own_ends, strict=True)
    ]
