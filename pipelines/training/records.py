"""Reads and writes the records of a training run in its folder: mainly the points of its curves.

A worker reports them, the controller writes them (`RunRecorder`), the driver reads them.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from tracking.runs.metric_names import TOKENS_PER_S
from tracking.runs.recorder import RunRecorder
from tracking.runs.spool import METRICS

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""
DIVERGED = "diverged.txt"
"""Why training ended, if the loss diverged: written by a worker, raised in the driver."""
STOPPING_FILE = "stopping"
"""Exists from when training is to stop until its last checkpoint is written: created by the driver,
removed by the first worker."""

Records = list[tuple[int, dict[str, float]]]
"""Points of curves: (global step, numbers)."""

Notice = Literal["nothing", "checkpoint", "stop"]
"""Request to a worker: write a checkpoint, since a worker's node is about to be preempted (once
per node); or write a checkpoint and stop."""

Report = Callable[[Records, bool], Notice]
"""Takes the points since the last report, and whether this report is the last. Collective."""


class StoppedError(Exception):
    """Training has been asked to stop, and has written its last checkpoint."""


def record_all(recorder: RunRecorder, records: Records) -> None:
    """Record all points."""
    for step, metrics in records:
        recorder.record(step, metrics)


def with_readings(records: Records, readings: Sequence[Mapping[str, float]]) -> Records:
    """Return the points, with the nodes' readings (`tracking.runs.system_metrics`) added to the
    last one."""
    if not records:
        return records
    step, numbers = records[-1]
    together = {name: value for each in readings for name, value in each.items()}
    return [*records[:-1], (step, {**numbers, **together})]


def read_records(folder: Path) -> dict[int, dict[str, float]]:
    """Return the numbers that a run has recorded, by step."""
    return NewRecords(folder).read()


class NewRecords:
    """Reads the record of a run as it grows, every line once."""

    def __init__(self, folder: Path) -> None:
        self._path, self._end = folder / METRICS, 0
        self._inode: int | None = None

    def read(self) -> dict[int, dict[str, float]]:
        """Return the numbers by step, from the lines completed since the last call, or from the
        whole file if it was replaced or truncated."""
        if not self._path.exists():
            return {}
        with open(self._path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._end:
                self._inode, self._end = stat.st_ino, 0
            file.seek(self._end)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._end += len(whole) + len(newline)
        lines = map(json.loads, whole.splitlines())
        return {line["step"]: line["metrics"] for line in lines}


def median_speed(records: dict[int, dict[str, float]]) -> float:
    """Return the median over the curve's points of the tokens per second of all workers."""
    return float(np.median([r[TOKENS_PER_S] for r in records.values() if TOKENS_PER_S in r]))
