"""The global order of training: which sample comes when, for any number of workers.

It depends on the seed and the epoch only: the shards are permuted, and rows are permuted within
windows of `window` shards, so that a node needs only the shards of its current window. Samples are
counted across epochs without a gap, so a global batch is a slice and no row is ever left out.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer

from bert_core.data.ragged import starts_of
from bert_core.errors import ConfigError


@dataclass(frozen=True)
class Samples:
    """Rows to train on: the shard, the row in it, and the epoch."""

    shards: Integer[np.ndarray, "samples"]
    rows: Integer[np.ndarray, "samples"]
    epochs: Integer[np.ndarray, "samples"]

    def take(self, picked: Integer[np.ndarray, "picked"]) -> "Samples":
        """Return the samples at the positions `picked`, in that order."""
        return Samples(self.shards[picked], self.rows[picked], self.epochs[picked])


@runtime_checkable
class Order(Protocol):
    """Which sample of a run comes when."""

    rows_per_epoch: int

    def samples(self, start: int, count: int) -> Samples:
        """Return the samples from `start` up to `start + count` of the run, across epochs."""


class GlobalOrder:
    """The order of all samples of a run over shards with `shard_rows` rows each."""

    def __init__(self, shard_rows: list[int], *, seed: int, window: int = 8) -> None:
        if sum(shard_rows) == 0:
            raise ConfigError(
                "global order: wanted shards with at least one row, got none: "
                "the corpus is too small for its settings, see the counts of `raybert prepare`"
            )
        self.shard_rows = np.asarray(shard_rows, dtype=np.int64)
        self.rows_per_epoch = int(self.shard_rows.sum())
        self.seed = seed
        self.window = window
        draw = partial(_draw_window, self.shard_rows, seed, window)
        self._window_order = lru_cache(maxsize=2)(draw)

    def samples(self, start: int, count: int) -> Samples:
        """Return the samples from `start` up to `start + count` of the run, across epochs."""
        shards, rows, epochs = [], [], []
        position, end = start, start + count
        while position < end:
            epoch, offset = divmod(position, self.rows_per_epoch)
            window_starts = starts_of(_window_sizes(self.shard_rows, self.seed, self.window, epoch))
            window = int(np.searchsorted(window_starts, offset, side="right")) - 1
            window_shards, window_rows = self._window_order(epoch, window)
            first = offset - int(window_starts[window])
            size = min(end - position, len(window_rows) - first)
            shards.append(window_shards[first : first + size])
            rows.append(window_rows[first : first + size])
            epochs.append(np.full(size, epoch))
            position += size
        if not shards:
            empty = np.zeros(0, dtype=np.int64)
            return Samples(empty, empty, empty)
        return Samples(np.concatenate(shards), np.concatenate(rows), np.concatenate(epochs))


class DrawnOrder(ABC):
    """The order of all samples of a run over one shard whose rows are drawn anew in each epoch."""

    def __init__(self, rows_per_epoch: int, seed: int) -> None:
        self.rows_per_epoch = rows_per_epoch
        self.seed = seed
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def samples(self, start: int, count: int) -> Samples:
        """Return the samples from `start` up to `start + count` of the run, across epochs."""
        epochs, offsets = np.divmod(np.arange(start, start + count), self.rows_per_epoch)
        rows = np.zeros(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            rows[epochs == epoch] = self._epoch(int(epoch))[offsets[epochs == epoch]]
        return Samples(np.zeros(count, dtype=np.int64), rows, epochs)

    @abstractmethod
    def _draw(self, epoch: int) -> Integer[np.ndarray, "rows"]:
        """Return the rows of an epoch in training order: a function of the seed and the epoch."""


def _permuted(shards: int, seed: int, epoch: int) -> Integer[np.ndarray, "shards"]:
    return np.random.default_rng([seed, epoch]).permutation(shards)


def _window_sizes(
    shard_rows: Integer[np.ndarray, "shards"], seed: int, size: int, epoch: int
) -> Integer[np.ndarray, "windows"]:
    """Return the number of rows in each window of an epoch; a window has `size` shards."""
    rows = shard_rows[_permuted(len(shard_rows), seed, epoch)]
    return np.add.reduceat(rows, np.arange(0, len(rows), size))


def _draw_window(
    shard_rows: Integer[np.ndarray, "shards"], seed: int, size: int, epoch: int, window: int
) -> tuple[Integer[np.ndarray, "rows"], Integer[np.ndarray, "rows"]]:
    """Return the rows of a window in training order: the shard of each, and its index there."""
    shards = _permuted(len(shard_rows), seed, epoch)[window * size : (window + 1) * size]
    sizes = shard_rows[shards]
    shard_of_row = np.repeat(shards, sizes)
    rows = np.arange(int(sizes.sum())) - np.repeat(starts_of(sizes), sizes)
    order = np.random.default_rng([seed, epoch, window + 1]).permutation(len(rows))
    return shard_of_row[order], rows[order]


def part_of_rank(count: int, rank: int, world_size: int) -> slice:
    """Return the part of `count` ordered items that rank `rank` of `world_size` takes."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)


def balanced_part(
    tokens: Integer[np.ndarray, "samples"], rank: int, world_size: int
) -> Integer[np.ndarray, "part"]:
    """Return the positions of the samples of a global batch that a rank takes, ascending. All ranks
    get about the same number of tokens, since all wait for the slowest.

    The longest samples are dealt first, back and forth, so that the numbers of samples per rank
    differ by at most one.

    Args:
        tokens: the length of each sample.
    """
    order = np.argsort(-tokens, kind="stable")
    turn, seat = np.divmod(np.arange(len(order)), world_size)
    taker = np.where(turn % 2, world_size - 1 - seat, seat)
    return np.sort(order[taker == rank])
