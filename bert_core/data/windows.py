"""What goes through an encoder as one: texts joined by special tokens, with what is to be read off.

A task makes windows of its rows; `bert_core.batches` lays them out as tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int, UInt32

from bert_core.data.tokenizer import Tokenizer

Ids = UInt32[np.ndarray, "_"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A sequence of ids, or several that are compared; a long row has more than one window."""

    row: int
    """Which of the encoded rows it belongs to, from 0."""
    ids: tuple[Ids, ...]
    """Its sequences, special tokens included: one, or one a choice."""
    segment_b_start: tuple[int, ...]
    """Where segment 1 begins in each; its length where there is none."""
    positions: Mapping[str, Int[np.ndarray, "_"]] = field(default_factory=dict)
    """Entry of the batch → which tokens of the only sequence are scored, ascending; of several
    sequences one token each."""
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Entry of the batch → what is right, (items, …); nothing where that is not known."""
    origin: Any = None
    """What the task needs to read an answer off the scores, such as the characters of tokens."""
    is_cut: bool = False
    """Whether the row has more than its windows hold."""

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, each counted as long as the longest."""
        return len(self.ids) * max(map(len, self.ids))

    @property
    def is_unlabelled(self) -> bool:
        """Whether labels are wanted of it and it has none, so that nothing is learned from it."""
        return bool(self.labels) and not any(map(len, self.labels.values()))


@dataclass(frozen=True, slots=True)
class Pieces:
    """A text in pieces, without special tokens."""

    ids: Ids
    offsets: Int[np.ndarray, "pieces 2"]
    """Characters of the text that each stands for: the first, and the one after the last."""
    words: Int[np.ndarray, "pieces"]
    """Which word of the text each belongs to, as the tokenizer divides it; -1 of a special one."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One or two texts with the special tokens around them."""

    ids: Ids
    segment_b_start: int
    """Where segment 1 begins; the length where there is none."""
    second_start: int
    """Where the second text begins; the length where there is none. The first begins at 1."""
    is_cut: bool = False
    """Whether the texts have more."""


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text, without special tokens."""
    encodings = tokenizer.encode_batch(texts)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def pieces_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Pieces]:
    """Each text in pieces that know where they come from."""
    return [
        Pieces(
            np.array(encoding.ids, dtype=np.uint32),
            np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2),
            np.array([-1 if one is None else one for one in encoding.word_ids], dtype=np.int64),
        )
        for encoding in tokenizer.inner.encode_batch(list(texts), add_special_tokens=False)
    ]


def joined(
    tokenizer: Tokenizer, first: Ids, second: Ids | None = None, max_length: int | None = None
) -> Joined:
    """`[CLS] first [SEP]`, or `[CLS] first [SEP] second [SEP]` as the tokenizer's model has it.

    Args:
        max_length: ids in all. Of a pair the longer text is cut first, and where both are cut an
            odd place goes to the longer, as tokenizers' `longest_first` does.
    """
    head, tail = [tokenizer.cls_id], [tokenizer.sep_id]
    if second is None:
        keep = None if max_length is None else max_length - 2
        ids = np.concatenate([head, first[:keep], tail]).astype(np.uint32)
        return Joined(ids, len(ids), len(ids), len(ids) < len(first) + 2)
    between = tail * tokenizer.separators
    whole = len(first) + len(second)
    if max_length is not None:
        room = max_length - len(between) - 2
        keep_first, keep_second = _fitted(len(first), len(second), room)
        first, second = first[:keep_first], second[:keep_second]
    ids = np.concatenate([head, first, between, second, tail]).astype(np.uint32)
    second_start = 1 + len(first) + len(between)
    segment_b_start = second_start if tokenizer.has_segments else len(ids)
    return Joined(ids, segment_b_start, second_start, len(first) + len(second) < whole)


def _fitted(first: int, second: int, room: int) -> tuple[int, int]:
    """How much of two texts to keep."""
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


def cut_rows(windows: Sequence[Window]) -> int:
    """How many rows have more than their windows hold."""
    return len({window.row for window in windows if window.is_cut})


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a long text's pieces."""

    first: int
    end: int
    own_first: int
    """The pieces from here to `own_end` are further from its ends than from those of any other."""
    own_end: int

    def holds(self, first: int, last: int) -> bool:
        """Whether it has the pieces from one to another."""
        return self.first <= first and last < self.end


def slices(pieces: int, room: int, stride: int) -> list[Slice]:
    """Slices of at most `room` pieces, of which two that follow each other share `stride`.

    Every piece is some slice's own, once. Raises: ValueError unless `stride` is below `room`.
    """
    if not 0 <= stride < room:
        raise ValueError(f"stride: wanted at least 0 and below {room} pieces, got {stride}")
    firsts = [0]
    while firsts[-1] + room < pieces:
        firsts.append(firsts[-1] + room - stride)
    cuts = [0, *(first + stride // 2 for first in firsts[1:]), pieces]
    return [
        Slice(first, min(first + room, pieces), own_first, own_end)
        for first, own_first, own_end in zip(firsts, cuts, cuts[1:], strict=False)
    ]
