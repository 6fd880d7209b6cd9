"""The global order of training where classes are drawn more evenly than they are.

Like `order.GlobalOrder`, it depends on the seed and the epoch only. An epoch has as many samples as
there are rows, and a fixed number of each class. Rows of a class take turns: none is drawn again
before all others of its class were, across epochs.
"""

import numpy as np
from jaxtyping import Float, Int, Integer

from bert_core.data.order import DrawnOrder

_EPOCH, _CLASS = 0, 1
"""Keep the draws of epochs and those of classes apart."""


class ClassOrder(DrawnOrder):
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
        super().__init__(len(classes), seed)
        self.drawn = apportioned(self.rows_per_epoch, counts.astype(np.float64) ** power)
        """Samples of each class per epoch, in the order of the classes."""

    def _draw(self, epoch: int) -> Integer[np.ndarray, "rows"]:
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
