"""Batches: padding leaks nowhere, labels point where they should, ranks share the global batch."""

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from bert_core.batches import (
    Growth,
    PhasedBatches,
    RankBatches,
    ShardSource,
    WindowSource,
    collate,
    pack,
    pad,
    prefetched,
    row_lengths,
)
from bert_core.collation import buckets, laid_out_tokens
from bert_core.data.masking import STRATEGIES, Masker, MaskingConfig, Strategy
from bert_core.data.order import GlobalOrder, Samples
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import ShardRows
from bert_core.data.windows import PAD_MULTIPLE, Window
from bert_core.errors import ConfigError
from bert_core.model.encoder import Encoder
from bert_core.objectives.base import Batch
from tests import tiny

PAD, CLS, SEP, MASK = 0, 2, 3, 4
SHARD_ROWS = [17, 0, 40, 9]


def shard_of(count: int, seed: int) -> ShardRows:
    """Rows `[CLS] A [SEP] B [SEP]`; a label is the place of its row and of its position."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 30, count)
    offsets = offsets_of(lengths)
    ids = rng.integers(5, 60_000, offsets[-1]).astype(np.uint16)
    middle = lengths // 2
    ids[offsets[:-1]], ids[offsets[:-1] + middle - 1], ids[offsets[1:] - 1] = CLS, SEP, SEP
    picks = rng.integers(0, 4, count)
    positions = [
        np.sort(rng.permutation(np.arange(1, n - 1))[:k])
        for n, k in zip(lengths, picks, strict=True)
    ]
    for start, chosen in zip(offsets, positions, strict=False):
        ids[start + chosen] = MASK
    return ShardRows(
        input_ids=ids,
        offsets=offsets,
        segment_b_start=middle,
        labels={"next_sentence_label": rng.integers(0, 2, count).astype(np.uint8)},
        masked_positions=np.concatenate([np.zeros(0, np.int64), *positions]),
        masked_labels=np.arange(picks.sum(), dtype=np.uint16) + 100 * seed,
        masked_offsets=offsets_of(picks),
    )


SHARDS = [shard_of(count, seed) for seed, count in enumerate(SHARD_ROWS)]
SOURCE = ShardSource(SHARDS.__getitem__, PAD)
ORDER = GlobalOrder(SHARD_ROWS, seed=0, window=2)


def mask_of(batch: Batch) -> torch.Tensor:
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"]))


Row = tuple[tuple[int, ...], int, int, tuple[tuple[int, int], ...]]


def rows_of(batch: Batch) -> list[Row]:
    """Every row read back from its batch: ids, length of segment B, label, masked places."""
    width = batch["input_ids"].shape[1]
    places = list(zip(batch["mlm_positions"].tolist(), batch["mlm_labels"].tolist(), strict=True))
    rows = []
    for index, mask in enumerate(mask_of(batch).bool()):
        masked = tuple((p % width, label) for p, label in places if p // width == index)
        segments = batch["token_type_ids"][index]
        assert not segments[~mask].any()
        rows.append(
            (
                tuple(batch["input_ids"][index][mask].tolist()),
                int(segments.sum()),
                int(batch["next_sentence_label"][index]),
                masked,
            )
        )
    return rows


def expected_rows(samples: Samples) -> list[Row]:
    expected = []
    for shard, number in zip(samples.shards.tolist(), samples.rows.tolist(), strict=True):
        row = SHARDS[shard].row(number)
        places = zip(row.masked_positions.tolist(), row.masked_labels.tolist(), strict=True)
        segment_b = len(row.input_ids) - row.segment_b_start
        ids = tuple(row.input_ids.tolist())
        expected.append((ids, segment_b, row.labels["next_sentence_label"], tuple(places)))
    return expected


def test_rows_are_padded_to_a_multiple_of_eight_and_padding_is_masked() -> None:
    batch = pad([np.array([5, 6, 7]), np.arange(5, 14)], PAD, np.array([1, 4]))
    assert batch["input_ids"].tolist() == [
        [5, 6, 7] + [PAD] * 13,
        [*range(5, 14)] + [PAD] * 7,
    ]
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 13, [1] * 9 + [0] * 7]
    assert batch["token_type_ids"].tolist() == [
        [0, 1, 1] + [0] * 13,
        [0] * 4 + [1] * 5 + [0] * 7,
    ]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert row_lengths(batch).sum() == 12


def test_rows_end_to_end_are_the_rows_that_are_padded() -> None:
    rows = [np.array([5, 6, 7]), np.arange(5, 14)]
    batch = pack(rows, np.array([1, 4]))
    assert batch["input_ids"].tolist() == [5, 6, 7, *range(5, 14)]
    assert batch["token_type_ids"].tolist() == [0, 1, 1] + [0] * 4 + [1] * 5
    assert batch["offsets"].tolist() == [0, 3, 12]
    assert row_lengths(batch).sum() == 12
    samples = ORDER.samples(0, 9)
    packed = ShardSource(SHARDS.__getitem__, PAD, packed_from=0.0).collate(samples)
    padded = SOURCE.collate(samples)
    real = mask_of(padded).bool()
    assert torch.equal(packed["input_ids"], padded["input_ids"][real])
    assert torch.equal(packed["token_type_ids"], padded["token_type_ids"][real])
    flat = real.flatten().cumsum(0) - 1  # where a token of the padded batch is among the real ones
    assert torch.equal(packed["mlm_positions"], flat[padded["mlm_positions"]])
    for name in ("mlm_labels", "next_sentence_label"):
        assert torch.equal(packed[name], padded[name])


@pytest.mark.parametrize(("lengths", "packed"), [((16, 15), False), ((16, 12), True)])
def test_rows_lie_end_to_end_from_a_share_of_padding_on(
    lengths: tuple[int, ...], packed: bool
) -> None:
    windows = [window(place, [CLS] * length) for place, length in enumerate(lengths)]
    batch = collate(windows, PAD, packed_from=0.1)  # of 32 places 1 and 4 would be padding
    assert ("offsets" in batch) == packed
    assert row_lengths(batch).tolist() == list(lengths)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 127])
def test_the_mask_is_left_out_only_where_no_row_is_padded(length: int) -> None:
    batch = pad([np.full(length, 5, np.uint32)] * 2, PAD)
    assert batch["input_ids"].shape[1] == -(-length // PAD_MULTIPLE) * PAD_MULTIPLE
    assert ("attention_mask" in batch) == bool(length % PAD_MULTIPLE)
    assert not batch["token_type_ids"].any()
    assert row_lengths(batch).sum() == 2 * length


def test_a_rows_padding_ids_change_nothing_in_the_encoder() -> None:
    config = tiny.encoder_config(30)
    torch.manual_seed(0)
    encoder = Encoder(config, pooler=True).eval()
    rows = [np.array([2, 9, 8, 3]), np.arange(5, 28)]
    alone, together, other = (
        pad(chosen, pad_id) for chosen, pad_id in [(rows[:1], PAD), (rows, PAD), (rows, 29)]
    )
    hidden = [
        encoder(batch["input_ids"], batch["token_type_ids"], batch["attention_mask"]).hidden[0, :4]
        for batch in (alone, together, other)
    ]
    torch.testing.assert_close(hidden[1], hidden[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden[2], hidden[1], rtol=0, atol=0)


def test_collating_loses_nothing_and_labels_point_to_what_was_masked() -> None:
    samples = ORDER.samples(0, ORDER.rows_per_epoch)
    batch = SOURCE.collate(samples)
    assert rows_of(batch) == expected_rows(samples)
    assert (batch["input_ids"].flatten()[batch["mlm_positions"]] == MASK).all()
    assert (batch["input_ids"] == MASK).sum() == len(batch["mlm_positions"])
    assert mask_of(batch).flatten()[batch["mlm_positions"]].all()
    assert batch["mlm_draws"].dtype == torch.float64
    assert {each.dtype for name, each in batch.items() if name != "mlm_draws"} == {torch.int64}
    assert SOURCE.lengths(samples).tolist() == mask_of(batch).sum(1).tolist()


def test_rows_without_a_masked_position_make_a_batch_without_labels() -> None:
    shard, row = next(
        (shard, row)
        for shard, rows in enumerate(SHARDS)
        for row in range(len(rows))
        if not len(rows.row(row).masked_positions)
    )
    order = ORDER.samples(0, ORDER.rows_per_epoch)
    [place] = np.flatnonzero((order.shards == shard) & (order.rows == row))
    batch = SOURCE.collate(order.take(np.array([place])))
    assert batch["mlm_positions"].shape == batch["mlm_labels"].shape == (0,)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masks_drawn_at_training_time_follow_from_seed_epoch_and_sample(strategy: Strategy) -> None:
    shards = [
        replace(
            shard,
            begins_word=np.packbits(np.arange(len(shard.input_ids)) % 3 > 0, bitorder="little"),
        )
        for shard in SHARDS
    ]
    masker = Masker(
        MaskingConfig(strategy=strategy),
        vocab_size=60_000,
        special_ids=np.arange(5),
        mask_id=MASK,
    )
    source = ShardSource(shards.__getitem__, PAD, masker, seed=3)
    samples = ORDER.samples(0, 2 * ORDER.rows_per_epoch)

    def seen(source: ShardSource, picked: np.ndarray) -> list[list[int]]:
        batch = source.collate(samples.take(picked))
        rows, width = batch["input_ids"].shape
        found: list[list[int]] = [[] for _ in range(rows)]
        flat = batch["input_ids"].flatten().tolist()
        for place, label in zip(
            batch["mlm_positions"].tolist(), batch["mlm_labels"].tolist(), strict=True
        ):
            found[place // width] += [place % width, flat[place], label]
        return found

    everything = np.arange(len(samples.rows))
    together = seen(source, everything)
    assert sum(map(bool, together)) > 0.9 * len(together)
    # Whatever batch a sample is in, and whoever collates it.
    for part in np.array_split(everything, 11):
        assert seen(source, part[::-1]) == [together[index] for index in part[::-1]]
    for index in everything:
        row = shards[samples.shards[index]].row(int(samples.rows[index]))
        places, labels = together[index][::3], together[index][2::3]
        assert row.input_ids[places].tolist() == labels
    # The same row has another mask in the next epoch, and with another seed.
    first = {(s, r): seen for s, r, e, seen in _by_sample(samples, together) if e == 0}
    second = {(s, r): seen for s, r, e, seen in _by_sample(samples, together) if e == 1}
    assert sum(first[row] != second[row] for row in first) > 0.7 * len(first)
    other = seen(replace(source, seed=4), everything)
    assert sum(a != b for a, b in zip(together, other, strict=True)) > 0.7 * len(other)


@pytest.mark.parametrize("packed_from", [0.0, 1.0])
@pytest.mark.parametrize("dynamic", [False, True])
def test_spans_are_the_masked_tokens_of_a_row_that_stand_together(
    dynamic: bool, packed_from: float
) -> None:
    shards, masker = SHARDS, None
    if dynamic:
        every = [np.full(-(-len(shard.input_ids) // 8), 255, np.uint8) for shard in SHARDS]
        shards = [
            replace(shard, input_ids=np.where(shard.input_ids == MASK, 9, shard.input_ids))
            for shard in SHARDS
        ]
        shards = [replace(s, begins_word=bits) for s, bits in zip(shards, every, strict=True)]
        config = MaskingConfig(strategy="span", masked_lm_prob=0.4)
        masker = Masker(config, vocab_size=60_000, special_ids=np.arange(5), mask_id=MASK)
    samples = ORDER.samples(0, ORDER.rows_per_epoch)
    source = ShardSource(shards.__getitem__, PAD, masker, packed_from=packed_from)
    batch = source.collate(samples)
    lengths = source.lengths(samples)
    width = batch["input_ids"].shape[-1]
    starts = np.cumsum(lengths) - lengths if packed_from == 0 else np.arange(len(lengths)) * width
    masked = set(batch["mlm_positions"].tolist())
    wanted = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        inside = [place for place in range(start, start + length) if place in masked]
        for place in inside:
            assert start < place < start + length - 1  # a row begins and ends with a special token
            if place - 1 not in masked:
                wanted.append(0)
            wanted[-1] += 1
    assert batch["mlm_span_lengths"].tolist() == wanted
    assert len(wanted) < len(masked)


def _by_sample(samples: Samples, found: list) -> list[tuple]:
    columns = (samples.shards.tolist(), samples.rows.tolist(), samples.epochs.tolist(), found)
    return list(zip(*columns, strict=True))


def test_buckets_are_sorted_cut_and_complete() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 50)
    found = buckets(lengths, 8 * 8)
    order = np.concatenate(found)
    assert [len(bucket) for bucket in found] == [8] * 6 + [2]
    assert order.tolist() == sorted(range(50), key=lambda row: lengths[row])  # equal ones in order
    assert buckets(np.zeros(0, np.int64), 8) == []


def test_buckets_keep_to_their_budget_but_for_rows_that_are_longer_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 300)
    found = buckets(lengths, 128)
    assert sorted(np.concatenate(found).tolist()) == list(range(300))
    for bucket, following in zip(found, [*found[1:], None], strict=True):
        width = -(-lengths[bucket].max() // 8) * 8
        assert len(bucket) * width <= 128 or len(bucket) == 1
        if following is not None:  # nor would one more have fitted
            wider = -(-lengths[following[0]] // 8) * 8
            assert (len(bucket) + 1) * wider > 128


@pytest.mark.parametrize("micro_batch_tokens", [1, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_hold_the_global_batch(world_size: int, micro_batch_tokens: int) -> None:
    steps = [
        RankBatches(SOURCE, ORDER, 13, micro_batch_tokens, rank, world_size).from_step(3)
        for rank in range(world_size)
    ]
    for step in range(3, 8):  # over the end of the first epoch
        micro_batches = [batch for rank in steps for batch in next(rank)]
        for batch in micro_batches:
            assert batch["input_ids"].numel() <= micro_batch_tokens or len(batch["input_ids"]) == 1
        samples = ORDER.samples(step * 13, 13)
        together = Counter(row for batch in micro_batches for row in rows_of(batch))
        assert together == Counter(expected_rows(samples))


def test_every_rank_has_a_row_of_every_batch() -> None:
    for rank in range(4):
        batches = RankBatches(SOURCE, ORDER, 4, 8, rank, 4).from_step(0)
        assert all(next(batches) for _ in range(5))
    with pytest.raises(
        ConfigError,
        match=r"global_batch_size: wanted at least a row for each of 5 workers, got 4: raise it",
    ):
        RankBatches(SOURCE, ORDER, 4, 8, 0, 5)


@pytest.mark.parametrize("most_rows", [None, 1, 7, 10_000])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_evaluation_sees_every_row_once(most_rows: int | None, world_size: int) -> None:
    steps = [
        list(RankBatches(SOURCE, ORDER, 10, 4, rank, world_size).once(most_rows))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in steps}) == 1  # it is collective
    samples = ORDER.samples(0, min(most_rows or 10_000, ORDER.rows_per_epoch))
    seen = [row for rank in steps for step in rank for batch in step for row in rows_of(batch)]
    assert Counter(seen) == Counter(expected_rows(samples))


def window(row: int, *ids: list[int], **extra: Any) -> Window:
    arrays = tuple(np.array(each, np.uint32) for each in ids)
    return Window(row=row, ids=arrays, segment_b_start=tuple(map(len, ids)), **extra)


def test_a_labelled_set_is_collated_with_its_labels() -> None:
    ids = [[CLS, *range(5, 5 + n), SEP] for n in range(1, 12)]
    windows = [window(n, row, labels={"labels": np.array([n])}) for n, row in enumerate(ids)]
    source = WindowSource(windows, PAD)
    batches = RankBatches(source, GlobalOrder([11], seed=0), 11, 4).once()
    [micro_batches] = list(batches)
    seen = {}
    for batch in micro_batches:
        for row, mask, label in zip(
            batch["input_ids"], mask_of(batch).bool(), batch["labels"].tolist(), strict=True
        ):
            seen[label] = row[mask].tolist()
    assert [seen[label] for label in range(11)] == ids


@pytest.mark.parametrize("packed_from", [0.0, 1.0])
def test_tokens_that_are_scored_keep_their_places_and_labels(packed_from: float) -> None:
    ids = [[CLS, *range(5, 5 + n), SEP] for n in (3, 9, 1)]
    places = [np.array([1, 3]), np.array([2, 8, 9]), np.array([1])]
    windows = [
        window(n, row, positions={"token_positions": at}, labels={"token_labels": at * 10})
        for n, (row, at) in enumerate(zip(ids, places, strict=True))
    ]
    batch = collate(windows, PAD, packed_from)
    scored = batch["input_ids"].flatten()[batch["token_positions"]]
    assert scored.tolist() == [row[at] for row, its in zip(ids, places, strict=True) for at in its]
    assert batch["token_labels"].tolist() == np.concatenate([at * 10 for at in places]).tolist()


@pytest.mark.parametrize("packed_from", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [[8], [5], [16, 15], [24, 3, 9], [40, 3, 3, 3]])
def test_tokens_are_counted_as_they_are_laid_out(lengths: list[int], packed_from: float) -> None:
    rows = [np.arange(5, 5 + length, dtype=np.uint32) for length in lengths]
    choices = Window(row=0, ids=(rows[0], rows[-1]), segment_b_start=(1, 1))
    others = [Window(row=1, ids=(ids,), segment_b_start=(1,)) for ids in rows]
    for windows in (others, [choices, *others]):
        batch = collate(windows, PAD, packed_from)
        assert laid_out_tokens(windows, packed_from) == batch["input_ids"].numel()


def test_choices_of_a_question_lie_side_by_side() -> None:
    windows = [window(0, [CLS, 5, SEP], [CLS, SEP]), window(1, [CLS, 6, 7, SEP], [CLS, 8, SEP])]
    batch = collate(windows, PAD)
    assert batch["input_ids"][:, 1].tolist() == [5, SEP, 6, 8]
    assert [one.tokens for one in windows] == [6, 8]


def test_batches_made_ahead_are_the_same_in_the_same_order() -> None:
    batches = RankBatches(SOURCE, ORDER, 13, 64)
    wanted = list(batches.once())
    ahead = list(prefetched(batches.once(), steps=3))
    assert len(ahead) == len(wanted)
    for made, expected in zip(ahead, wanted, strict=True):
        assert all(
            a[name].equal(b[name]) for a, b in zip(made, expected, strict=True) for name in b
        )


def test_errors_of_batch_making_are_raised_in_order() -> None:
    def failing() -> Iterator[list[Batch]]:
        yield [{"input_ids": torch.zeros(1, 8)}]
        raise OSError("the shard is gone")

    ahead = prefetched(failing())
    assert len(next(ahead)) == 1
    with pytest.raises(OSError, match="the shard is gone"):
        next(ahead)


def test_closing_ends_the_thread_that_makes_batches() -> None:
    ahead = prefetched(RankBatches(SOURCE, ORDER, 13, 64).from_step(0))
    next(ahead)
    assert any(thread.name == "batches" for thread in threading.enumerate())
    ahead.close()
    assert not any(thread.name == "batches" for thread in threading.enumerate())


def test_batches_grow_by_equal_amounts_and_skip_no_row_wherever_one_begins() -> None:
    growth = Growth(2, 8, 3)
    assert [growth.rows(step) for step in range(6)] == [2, 4, 6, 8, 8, 8]
    assert [growth.rows_before(step) for step in range(6)] == [0, 2, 6, 12, 20, 28]
    growing = RankBatches(SOURCE, ORDER, 8, 640, growth=growth)
    plain = [*islice(RankBatches(SOURCE, ORDER, 2, 640).from_step(0), 10)]
    for start in range(4):
        made = [*islice(growing.from_step(start), 4 - start)]
        assert [sum(len(row_lengths(each)) for each in step) for step in made] == [2, 4, 6, 8][
            start:
        ]
        rows = sorted(int(n) for step in made for each in step for n in row_lengths(each))
        same = plain[growth.rows_before(start) // 2 : 10]
        assert rows == sorted(int(n) for step in same for each in step for n in row_lengths(each))


def test_phases_follow_each_other_at_their_step_wherever_one_begins() -> None:
    first, then = RankBatches(SOURCE, ORDER, 5, 64), RankBatches(SOURCE, ORDER, 11, 64)
    phased = PhasedBatches(first, 3, then)
    wanted = [*islice(first.from_step(0), 3), *islice(then.from_step(0), 4)]
    for start in range(6):
        found = list(islice(phased.from_step(start), 7 - start))
        for made, expected in zip(found, wanted[start:], strict=True):
            assert len(made) == len(expected)
            for one, other in zip(made, expected, strict=True):
                assert all(one[name].equal(other[name]) for name in other)
