"""Turns rows into tensors, packed end to end or padded; padding is added nowhere else.

The rows of a batch are divided into micro-batches of similar length by a token budget. Each is
padded to a multiple of 8 (the vector width that kernels like), or packed if the share of padding
would reach `packed_from`. What a batch holds is decided earlier, by `data.order`.
"""

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Integer

from bert_core.data.draws import GUESS, ORDER, Draws, row_keys
from bert_core.data.masking import Masker, span_lengths
from bert_core.data.order import Order, Samples, balanced_part
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import ShardRows
from bert_core.data.windows import PAD_MULTIPLE, Window
from bert_core.errors import ConfigError
from bert_core.objectives.base import Batch


def pad(
    rows: Sequence[np.ndarray],
    pad_id: int,
    segment_b_start: Integer[np.ndarray, "rows"] | None = None,
    width: int | None = None,
) -> Batch:
    """Return the input tensors of B rows, padded to S: `width`, or the longest row, rounded up to a
    multiple of 8.

    `attention_mask` is omitted if no row is padded; ids from `segment_b_start` on are segment 1.
    """
    lengths = np.array([len(row) for row in rows])
    width = width or _width(lengths)
    input_ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    for index, row in enumerate(rows):
        input_ids[index, : len(row)] = row
    positions = np.arange(width)
    attends = positions < lengths[:, None]
    token_type_ids = np.zeros_like(input_ids)
    if segment_b_start is not None:
        token_type_ids[(positions >= segment_b_start[:, None]) & attends] = 1
    batch = {
        "input_ids": torch.from_numpy(input_ids),
        "token_type_ids": torch.from_numpy(token_type_ids),
    }
    if not attends.all():
        batch["attention_mask"] = torch.from_numpy(attends.astype(np.int64))
    return batch


def pack(
    rows: Sequence[np.ndarray], segment_b_start: Integer[np.ndarray, "rows"] | None = None
) -> Batch:
    """Return the input tensors of B rows packed end to end: T tokens, no padding.

    Segments are assigned as in `pad`.
    """
    lengths = np.array([len(row) for row in rows])
    offsets = offsets_of(lengths)
    token_type_ids = np.zeros(offsets[-1], dtype=np.int64)
    if segment_b_start is not None:
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        token_type_ids[positions >= np.repeat(segment_b_start, lengths)] = 1
    return {
        "input_ids": torch.from_numpy(np.concatenate(rows).astype(np.int64)),
        "token_type_ids": torch.from_numpy(token_type_ids),
        "offsets": torch.from_numpy(offsets),
    }


def longest_row(positions: int) -> int:
    """Return the length of the longest row that a model with `positions` positions can read:
    padding the row to a multiple of 8 never exceeds the last position."""
    return positions // PAD_MULTIPLE * PAD_MULTIPLE


