"""Turns rows into tensors, laid out by `collation`.

The rows of a batch are divided into micro-batches of similar length by a token budget. What a batch
holds is decided earlier, by `data.order`.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Integer

from bert_core import collation
from bert_core.collation import buckets, pad_or_pack, row_starts
from bert_core.data.draws import GUESS, ORDER, Draws, row_keys
from bert_core.data.masking import Masker, span_lengths
from bert_core.data.order import Order, Samples, balanced_part
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import ShardRows
from bert_core.data.windows import Window
from bert_core.errors import ConfigError
from bert_core.objectives.base import ROWS, Batch


def tensors(batch: Mapping[str, np.ndarray]) -> Batch:
    """Return a batch as tensors, which share its memory."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def pad(
    rows: Sequence[np.ndarray],
    pad_id: int,
    segment_b_start: Integer[np.ndarray, "rows"] | None = None,
) -> Batch:
    """Return `collation.pad` as tensors."""
    return tensors(collation.pad(rows, pad_id, segment_b_start))


def pack(
    rows: Sequence[np.ndarray], segment_b_start: Integer[np.ndarray, "rows"] | None = None
) -> Batch:
    """Return `collation.pack` as tensors."""
    return tensors(collation.pack(rows, segment_b_start))


def collate(windows: Sequence[Window], pad_id: int, packed_from: float = 1.0) -> Batch:
    """Return `collation.collate` as tensors."""
    return tensors(collation.collate(windows, pad_id, packed_from))


def row_lengths(batch: Batch) -> Integer[np.ndarray, "rows"]:
    """Return the number of tokens in each row, without padding."""
    if "offsets" in batch:
        return batch["offsets"].diff().numpy()
    mask = batch.get("attention_mask")
    rows, width = batch["input_ids"].shape
    return np.full(rows, width) if mask is None else mask.sum(1).numpy()


