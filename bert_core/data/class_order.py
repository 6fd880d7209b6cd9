"""The global order of training where classes are drawn more evenly than they are.

Like `order.GlobalOrder`, it depends on the seed and the epoch only. An epoch has as many samples as
there are rows, and a fixed number of each class. Rows of a class take turns: none is drawn again
before all others of its class were, across epochs.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int, Integer

from bert_core.data.order import Samples

_EPOCH, _CLASS = 0, 1
"""Keep the draws of epochs and those of classes apart."""


class ClassOrder:
    """The order of all samples of a run over one shard whose rows have classes."""

    def __init__(self, classes: Int[np.ndarray, "rows"], *, power: float, seed: int) -> None:
        """Choose how often each class is drawn.

        Args:
            classes: the class of each row, at least one.
            power: classes are drawn in proportion to their numbers of rows to this power: 1 as they
                are, 0 equally often (Kang et al. 2020, equation 1).
        """
        _, class_of, counts = np.unique(classes, return_inverse=True, return_counts=True)
        by_class = np.argsort(class_of, kind="stable")
        self._members = np.split(by_class, np.cumsum(counts)[:-1])
        self.rows_per_epoch = len(classes)
        self.drawn = apportioned(self.rows_per_epoch, counts.astype(np.float64) ** power)
        """Samples of each class per epoch, in the order of the classes."""
        self.seed = seed
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def samples(self, start: int, count: int) -> Samples:
        """Return the samples from `start` up to `start + count` of the run, across epochs."""
        epochs, offsets = np.divmod(np.arange(start, start + count), self.rows_per_epoch)
        rows = np.zeros(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            rows[epochs == epoch] = self._epoch(int(epoch))[offsets[epochs == epoch]]
        return Samples(np.zeros(count, dtype=np.int64), rows, epochs)

    def _draw(self, epoch: int) -> Integer[np.ndarray, "rows"]:
        """Return the rows of an epoch in training order."""
        rows = np.concatenate([self._turns(kind, epoch) for kind in range(len(self._members))])
        return rows[np.random.default_rng([self.seed, _EPOCH, epoch]).permutation(len(rows))]

    def _turns(self, kind: int, epoch: int) -> Integer[np.ndarray, "drawn"]:
        """Return the rows of a class that an epoch has: the next of its endless sequence, in which
        every pass over the class is a new permutation."""
        members, drawn = self._members[kind], int(self.drawn[kind])
        first = epoch * drawn
        passes = range(first // len(members), -(-(first + drawn) // len(members)))
        turns = [
            members[
                np.random.default_rng([self.seed, _CLASS, kind, turn]).permutation(len(members))
            ]
            for turn in passes
        ]
        begin = first - passes.start * len(members)
        return np.concatenate([members[:0], *turns])[begin : begin + drawn]


def apportioned(total: int, shares: Float[np.ndarray, "parts"]) -> Int[np.ndarray, "parts"]:
    """Return whole numbers that add up to `total`, in proportion to `shares`, by the method of
    largest remainders; of equal remainders, the first gets more."""
    exact = total * shares / shares.sum()
    whole = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[: total - whole.sum()]] += 1
    return whole
