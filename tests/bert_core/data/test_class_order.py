"""The order in which classes are drawn more evenly: a function of the seed and the epoch alone."""

import numpy as np
import pytest

from bert_core.data.class_order import ClassOrder, apportioned

CLASSES = np.repeat([0, 3, 7], [2, 11, 40])[np.random.default_rng(0).permutation(53)]
POWERS = [0.0, 0.5, 1.0]


def epoch_of(order: ClassOrder, epoch: int) -> np.ndarray:
    return order.samples(epoch * order.rows_per_epoch, order.rows_per_epoch).rows


@pytest.mark.parametrize("power", POWERS)
def test_classes_are_drawn_by_the_power_of_their_rows(power: float) -> None:
    order = ClassOrder(CLASSES, power=power, seed=3)
    assert order.rows_per_epoch == 53
    for epoch in range(3):
        drawn = np.unique(CLASSES[epoch_of(order, epoch)], return_counts=True)[1]
        shares = np.array([2, 11, 40]) ** power
        assert np.abs(drawn - 53 * shares / shares.sum()).max() < 1
        assert drawn.tolist() == order.drawn.tolist()


def test_the_power_of_1_takes_every_row_once_an_epoch() -> None:
    order = ClassOrder(CLASSES, power=1.0, seed=3)
    for epoch in range(3):
        assert sorted(epoch_of(order, epoch)) == list(range(53))


@pytest.mark.parametrize("power", POWERS)
def test_rows_of_a_class_take_turns_across_epochs(power: float) -> None:
    order = ClassOrder(CLASSES, power=power, seed=3)
    for epochs in (1, 2, 7):
        rows = order.samples(0, epochs * 53).rows
        for kind in np.unique(CLASSES):
            uses = np.bincount(rows, minlength=53)[kind == CLASSES]
            assert uses.max() - uses.min() <= 1


def test_samples_do_not_depend_on_where_a_batch_begins() -> None:
    whole = ClassOrder(CLASSES, power=0.5, seed=3).samples(0, 200)
    for size in (1, 7, 64):
        order = ClassOrder(CLASSES, power=0.5, seed=3)
        starts = list(range(0, 200, size))[::-1]  # in any order, as after a restart
        rows = [order.samples(start, min(size, 200 - start)).rows for start in starts]
        assert np.concatenate(rows[::-1]).tolist() == whole.rows.tolist()
    assert whole.epochs.tolist() == [place // 53 for place in range(200)]
    assert not whole.shards.any()


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(epoch_of(ClassOrder(CLASSES, power=0.0, seed=seed), epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_no_class_is_left_out_however_rare_or_common() -> None:
    counts = np.array([1, 1, 1, 10_000])
    for power in POWERS:
        assert apportioned(int(counts.sum()), counts.astype(float) ** power).min() >= 1


def test_whole_numbers_add_up_and_the_first_of_equals_gets_more() -> None:
    assert apportioned(10, np.ones(4)).tolist() == [3, 3, 2, 2]
    assert apportioned(0, np.ones(2)).tolist() == [0, 0]
    assert apportioned(7, np.array([0.1, 0.9])).tolist() == [1, 6]
