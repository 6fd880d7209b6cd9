"""An order of training in which rows that belong together come one after another."""

from functools import lru_cache

import numpy as np
from jaxtyping import Int, Integer

from bert_core.data.order import Samples


class GroupedOrder:
    """The order of all samples of a run over one shard whose rows are in groups: groups in random
    order, which is a function of the seed and the epoch, each group's rows as they are."""

    def __init__(self, groups: Int[np.ndarray, "rows"], *, seed: int) -> None:
        """Take the group of each row, at least one."""
        by_group = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[by_group])) + 1
        self._members = np.split(by_group, starts)
        self.rows_per_epoch = len(groups)
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
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._members))
        return np.concatenate([self._members[group] for group in order])
