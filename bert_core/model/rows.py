"""How the rows of a batch lie in memory: padded to one width, or end to end without padding.

B is the number of rows, S the longest. A tensor with an entry a token leads with the layout's own
dimensions, `*tokens`: (B, S) where rows are padded, (T,) where they lie end to end, T being the
tokens of all rows. What looks at one token at a time needs no layout. A token's place counts along
the flattened `*tokens`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Rows(ABC):
    """The layout of a batch."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """S: tokens of the longest row, padding included."""

    @abstractmethod
    def positions(self) -> Int[Tensor, "..."]:
        """Where in its row each token stands, from 0; broadcasts to `*tokens`."""

    @abstractmethod
    def starts(self) -> Int[Tensor, "batch"]:
        """Places of the first token of every row."""

    def first(self, tokens: Float[Tensor, "*tokens size"]) -> Float[Tensor, "batch size"]:
        """The first token of every row."""
        return taken(tokens, self.starts())

    @abstractmethod
    def mean(self, tokens: Float[Tensor, "*tokens size"]) -> Float[Tensor, "batch size"]:
        """The mean of every row's real tokens."""

    @abstractmethod
    def blocks(self, tokens: Float[Tensor, "..."]) -> Sequence[Tensor]:
        """The tokens in blocks (b, s, size): rows that are computed on together."""

    @abstractmethod
    def joined(self, blocks: Sequence[Tensor]) -> Float[Tensor, "..."]:
        """The reverse of `blocks`."""

    @abstractmethod
    def masks(self) -> Sequence[Tensor | None]:
        """Which tokens of each block are real, (b, s) of bool; None where all are."""


class Padded(Rows):
    """Rows of one width. `mask` is 1 at real tokens, or None where all are."""

    def __init__(
        self, input_ids: Int[Tensor, "batch seq"], mask: Int[Tensor, "batch seq"] | None
    ) -> None:
        self.mask = None if mask is None else mask != 0
        self._shape, self._device = input_ids.shape, input_ids.device

    @property
    def longest(self) -> int:
        return self._shape[1]

    def positions(self) -> Int[Tensor, "seq"]:
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

    def joined(self, blocks: Sequence[Tensor]) -> Float[Tensor, "batch seq *size"]:
        return blocks[0]

    def masks(self) -> Sequence[Tensor | None]:
        return [self.mask]


class Packed(Rows):
    """Rows end to end: row r is the tokens from `offsets[r]` up to `offsets[r + 1]`.

    `bound` is the most tokens that any row of the model has: what kernels plan with, where asking
    for this batch's longest would make a GPU wait.
    """

    def __init__(
        self, input_ids: Int[Tensor, "tokens"], offsets: Int[Tensor, "batch_1"], bound: int
    ) -> None:
        self.offsets, self.bound = offsets, bound
        self._tokens = len(input_ids)
        # A CPU computes a row at a time, nothing on padding; a GPU wants them all at once.
        self._row_by_row = offsets.device.type == "cpu"

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of every row. On a GPU this waits for it."""
        return self.offsets.diff().tolist()

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def positions(self) -> Int[Tensor, "tokens"]:
        starts = self.offsets[:-1].repeat_interleave(self.offsets.diff(), output_size=self._tokens)
        return torch.arange(self._tokens, device=starts.device) - starts

    def starts(self) -> Int[Tensor, "batch"]:
        return self.offsets[:-1]

    def mean(self, tokens: Float[Tensor, "tokens size"]) -> Float[Tensor, "batch size"]:
        return torch.segment_reduce(tokens, "mean", offsets=self.offsets)

    def blocks(self, tokens: Float[Tensor, "tokens *size"]) -> Sequence[Tensor]:
        if self._row_by_row:
            return [row[None] for row in tokens.split(self.lengths)]
        padded = tokens.new_zeros(*self._real.shape, *tokens.shape[1:])
        return [padded.index_put((self._real,), tokens)]

    def joined(self, blocks: Sequence[Tensor]) -> Float[Tensor, "tokens *size"]:
        if self._row_by_row:
            return torch.cat([block[0] for block in blocks])
        return blocks[0][self._real]

    def masks(self) -> Sequence[Tensor | None]:
        return [None] * len(self.lengths) if self._row_by_row else [self._real]

    @cached_property
    def _real(self) -> Tensor:
        places = torch.arange(self.longest, device=self.offsets.device)
        return places < self.offsets.diff()[:, None]


def taken(
    tokens: Float[Tensor, "..."], places: Int[Tensor, "chosen"] | None
) -> Float[Tensor, "..."]:
    """The tokens at these places, (N, size); None takes all as they lie."""
    return tokens if places is None else tokens.flatten(0, -2).index_select(0, places)
