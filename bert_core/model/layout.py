"""How the rows of a batch are laid out: padded to one width, or packed end to end without padding.

B is the number of rows, S the length of the longest. A tensor with one entry per token starts with
the layout's dimensions, `*tokens`: (B, S) for padded rows, (T,) for packed rows, where T is the
total number of tokens. Modules that work on one token at a time need no layout. A token's place is
its index in the flattened `*tokens`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROW_BY_ROW = 48
"""Mean tokens per row from which a fused kernel on a CPU takes one row at a time; with shorter
rows, calls cost more than padding."""
BIN_TOKENS = 64
"""Tokens of a bin, unless a row is longer."""
WIDTH_MULTIPLE = 8
"""A bin's width is a multiple of this."""


class RowLayout(ABC):
    """The layout of a batch."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Return S: the number of tokens of the longest row, padding included."""

    @abstractmethod
    def positions(self) -> Int[Tensor, "..."]:
        """Return each token's position in its row, from 0; broadcasts to `*tokens`."""

    @abstractmethod
    def starts(self) -> Int[Tensor, "batch"]:
        """Return the place of the first token of every row."""

    def first(self, tokens: Float[Tensor, "*tokens size"]) -> Float[Tensor, "batch size"]:
        """Return the first token of every row."""
        return gather_tokens(tokens, self.starts())

    @abstractmethod
    def mean(self, tokens: Float[Tensor, "*tokens size"]) -> Float[Tensor, "batch size"]:
        """Return the mean of every row's real tokens."""

    @abstractmethod
    def blocks(self, tokens: Float[Tensor, "..."]) -> Sequence[Tensor]:
        """Return the tokens in blocks (b, s, size) of rows that are computed together."""

    @abstractmethod
    def from_blocks(self, blocks: Sequence[Tensor]) -> Float[Tensor, "..."]:
        """Do the reverse of `blocks`."""

    @abstractmethod
    def masks(self) -> Sequence[Tensor | None]:
        """Return which tokens of each block are real, (b, s) bool; None if all are."""


class Padded(RowLayout):
    """Rows padded to one width. `mask` is 1 at real tokens, or None if all are real; with (B, S, S)
    it says which tokens (last) each token may attend to. `placed` are positions that differ from
    the places in the row."""

    def __init__(
        self,
        input_ids: Int[Tensor, "batch seq"],
        mask: Int[Tensor, "batch *seq_seq"] | None,
        placed: Int[Tensor, "batch seq"] | None = None,
    ) -> None:
        self.mask = None if mask is None else mask != 0
        self.placed = placed
        self._shape, self._device = input_ids.shape, input_ids.device

    @property
    def longest(self) -> int:
        return self._shape[1]

    def positions(self) -> Int[Tensor, "*batch seq"]:
        if self.placed is not None:
            return self.placed
        return torch.arange(self.longest, device=self._device)

    def starts(self) -> Int[Tensor, "batch"]:
        return torch.arange(self._shape[0], device=self._device) * self.longest

    def first(self, tokens: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch size"]:
        return tokens[:, 0]

    def mean(self, tokens: Float[Tensor, "batch seq size"]) -> Float[Tensor, "batch size"]:
        if self.mask is None:
            return tokens.mean(1)
        real = self.mask[..., None]
        return (tokens * real).sum(1) / real.sum(1)

    def blocks(self, tokens: Float[Tensor, "batch seq *size"]) -> Sequence[Tensor]:
        return [tokens]

    def from_blocks(self, blocks: Sequence[Tensor]) -> Float[Tensor, "batch seq *size"]:
        return blocks[0]

    def masks(self) -> Sequence[Tensor | None]:
        return [self.mask]


class Packed(RowLayout):
    """Packed rows: row r is the tokens from `offsets[r]` up to, not including, `offsets[r + 1]`.

    `bound` is an upper limit on the tokens of any row that the model reads. Kernels plan with it,
    because reading this batch's longest row would synchronise with the GPU.
    """

    def __init__(
        self, input_ids: Int[Tensor, "tokens"], offsets: Int[Tensor, "batch_1"], bound: int
    ) -> None:
        self.offsets, self.bound = offsets, bound
        self._tokens = len(input_ids)

    @cached_property
    def _runs(self) -> list[tuple[int, int]] | None:
        """Return the number and length of the rows in each block, if blocks hold only rows of equal
        length, which need no padding; None if a single block holds all rows.

        In inference mode, a CPU always computes this way, so that a row's vectors do not depend on
        the other rows, not even in their last bits.
        """
        if self.offsets.device.type != "cpu":
            return None
        if in_inference():
            return [(len(list(rows)), length) for length, rows in groupby(self.lengths)]
        return [(1, length) for length in self.lengths] if self.row_by_row else None

    @property
    def row_by_row(self) -> bool:
        """Whether a fused kernel on a CPU is fastest when it runs once per row."""
        return self._tokens >= ROW_BY_ROW * (len(self.offsets) - 1)

    @cached_property
    def lengths(self) -> list[int]:
        """Return the number of tokens of every row. Synchronises with a GPU."""
        return self.offsets.diff().tolist()

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self) -> Int[Tensor, "tokens"]:
        tokens = torch.arange(self._tokens, device=self.offsets.device)
        return tokens - self.per_token(self.starts())

    def starts(self) -> Int[Tensor, "batch"]:
        return self.offsets[:-1]

    def mean(self, tokens: Float[Tensor, "tokens size"]) -> Float[Tensor, "batch size"]:
        return torch.segment_reduce(tokens, "mean", offsets=self.offsets)

    def blocks(self, tokens: Float[Tensor, "tokens *size"]) -> Sequence[Tensor]:
        if self._runs is not None:
            parts = tokens.split([rows * length for rows, length in self._runs])
            return [part.unflatten(0, run) for part, run in zip(parts, self._runs, strict=True)]
        rows = len(self.lengths)
        padded = tokens.new_zeros(rows * self.longest, *tokens.shape[1:])
        return [padded.index_copy(0, self._places, tokens).unflatten(0, (rows, self.longest))]

    def from_blocks(self, blocks: Sequence[Tensor]) -> Float[Tensor, "tokens *size"]:
        if self._runs is not None:
            return torch.cat([block.flatten(0, 1) for block in blocks])
        return gather_tokens(blocks[0], self._places)

    def masks(self) -> Sequence[Tensor | None]:
        if self._runs is not None:
            return [None] * len(self._runs)
        places = torch.arange(self.longest, device=self.offsets.device)
        return [places < self.offsets.diff()[:, None]]

    @cached_property
    def _places(self) -> Int[Tensor, "tokens"]:
        """Return each token's place in the block of all rows, which is as wide as the longest
        row."""
        rows = torch.arange(len(self.lengths), device=self.offsets.device)
        return self.per_token(rows * self.longest) + self.positions()

    @cached_property
    def bins(self) -> "Bins | None":
        """Return the bins in which rows attend together: on a CPU, outside inference mode; None
        elsewhere."""
        binned = self.offsets.device.type == "cpu" and not in_inference()
        return Bins(self, self.bin_width) if binned else None

    @property
    def bin_width(self) -> int:
        """Return the number of tokens of a bin, at least those of the longest row."""
        return max(BIN_TOKENS, rounded_up(self.longest, WIDTH_MULTIPLE))

    def per_token(self, of_rows: Int[Tensor, "batch"]) -> Int[Tensor, "tokens"]:
        """Repeat each row's value for each of its tokens."""
        return of_rows.repeat_interleave(self.offsets.diff(), output_size=self._tokens)


