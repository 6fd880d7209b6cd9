"""The global order: every row once an epoch, the same batches for any number of workers."""

import weakref

import numpy as np
import pytest

from bert_core.data.order import GlobalOrder, Samples, balanced_part, part_of_rank
from bert_core.errors import ConfigError

SHARDS = [
    [7],
    [5, 5, 5, 5],
    [3, 0, 11, 1, 0, 0, 8, 2, 0],
    [0, 0, 0, 4],
    list(range(12)),
]
WINDOWS = [1, 2, 3, 8, 100]


def rows_of(samples: Samples) -> list[tuple[int, int, int]]:
    columns = (samples.epochs, samples.shards, samples.rows)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def all_rows(shard_rows: list[int], epoch: int) -> list[tuple[int, int, int]]:
    return [(epoch, shard, row) for shard, rows in enumerate(shard_rows) for row in range(rows)]


@pytest.mark.parametrize("shard_rows", SHARDS, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_every_epoch_is_a_permutation_of_every_row(shard_rows: list[int], window: int) -> None:
    order = GlobalOrder(shard_rows, seed=3, window=window)
    count = order.rows_per_epoch
    assert count == sum(shard_rows)
    for epoch in range(3):
        samples = order.samples(epoch * count, count)
        assert sorted(rows_of(samples)) == all_rows(shard_rows, epoch)


@pytest.mark.parametrize("shard_rows", SHARDS, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_starting_at_a_sample_is_skipping_those_before(shard_rows: list[int], window: int) -> None:
    count = 2 * sum(shard_rows) + 3
    whole = rows_of(GlobalOrder(shard_rows, seed=0, window=window).samples(0, count))
    fresh = GlobalOrder(shard_rows, seed=0, window=window)
    for start in range(count, -1, -9):  # backwards: nothing remembered may matter
        assert rows_of(fresh.samples(start, count - start)) == whole[start:]
    assert rows_of(fresh.samples(1, 0)) == []


def test_an_order_that_nobody_holds_is_freed_with_the_windows_that_it_remembers() -> None:
    order = GlobalOrder([3, 4], seed=0)
    order.samples(0, 5)
    freed = weakref.ref(order)
    del order
    assert freed() is None  # at once, not when the garbage collector finds a cycle


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_size", [7, 8, 29])
def test_ranks_together_hold_the_global_batch(world_size: int, batch_size: int) -> None:
    order = GlobalOrder([13, 8, 21, 5], seed=1, window=2)
    for step in range(6):
        whole = rows_of(order.samples(step * batch_size, batch_size))
        parts = [part_of_rank(batch_size, rank, world_size) for rank in range(world_size)]
        sizes = [part.stop - part.start for part in parts]
        assert max(sizes) - min(sizes) <= 1
        joined = [
            row
            for part, size in zip(parts, sizes, strict=True)
            for row in rows_of(order.samples(step * batch_size + part.start, size))
        ]
        assert joined == whole


@pytest.mark.parametrize("window", [1, 2, 3, 10])
def test_no_more_shards_than_a_window_holds_are_in_use_at_once(window: int) -> None:
    order = GlobalOrder([4, 9, 0, 6, 3, 7, 5, 8, 2, 10], seed=5, window=window)
    for epoch in range(4):
        shards = order.samples(epoch * order.rows_per_epoch, order.rows_per_epoch).shards
        uses = [np.flatnonzero(shards == shard) for shard in set(shards.tolist())]
        in_use = np.zeros(len(shards), dtype=int)
        for positions in uses:
            in_use[positions[0] : positions[-1] + 1] += 1
        assert in_use.max() <= window


def test_rows_are_mixed_across_the_shards_of_a_window() -> None:
    order = GlobalOrder([1000] * 4, seed=0, window=4)
    first = np.bincount(order.samples(0, 1000).shards, minlength=4)
    # A quarter of a permutation: hypergeometric, mean 250, variance below that of 1000 coins.
    assert np.abs(first - 250).max() < 4.5 * np.sqrt(1000 * 0.25 * 0.75)


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    count = 60
    orders = {
        seed: GlobalOrder([10, 20, 30], seed=seed, window=2).samples(0, 3 * count)
        for seed in (0, 1, 2)
    }
    seen = {
        tuple(row[1:] for row in rows_of(samples)[epoch * count : (epoch + 1) * count])
        for samples in orders.values()
        for epoch in range(3)
    }
    assert len(seen) == 9
    again = GlobalOrder([10, 20, 30], seed=1, window=2).samples(0, 3 * count)
    assert rows_of(again) == rows_of(orders[1])


def test_windows_of_an_epoch_have_orders_of_their_own() -> None:
    order = GlobalOrder([50] * 6, seed=0, window=1)
    samples = order.samples(0, 300)
    assert len({tuple(samples.rows[start : start + 50]) for start in range(0, 300, 50)}) == 6


def test_an_order_never_changes_between_releases() -> None:
    # A run that was killed under an older release resumes at the very sample.
    samples = GlobalOrder([3, 2, 4], seed=7, window=2).samples(0, 12)
    assert rows_of(samples) == [
        *[(0, 0, 2), (0, 2, 0), (0, 2, 1), (0, 0, 1), (0, 0, 0), (0, 2, 3), (0, 2, 2)],
        *[(0, 1, 0), (0, 1, 1), (1, 2, 1), (1, 2, 3), (1, 0, 1)],
    ]


def test_samples_can_be_taken_in_any_order() -> None:
    samples = GlobalOrder([5, 5], seed=0).samples(0, 10)
    picked = np.array([9, 0, 3])
    assert rows_of(samples.take(picked)) == [rows_of(samples)[index] for index in picked]


@pytest.mark.parametrize("shard_rows", [[], [0], [0, 0]])
def test_shards_without_a_row_are_refused(shard_rows: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"wanted shards with at least one row, got none: the c"):
        GlobalOrder(shard_rows, seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_parts_of_a_global_batch_have_like_numbers_of_samples_and_tokens(world_size: int) -> None:
    tokens = np.random.default_rng(0).integers(5, 129, size=256)
    parts = [balanced_part(tokens, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(parts)) == list(range(256))
    counts, sums = [len(part) for part in parts], [tokens[part].sum() for part in parts]
    assert max(counts) - min(counts) <= 1
    # Each turn of the deal leaves parts apart by no more than the lengths that it spans.
    assert max(sums) - min(sums) <= tokens.max()
    for part in parts:
        assert list(part) == sorted(part)


def test_a_batch_of_fewer_samples_than_ranks_leaves_some_without_one() -> None:
    parts = [balanced_part(np.array([7, 3]), rank, 4) for rank in range(4)]
    assert [part.tolist() for part in parts] == [[0], [1], [], []]
