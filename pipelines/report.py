"""What a person sees of long work: a bar on a terminal, a line an interval elsewhere."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 10.0

# Resolved at every print, so that a captured or redirected stdout is honoured.
console = Console(highlight=False, soft_wrap=True)


CUT = "rows_cut"
"""Remark: how many rows are longer than the model takes them."""

SEEN = "rows_seen_in_training"
"""Remark: how many of the rows that score a model have taught or selected it, so that its figures
are better than they are on others."""


def tell_remarks(stage: str, remarks: Mapping[str, int | str], source: str) -> None:
    """A line for everything that there is to tell of rows: `12 rows cut`, `tag scheme: BIO`."""
    for name, value in remarks.items():
        words = name.replace("_", " ")
        if value:
            told = f"{words}: {value}" if isinstance(value, str) else f"{value:,} {words}"
            say(f"{stage}: {told} in {source}")


def say(text: str) -> None:
    """One line of plain English."""
    console.print(text, markup=False)


class Meter:
    """Shows how much of `total` is done, the rate and the time left.

    The rate counts from what was done first, so that neither what an earlier run did nor the time
    until work begins is in it.
    """

    def __init__(self, title: str, total: float, unit: str, progress: Progress | None) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done, self.note = 0.0, ""
        self._progress = progress
        self._task = progress.add_task(title, total=total, note="") if progress else None
        self._last_line_s = time.monotonic()
        self._first: tuple[float, float] | None = None  # when, and how much was done then

    def set(self, done: float, note: str = "") -> None:
        """`done` of the total is finished; `note` is shown beside it."""
        self._first = self._first or (time.monotonic(), done)
        self.done, self.note = done, note
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            say(self._line())

    def add(self, amount: float = 1, note: str = "") -> None:
        """`amount` more is finished."""
        self.set(self.done + amount, note)

    def _line(self) -> str:
        assert self._first is not None  # `set` is the caller
        first_s, first = self._first
        parts = [f"{self.done:,.0f} of {self.total:,.0f} {self.unit}"]
        if self.done > first:
            rate = (self.done - first) / (time.monotonic() - first_s)
            parts.append(f"{rate:,.1f} {self.unit}/s")
            parts.append(f"{(self.total - self.done) / rate:,.0f} s left")
        return f"  {self.title}: {', '.join([*parts, self.note] if self.note else parts)}"


@contextmanager
def meter(title: str, total: float, unit: str) -> Iterator[Meter]:
    """A progress bar on a terminal; elsewhere a line every `LINE_EVERY_S` seconds."""
    if not sys.stdout.isatty():
        yield Meter(title, total, unit, None)
        return
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Meter(title, total, unit, progress)