def _width(lengths: Integer[np.ndarray, "rows"]) -> int:
    return -(-int(lengths.max()) // PAD_MULTIPLE) * PAD_MULTIPLE


def _laid_out(
    rows: Sequence[np.ndarray], pad_id: int, segment_b_start: np.ndarray, packed_from: float
) -> Batch:
    lengths = np.array([len(row) for row in rows])
    if _is_packed(lengths, packed_from):
        return pack(rows, segment_b_start)
    return pad(rows, pad_id, segment_b_start)


def _is_packed(lengths: Integer[np.ndarray, "rows"], packed_from: float) -> bool:
    padding = 1 - lengths.sum() / (len(lengths) * _width(lengths))
    return bool(padding >= packed_from)


def laid_out_tokens(windows: Sequence[Window], packed_from: float = 1.0) -> int:
    """Return the number of tokens in the batch that `collate` makes of the windows, padding
    included."""
    lengths = np.array([len(ids) for window in windows for ids in window.ids])
    if _is_packed(lengths, packed_from):
        return int(lengths.sum())
    return len(lengths) * _width(lengths)


def _starts(batch: Batch, rows: int) -> Integer[np.ndarray, "rows"]:
    """Return the index at which each row begins among the flattened tokens."""
    if "offsets" in batch:
        return batch["offsets"].numpy()[:-1]
    return np.arange(rows) * batch["input_ids"].shape[1]


def buckets(lengths: Integer[np.ndarray, "rows"], most_tokens: int) -> list[np.ndarray]:
    """Group rows of similar length: return their indices, shortest first, in groups of at most
    `most_tokens` tokens with padding.

    A row longer than that is a group by itself.
    """
    order = np.argsort(lengths, kind="stable")
    widths = -(-lengths[order] // PAD_MULTIPLE) * PAD_MULTIPLE
    groups, start = [], 0
    for end, width in enumerate(widths):
        if end > start and (end + 1 - start) * width > most_tokens:
            groups.append(order[start:end])
            start = end
    return [*groups, order[start:]] if len(order) else []


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
class RankBatches:
    """The micro-batches of every global batch that belong to one rank, in the global order."""

    source: RowSource
    order: Order
    global_batch_size: int
    micro_batch_tokens: int
    rank: int = 0
    world_size: int = 1
    group_rows: int = 1
    """Consecutive rows that share one loss: no rank or micro-batch separates them. `groups` of a
    batch holds the number of rows in each; the last group of a global batch may be smaller."""

    def __post_init__(self) -> None:
        if -(-self.global_batch_size // self.group_rows) < self.world_size:
            unit = "row" if self.group_rows == 1 else f"group of {self.group_rows} rows"
            smaller = "" if self.group_rows == 1 else " or the task's group_size"
            raise ConfigError(
                f"global_batch_size: wanted at least a {unit} for each of {self.world_size} "
                f"workers, got {self.global_batch_size}: raise it, or lower num_workers{smaller}"
            )

    def from_step(self, step: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of the global batches `step`, `step + 1`, … without end."""
        while True:
            yield self._mine(step * self.global_batch_size, self.global_batch_size)
            step += 1

    def once(self, most_rows: int | None = None) -> Iterator[list[Batch]]:
        """Yield the micro-batches of every row once, at most `most_rows` rows, in the order of
        epoch 0: for evaluation."""
        rows = min(self.order.rows_per_epoch, most_rows or self.order.rows_per_epoch)
        for start in range(0, rows, self.global_batch_size):
            yield self._mine(start, min(self.global_batch_size, rows - start))

    def _mine(self, start: int, count: int) -> list[Batch]:
        size = self.group_rows
        samples = self.order.samples(start, count)
        lengths = self.source.lengths(samples)
        firsts = np.arange(0, count, size)  # index of each group's first row
        mine = balanced_part(np.add.reduceat(lengths, firsts), self.rank, self.world_size)
        padded = np.maximum.reduceat(lengths, firsts) * np.diff(firsts, append=count)
        micro_batches = []
        for bucket in buckets(padded[mine], self.micro_batch_tokens):
            rows = (firsts[mine[bucket], None] + np.arange(size)).ravel()
            batch = self.source.collate(samples.take(rows[rows < count]))
            if size > 1:
                batch["groups"] = torch.from_numpy(np.diff(firsts, append=count)[mine[bucket]])
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
        batch = _laid_out(input_ids, self.pad_id, segments, self.packed_from)
        positions = places + _starts(batch, len(rows))[row_of]
        return batch | {
            "mlm_positions": torch.from_numpy(positions),
            "mlm_labels": torch.from_numpy(labels.astype(np.int64)),
            "mlm_draws": torch.from_numpy(Draws(row_keys(keys, GUESS))(ORDER, row_of, places)),
            "mlm_span_lengths": torch.from_numpy(span_lengths(positions)),
            **{name: torch.tensor([row.labels[name] for row in rows]) for name in rows[0].labels},
        }

    def _rows(self, samples: Samples) -> Iterator[tuple[ShardRows, int]]:
        for shard, row in zip(samples.shards, samples.rows, strict=True):
            yield self.open_shard(int(shard)), int(row)


def collate(
    windows: Sequence[Window], pad_id: int, packed_from: float = 1.0, width: int | None = None
) -> Batch:
    """Return one batch of the windows' sequences, in order, with the positions to score and the
    labels.

    Args:
        packed_from: share of padding from which sequences are packed; 1 always pads.
        width: what to pad to; sequences are not packed then. None takes the width that `pad`
            chooses.
    """
    ids = [each for window in windows for each in window.ids]
    segments = np.array([each for window in windows for each in window.segment_b_start])
    if width is None:
        batch = _laid_out(ids, pad_id, segments, packed_from)
    else:
        batch = pad(ids, pad_id, segments, width)
    ends = np.cumsum([len(window.ids) for window in windows])
    starts = np.split(_starts(batch, len(ids)), ends[:-1])
    for name in windows[0].positions:
        places = [
            window.positions[name] + start for window, start in zip(windows, starts, strict=True)
        ]
        batch[name] = torch.from_numpy(np.concatenate(places))
    if len(ids) > len(windows):
        batch["choices"] = torch.tensor([len(window.ids) for window in windows])
    for name in windows[0].labels:
        labels = np.concatenate([window.labels[name] for window in windows])
        batch[name] = torch.from_numpy(labels)
    return batch


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