def prefetched(
    batches: Iterable[list[Batch]], *, steps: int = 2, pin_memory: bool = False
) -> Generator[list[Batch]]:
    """Yield the same batches, prepared by a thread up to `steps` ahead; close the generator to end
    the thread.

    Args:
        pin_memory: put tensors into pinned memory, from which a GPU copies while it computes.
    Raises: whatever preparing a batch raises, when its turn comes.
    """
    ahead: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(maxsize=steps)
    closed = threading.Event()

    def put(item: list[Batch] | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ahead.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def make() -> None:
        try:
            for step in batches:
                if pin_memory:
                    step = [{name: one.pin_memory() for name, one in each.items()} for each in step]
                if not put(step):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=make, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ahead.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be looked up by shard and row number."""

    def lengths(self, samples: Samples) -> Integer[np.ndarray, "samples"]:
        """Return the number of tokens in each row."""

    def collate(self, samples: Samples) -> Batch:
        """Return the inputs and labels of the rows."""


@dataclass(frozen=True)
class Growth:
    """Global batches that grow from `first` to `last` rows over the first `steps`, by equal
    amounts."""

    first: int
    last: int
    steps: int

    def rows(self, step: int) -> int:
        """Return the rows of a step, counted from 0."""
        return self.first + (self.last - self.first) * min(step, self.steps) // self.steps

    def rows_before(self, step: int) -> int:
        """Return the rows of all steps before this one."""
        grown = np.arange(min(step, self.steps), dtype=np.int64)
        growing = self.first * len(grown) + int(
            ((self.last - self.first) * grown // self.steps).sum()
        )
        return growing + self.last * (step - len(grown))


@dataclass(frozen=True)
class RankBatches:
    """The micro-batches of every global batch that belong to one rank, in the global order."""

    source: RowSource
    order: Order
    global_batch_size: int
    micro_batch_tokens: int
    rank: int = 0
    world_size: int = 1
    joint: bool = False
    """Whether the rows of a global batch share one loss; each batch then has ROWS, their places in
    it."""
    growth: Growth | None = None
    """How the first global batches grow to `global_batch_size`; None if all are equal."""

    def __post_init__(self) -> None:
        if self.global_batch_size < self.world_size:
            raise ConfigError(
                f"global_batch_size: wanted at least a row for each of {self.world_size} "
                f"workers, got {self.global_batch_size}: raise it, or lower num_workers"
            )

    def from_step(self, step: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of the global batches `step`, `step + 1`, … without end."""
        growth = self.growth or Growth(self.global_batch_size, self.global_batch_size, 1)
        start = growth.rows_before(step)
        while True:
            rows = growth.rows(step)
            yield self._mine(start, rows)
            start, step = start + rows, step + 1

    def once(self, most_rows: int | None = None) -> Iterator[list[Batch]]:
        """Yield the micro-batches of every row once, at most `most_rows` rows, in the order of
        epoch 0: for evaluation. Rows with one loss are all on one rank, which takes every
        `world_size`-th batch."""
        rows = min(self.order.rows_per_epoch, most_rows or self.order.rows_per_epoch)
        for number, start in enumerate(range(0, rows, self.global_batch_size)):
            count = min(self.global_batch_size, rows - start)
            if not self.joint:
                yield self._mine(start, count)
            elif number % self.world_size == self.rank:
                yield replace(self, rank=0, world_size=1)._mine(start, count)

    def _mine(self, start: int, count: int) -> list[Batch]:
        samples = self.order.samples(start, count)
        lengths = self.source.lengths(samples)
        mine = balanced_part(lengths, self.rank, self.world_size)
        micro_batches = []
        for bucket in buckets(lengths[mine], self.micro_batch_tokens):
            batch = self.source.collate(samples.take(mine[bucket]))
            if self.joint:
                batch[ROWS] = torch.from_numpy(mine[bucket])
            micro_batches.append(batch)
        return micro_batches


@dataclass(frozen=True)
class PhasedBatches:
    """Batches from one source of rows for a number of steps, then from another."""

    first: RankBatches
    steps: int
    """How many steps the first source serves."""
    then: RankBatches

    def from_step(self, step: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of the global batches `step`, `step + 1`, … without end."""
        if step < self.steps:
            yield from islice(self.first.from_step(step), self.steps - step)
        yield from self.then.from_step(max(0, step - self.steps))


@dataclass(frozen=True)
class ShardSource:
    """Rows of mapped shards, with labels for masked language modelling and for pairs.

    `open_shard` maps a shard by its number; it is called for every row, so it should cache.
    `masker` draws the masks of shards that have none; they depend only on (`seed`, epoch, shard,
    row). The random draws for a generator's replacements at masked positions depend on the same
    numbers. `packed_from` is the share of padding from which rows are packed end to end; 1 always
    pads.
    """

    open_shard: Callable[[int], ShardRows]
    pad_id: int
    masker: Masker | None = None
    seed: int = 0
    packed_from: float = 1.0

    def lengths(self, samples: Samples) -> Integer[np.ndarray, "samples"]:
        return np.array([shard.length(row) for shard, row in self._rows(samples)], dtype=np.int64)

    def collate(self, samples: Samples) -> Batch:
        rows = [shard.row(row) for shard, row in self._rows(samples)]
        input_ids = [row.input_ids for row in rows]
        segments = np.array([row.segment_b_start for row in rows])
        keys = row_keys(self.seed, samples.epochs, samples.shards, samples.rows)
        if self.masker is None:
            places = np.concatenate([row.masked_positions for row in rows])
            row_of = np.repeat(np.arange(len(rows)), [len(row.masked_positions) for row in rows])
            labels = np.concatenate([row.masked_labels for row in rows])
        else:
            offsets = offsets_of([len(ids) for ids in input_ids])
            masked = self.masker(
                np.concatenate(input_ids),
                offsets,
                np.concatenate([row.begins_word for row in rows]),
                keys,
            )
            input_ids = np.split(masked.input_ids, offsets[1:-1])
            row_of = np.searchsorted(offsets, masked.positions, side="right") - 1
            places, labels = masked.positions - offsets[row_of], masked.labels
        batch = pad_or_pack(input_ids, self.pad_id, segments, self.packed_from)
        positions = places + row_starts(batch, len(rows))[row_of]
        labelled = {
            "mlm_positions": positions,
            "mlm_labels": labels.astype(np.int64),
            "mlm_draws": Draws(row_keys(keys, GUESS))(ORDER, row_of, places),
            "mlm_span_lengths": span_lengths(positions),
        }
        of_rows = {
            name: torch.tensor([row.labels[name] for row in rows]) for name in rows[0].labels
        }
        return tensors(batch | labelled) | of_rows

    def _rows(self, samples: Samples) -> Iterator[tuple[ShardRows, int]]:
        for shard, row in zip(samples.shards, samples.rows, strict=True):
            yield self.open_shard(int(shard)), int(row)


@dataclass(frozen=True)
class WindowSource:
    """Windows of a labelled set, held in memory and treated as a single shard."""

    windows: Sequence[Window]
    pad_id: int
    packed_from: float = 1.0

    def lengths(self, samples: Samples) -> Integer[np.ndarray, "samples"]:
        return np.array([self.windows[row].tokens for row in samples.rows], dtype=np.int64)

    def collate(self, samples: Samples) -> Batch:
        return collate([self.windows[row] for row in samples.rows], self.pad_id, self.packed_from)
