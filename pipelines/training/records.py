"""What a training run leaves in its folder: above all the points of its curves.

A worker reports, the controller writes (`RunRecorder`), the driver reads.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tracking.metric_names import TOKENS_PER_S
from tracking.runs import RunRecorder

METRICS = "metrics.jsonl"
"""A line per point of the curves."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""
DIVERGED = "diverged.txt"
"""Why training ended, where a loss diverged: written by a worker, raised in the driver."""

Records = list[tuple[int, dict[str, float]]]
"""Points of curves: (global step, numbers)."""

Report = Callable[[Records, bool], bool]
"""Takes the points since the last report, and whether it is the last. Collective.

Gives whether a worker's node is about to be taken, once for each: time for a checkpoint.
"""


def record_all(recorder: RunRecorder, records: Records) -> None:
    """Record all points."""
    for step, metrics in records:
        recorder.record(step, metrics)


def read_records(folder: Path) -> dict[int, dict[str, float]]:
    """The numbers that a run has recorded, by step."""
    return NewRecords(folder).read()


class NewRecords:
    """Reads the record of a run as it grows, every line once."""

    def __init__(self, folder: Path) -> None:
        self._path, self._end = folder / METRICS, 0
        self._inode: int | None = None

    def read(self) -> dict[int, dict[str, float]]:
        """The numbers by step of the lines that were completed since the last call; of the whole
        file where it is another one by now, or has been cut."""
        if not self._path.exists():
            return {}
        with open(self._path, "rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._end:
                self._inode, self._end = now.st_ino, 0
            file.seek(self._end)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._end += len(whole) + len(newline)
        lines = map(json.loads, whole.splitlines())
        return {line["step"]: line["metrics"] for line in lines}


def median_speed(records: dict[int, dict[str, float]]) -> float:
    """Tokens a second over all workers, as half of the points of the curve have it."""
    return float(np.median([r[TOKENS_PER_S] for r in records.values() if TOKENS_PER_S in r]))
