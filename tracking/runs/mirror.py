"""Copies the record of a run to an output that is not on this machine.

What a stage records is written to a local folder first (`tracking.runs.spool`). A thread copies it
to a folder at the output's URI, from which a process on any other host goes on.

The copy belongs to the process that opened it last: `mlflow_run.json` counts the sessions, and a
process that finds a later session there, or another run, writes nothing more.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from bert_core import files
from bert_core.manifest import BUNDLE
from tracking.runs.goodput import FILE as GOODPUT
from tracking.runs.spool import METRICS, RUN, SENT, Run, parse_run, read_run

logger = logging.getLogger(__name__)

RECORD = "record"
"""The folder in the output."""
COPY_EVERY_S = 5.0
LEAST_PAUSE = 20
"""Least pause between two copies, in units of the time that the last one took."""
FOR_PEOPLE = (".md", ".png", ".log")
"""Endings of other files in a record: cards, pictures, logs."""


class Mirror(threading.Thread):
    """Copies what has changed in a folder, until `finish` is called.

    A failing storage does not stop the run: it is logged once, and missing files are copied later.
    """

    def __init__(self, folder: Path, place: str, run: Run, superseded: Callable[[], None]) -> None:
        """Store what to copy; `start` begins to copy.

        Args:
            run: the run as it was when the folder was opened.
            superseded: called when another process has taken over the record.
        """
        super().__init__(name="record-mirror", daemon=True)
        self._folder, self._place, self._run = folder, place, run
        self._superseded = superseded
        self._copied: dict[str, tuple[int, ...]] = {}
        self._finishing, self._abandoned = threading.Event(), False
        self._complained = False

    def take(self) -> None:
        """Copy everything now, which makes the copy this process's. Raises: ResourceError."""
        self._copy()

    def run(self) -> None:
        pause_s = COPY_EVERY_S
        while not self._abandoned:
            finishing = self._finishing.wait(pause_s)
            began, pause_s = time.monotonic(), COPY_EVERY_S
            try:
                if not self._is_ours():
                    self._superseded()
                    return
                self._copy()
                pause_s = max(pause_s, LEAST_PAUSE * (time.monotonic() - began))
            except Exception as error:
                self._complain(error)
            if finishing:
                return

    def finish(self, timeout_s: float) -> None:
        """Copy what is left, and end the thread."""
        self._finishing.set()
        self.join(timeout_s)
        if self.is_alive():
            self._abandoned = True
            self._complain(TimeoutError(f"it took longer than {timeout_s:g} s"))

    def _is_ours(self) -> bool:
        stored = read_copy(self._place)
        return stored is not None and _identity(stored) == _identity(self._run)

    def _copy(self) -> None:
        for path in _record_of(self._folder):
            name, stat = path.relative_to(self._folder).as_posix(), path.stat()
            version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if self._copied.get(name) != version and not self._abandoned:
                files.write_bytes(files.join(self._place, quote(name)), path.read_bytes())
                self._copied[name] = version

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            logger.warning(
                f"the record of the run cannot be copied to {self._place}: {error}; it is kept in "
                f"{self._folder}, and copied as soon as that works"
            )


def read_copy(place: str) -> Run | None:
    """Return the run that the copy belongs to; None if there is no copy. Raises: FormatError,
    ResourceError."""
    path = files.join(place, RUN)
    try:
        return parse_run(files.read_bytes(path), path)
    except FileNotFoundError:
        return None


def fetch_newer(folder: Path, place: str) -> None:
    """Replace the record in a folder, which this process holds, unless it is as new as the copy.

    If there is no copy, the record belongs to an earlier run and is emptied, since a run copies its
    record before it begins.
    Raises: FormatError, ResourceError.
    """
    stored, ours = read_copy(place), read_run(folder)
    if ours == stored or (
        stored is not None
        and ours is not None
        and ours.key == stored.key
        and ours.session >= stored.session
    ):
        return
    # `mlflow_run.json` is removed first and written last: until then, the record counts as older.
    (folder / RUN).unlink(missing_ok=True)
    (folder / SENT).unlink(missing_ok=True)
    (folder / METRICS).write_bytes(b"")  # emptied in place: the file is the folder's lock
    if stored is None:
        return
    copies = {unquote(path[len(place) + 1 :]): path for path in files.find_files(place)}
    (folder / METRICS).write_bytes(files.read_bytes(copies.pop(METRICS)))
    run = copies.pop(RUN)
    for name, path in [*copies.items(), (RUN, run)]:
        files.write_bytes(str(folder / name), files.read_bytes(path))


def _identity(run: Run) -> tuple[str, int]:
    return run.key, run.session


def _record_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a record; `mlflow_run.json`, which says which run it is, comes last."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in FOR_PEOPLE and name.parts[0] != BUNDLE and path.is_file():
            yield path
    if (folder / GOODPUT).exists():
        yield folder / GOODPUT
    yield folder / METRICS
    yield folder / RUN
