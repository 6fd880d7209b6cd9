"""An order of training in which rows that belong together come one after another."""

import numpy as np
from jaxtyping import Int, Integer

from bert_core.data.order import DrawnOrder


class GroupedOrder(DrawnOrder):
    """The order of all samples of a run over one shard whose rows are in groups: groups in random
    order, which is a function of the seed and the epoch, each group's rows as they are."""

    def __init__(self, groups: Int[np.ndarray, "rows"], *, seed: int) -> None:
        """Take the group of each row, at least one."""
        by_group = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[by_group])) + 1
        self._members = np.split(by_group, starts)
        super().__init__(len(groups), seed)

    def _draw(self, epoch: int) -> Integer[np.ndarray, "rows"]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._members))
        return np.concatenate([self._members[group] for group in order])