class Bins:
    """Rows side by side in wide bins, filled in order: a block (b, s, size) in which each token
    attends to its own row only. One attention call serves all rows, instead of one call per row or
    padding to the longest."""

    def __init__(self, rows: Packed, width: int) -> None:
        starts, used = [], 0
        for length in rows.lengths:
            if -used % width < length:  # the row does not fit into the rest of the bin
                used = rounded_up(used, width)
            starts.append(used)
            used += length
        self._shape = rounded_up(used, width) // width, width
        self._places = rows.per_token(torch.tensor(starts)) + rows.positions()
        self._token_at = torch.zeros(self._shape[0] * width, dtype=torch.long)
        self._token_at[self._places] = torch.arange(len(self._places))
        row_of = torch.full((self._shape[0] * width,), -1)
        row_of[self._places] = rows.per_token(torch.arange(len(starts)))
        row_of = row_of.view(self._shape)
        self._mask: Bool[Tensor, "bins seq seq"] = row_of[:, :, None] == row_of[:, None, :]

    def blocks(self, tokens: Float[Tensor, "tokens *size"]) -> Sequence[Tensor]:
        """Return the tokens in a single block; unused places repeat the first token."""
        return [_Moved.apply(tokens, self._token_at, self._places).unflatten(0, self._shape)]

    def from_blocks(self, blocks: Sequence[Tensor]) -> Float[Tensor, "tokens *size"]:
        """Do the reverse of `blocks`."""
        return _Moved.apply(blocks[0].flatten(0, 1), self._places, self._token_at)

    def masks(self) -> Sequence[Tensor | None]:
        """Return which tokens each token may attend to, (b, s, s) bool; unused places attend to
        each other."""
        return [self._mask]


class _Moved(torch.autograd.Function):
    """Gathers tokens from places. The backward pass gathers their gradients from the inverse
    places, which is faster than adding them up; unused places get gradients that are never read."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


def rounded_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def gather_tokens(
    tokens: Float[Tensor, "..."], places: Int[Tensor, "chosen"] | None
) -> Float[Tensor, "..."]:
    """Return the tokens at these places, (N, size); None returns all, unchanged."""
    return tokens if places is None else tokens.flatten(0, -2).index_select(0, places)


def in_inference() -> bool:
    """Whether inference mode is on. False while a compiler traces, since it cannot know."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
