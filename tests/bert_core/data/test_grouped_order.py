"""Rows of a group come one after another, whatever the epoch."""

import numpy as np

from bert_core.data.grouped_order import GroupedOrder
from bert_core.data.order import Order

GROUPS = np.array([2, 0, 1, 2, 0, 2, 5])


def test_every_row_comes_once_per_epoch_next_to_those_of_its_group() -> None:
    order = GroupedOrder(GROUPS, seed=0)
    assert isinstance(order, Order)
    seen = []
    for epoch in range(6):
        samples = order.samples(7 * epoch, 7)
        assert sorted(samples.rows) == list(range(7))
        assert set(samples.epochs) == {epoch}
        groups = GROUPS[samples.rows]
        assert (np.diff(groups) != 0).sum() == 3, "four groups in a row"
        seen.append(groups.tolist())
    assert len({tuple(each) for each in seen}) > 2
    assert (
        GroupedOrder(GROUPS, seed=1).samples(0, 7).rows.tolist()
        != order.samples(0, 7).rows.tolist()
    )


def test_a_slice_is_the_same_whatever_was_asked_before() -> None:
    whole = GroupedOrder(GROUPS, seed=0).samples(3, 20)
    parts = [GroupedOrder(GROUPS, seed=0).samples(start, 5) for start in (3, 8, 13, 18)]
    assert np.concatenate([part.rows for part in parts]).tolist() == whole.rows.tolist()
    assert np.concatenate([part.epochs for part in parts]).tolist() == whole.epochs.tolist()
