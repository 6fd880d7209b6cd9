"""Shows the progress of long work to a person: a bar on a terminal, elsewhere a line per
interval."""

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

from bert_core.wording import without_secrets
from tracking.runs.goodput import duration

FIRST_LINE_S, LINE_EVERY_S = 2.0, 10.0
"""Without a terminal: seconds until the first line, and then between lines."""

# Resolved at every print, so that a captured or redirected stdout is honoured.
console = Console(highlight=False, soft_wrap=True)


CUT = "rows_cut"
"""Remark: how many rows are longer than the model takes."""

LEFT_OUT = "rows_left_out"
"""Remark: how many rows teach nothing, since everything they ask about is cut off."""

BROKEN = "broken_lines_left_out"
"""Remark: how many lines of a file are not rows."""

SEEN = "rows_seen_in_training"
"""Remark: how many of the rows that score a model were used to train or select it, so that its
figures look better than they are on other rows."""


def print_remarks(stage: str, remarks: Mapping[str, int | str], source: str) -> None:
    """Print a line per remark about rows: `1 row cut`, `tag scheme: BIO`."""
    for name, value in remarks.items():
        words = name.replace("_", " ")
        if not value:
            continue
        if isinstance(value, str):
            say(f"{stage}: {words}: {value} in {source}")
        else:
            several, _, rest = words.partition(" ")
            ends_in_y = several.endswith("ies")
            what = f"{several[:-3]}y" if ends_in_y else several.removesuffix("s")
            say(f"{stage}: {counted(value, what, several)} {rest} in {source}")


def counted(count: int, what: str, several: str = "") -> str:
    """Return a count with its noun: `1 row`, `1,000 rows`; `several` is an irregular plural."""
    return f"{count:,} {what if count == 1 else several or f'{what}s'}"


def say(text: str) -> None:
    """Print a line of plain English, with credentials removed from addresses."""
    console.print(without_secrets(text), markup=False)


class Meter:
    """Shows how much of `total` is done, the rate (of all but time itself) and the time left.

    The rate counts from the first progress, so that it includes neither what an earlier run did nor
    the time until work begins.
    """

    def __init__(self, title: str, total: float, unit: str, progress: Progress | None) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done, self.note = 0.0, ""
        self._progress = progress
        self._task = progress.add_task(title, total=total, note="") if progress else None
        self._next_line_s = time.monotonic() + FIRST_LINE_S
        self._shown: tuple[float, str] | None = None
        self._pause_s = LINE_EVERY_S
        self._first: tuple[float, float] | None = None  # when, and how much was done then

    def set(self, done: float, note: str = "") -> None:
        """Record that `done` of the total is finished; `note` is shown next to it."""
        if self._first is None and done:
            self._first = time.monotonic(), done
        self.done, self.note = done, note
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, note=note)
        elif time.monotonic() >= self._next_line_s:
            # While there is no progress, lines come ever less often.
            same = self._shown == (done, note)
            self._pause_s = 2 * self._pause_s if same else LINE_EVERY_S
            self._next_line_s = time.monotonic() + self._pause_s
            self._shown = done, note
            say(self._line())

    def add(self, amount: float = 1, note: str = "") -> None:
        """Record that `amount` more is finished."""
        self.set(self.done + amount, note)

    def _line(self) -> str:
        parts = [f"{self.done:,.0f} of {self.total:,.0f} {self.unit}"]
        if self._first is not None and self.done > self._first[1]:
            rate = (self.done - self._first[1]) / (time.monotonic() - self._first[0])
            if self.unit not in ("seconds", "minutes"):
                parts.append(f"{rate:,.1f} {self.unit}/s")
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        return f"  {self.title}: {', '.join([*parts, self.note] if self.note else parts)}"


@contextmanager
def meter(title: str, total: float, unit: str) -> Iterator[Meter]:
    """Yield a progress bar on a terminal.

    Elsewhere, a line is printed after `FIRST_LINE_S` seconds and then every `LINE_EVERY_S`, or less
    and less often while there is no progress.
    """
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
