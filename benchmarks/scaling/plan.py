"""The planning of a thousand hosts, by the code that does it, on the machine at hand.

No data is read: shards and files are made up, and one rank's steps and the driver's lists are made
as a run makes them.
"""

import pickle
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bert_core.batches import RankBatches, ShardSource
from bert_core.data.order import GlobalOrder
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import ShardRows
from pipelines.corpus.blocks import plan_blocks
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import CorpusFile
from pipelines.corpus.sources import Corpus
from pipelines.prepare import PrepareConfig

Plan = TypeVar("Plan")
MEAN_LENGTH, LONGEST, MASKED = 122, 128, 15
SHARDS, ROWS_PER_SHARD = 2_240, 60_000
"""Wikipedia and books in shards of 8 MiB of text, with a part of their rows: a window of all of
them would be drawn once in many steps, which is not what is measured."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a plan took here."""

    cpu_s: float
    peak_bytes: int
    """Of Python's and NumPy's memory, over what there was before."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's part of a step."""

    world_size: int
    rows: int
    """In the global batch."""
    first_step: Measured
    """Draws the order of a window of shards, too."""
    step_cpu_s: float
    """A later step, median."""
    cpu_s_per_row: float


@dataclass(frozen=True, kw_only=True)
class DriverPlan:
    """What `raybert prepare` plans before any work."""

    files: int
    blocks: int
    planning: Measured
    sent_bytes: int
    """To every worker, when it starts."""


def measured(make: Callable[[], Plan]) -> tuple[Plan, Measured]:
    """What `make` makes, the CPU that it took, and the peak of its memory; the CPU is that of a
    first call without tracing."""
    began = time.process_time()
    make()
    cpu_s = time.process_time() - began
    tracemalloc.start()
    try:
        plan = make()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return plan, Measured(cpu_s=cpu_s, peak_bytes=peak_bytes)


def rank_plan(world_size: int, rows: int, *, steps: int = 5, seed: int = 0) -> RankPlan:
    """Time one rank's plan of a global batch, its own few rows collated."""
    shard = _rows(np.random.default_rng(seed))
    source = ShardSource(lambda _: shard, pad_id=0)

    def batches() -> RankBatches:
        order = GlobalOrder([len(shard)] * SHARDS, seed=seed)
        return RankBatches(source, order, rows, 32_768, rank=0, world_size=world_size)

    _, first = measured(lambda: next(batches().from_step(0)))
    later = batches().from_step(0)
    next(later)
    took = []
    for _ in range(steps):
        began = time.process_time()
        next(later)
        took.append(time.process_time() - began)
    step_cpu_s = float(np.median(took))
    return RankPlan(
        world_size=world_size,
        rows=rows,
        first_step=first,
        step_cpu_s=step_cpu_s,
        cpu_s_per_row=step_cpu_s / rows,
    )


def _rows(rng: np.random.Generator) -> ShardRows:
    """Rows as `prepare` makes them: mostly full, some short; their words do not matter here."""
    short = rng.random(ROWS_PER_SHARD) < 2 * (LONGEST - MEAN_LENGTH) / LONGEST
    lengths = np.where(short, rng.integers(16, LONGEST, ROWS_PER_SHARD), LONGEST)
    offsets = offsets_of(lengths)
    return ShardRows(
        input_ids=np.zeros(int(offsets[-1]), np.uint16),
        offsets=offsets,
        segment_b_start=np.full(ROWS_PER_SHARD, 8, np.uint16),
        labels={"next_sentence_label": np.zeros(ROWS_PER_SHARD, np.uint8)},
        masked_positions=np.tile(np.arange(MASKED, dtype=np.uint16), ROWS_PER_SHARD),
        masked_labels=np.zeros(MASKED * ROWS_PER_SHARD, np.uint16),
        masked_offsets=MASKED * np.arange(ROWS_PER_SHARD + 1),
    )


def driver_plan(files: int, file_bytes: int) -> DriverPlan:
    """Plan the preparation of a corpus of that many compressed files, which are not opened."""
    corpus = Corpus(
        config=CorpusConfig(source="s3://corpus/*.jsonl.zst"),
        files=tuple(
            CorpusFile(
                path=f"s3://corpus/{number:07d}.jsonl.zst",
                source=0,
                size_bytes=file_bytes,
                format="jsonl",
                compression="zst",
            )
            for number in range(files)
        ),
    )
    blocks, planning = measured(lambda: plan_blocks(corpus, PrepareConfig.block_bytes))
    return DriverPlan(
        files=files,
        blocks=len(blocks),
        planning=planning,
        sent_bytes=len(pickle.dumps(blocks)),
    )
