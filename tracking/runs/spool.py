"""Keeps a stage's record on local disk: the original from which MLflow gets a copy.

A folder (a stage's run folder) has three files:

    metrics.jsonl    one line per record: {"step": 20, "time_ms": 1760000000000, "metrics": {…}},
                     steps ascending; NaN and Infinity as Python and pandas read them
    metrics.sent     how many of these lines MLflow has, in decimal
    mlflow_run.json  which MLflow run it is, and what else is still to be sent to MLflow

`tracking.runs.recorder` does the sending. Only one process at a time uses a folder: it holds a lock
on `metrics.jsonl`, which is released when it ends.
"""

import fcntl
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from bert_core.errors import FormatError, ResourceError
from bert_core.files import write_bytes, write_json

FORMAT_VERSION = 3
"""1 had no `experiment_id`, 2 no notes of kind `json`. While there are none, 2 is written, so that
the version before can go on with the folder."""
METRICS = "metrics.jsonl"
SENT = "metrics.sent"
RUN = "mlflow_run.json"
LOCK_TIMEOUT_S = 30.0

NoteKind = Literal["params", "tags", "inputs", "artifact", "json", "status"]


@dataclass(frozen=True)
class Record:
    """One line of `metrics.jsonl`."""

    step: int
    time_ms: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Batch:
    """Records to send to MLflow, and the offset in the file at which the next record starts."""

    records: list[Record]
    end: int


@dataclass(frozen=True)
class Note:
    """Something other than metrics to send to MLflow; sending it twice is harmless."""

    kind: NoteKind
    value: Any


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which MLflow run a folder belongs to: the content of `mlflow_run.json`.

    `key` is a tag of that run. By it, a run is found that was created although the answer got lost.
    """

    tracking_uri: str
    experiment: str
    run_name: str
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    experiment_id: str | None = None
    """MLflow's, of `experiment`; None until MLflow has answered."""
    run_id: str | None = None
    status: str | None = None
    """The status last noted."""
    session: int = 0
    """How many times the folder has been opened for writing."""
    untold: tuple[Note, ...] = ()
    """Notes that MLflow has yet to receive."""
    format_version: int = FORMAT_VERSION


def read_run(folder: Path) -> Run | None:
    """Return the content of `mlflow_run.json`; None if there is none. Raises: FormatError."""
    try:
        data = (folder / RUN).read_bytes()
    except FileNotFoundError:
        return None
    return parse_run(data, str(folder / RUN))


def parse_run(data: bytes, path: str) -> Run:
    """Return the content of the `mlflow_run.json` at `path`. Raises: FormatError."""
    try:
        stored: dict[str, Any] = json.loads(data)
        version = stored["format_version"]
        notes = tuple(Note(**note) for note in stored["untold"])
        now = {"untold": notes, "format_version": FORMAT_VERSION}
        run = Run(**stored | now) if version <= FORMAT_VERSION else None
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path}: wanted the JSON that raybert writes there, got something else ({error}): "
            "remove the file to send the records to a new MLflow run"
        ) from None
    if run is None:
        raise FormatError(
            f"{path} has format {version}, this raybert reads up to {FORMAT_VERSION}: use the "
            "raybert that wrote it, or a newer one"
        )
    return run


class Spool:
    """The three files of a folder, open for writing. One thread may append while another sends."""

    def __init__(self, folder: Path, new: Run, fetch: Callable[[Path], None] | None = None) -> None:
        """Reopen the folder as it was left; a last line truncated by a kill is removed.

        Args:
            new: the run to use if the folder has none.
            fetch: brings the folder up to date before it is read, once no other process uses it.
        Raises: FormatError if `mlflow_run.json` is damaged; ResourceError if another process uses
            the folder and does not release it within LOCK_TIMEOUT_S; OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = threading.Lock()
        self._path = folder / METRICS
        self._file = _locked(self._path)
        try:
            if fetch is not None:
                fetch(folder)
            run = read_run(folder) or new
        except BaseException:
            self._file.close()
            raise
        lines = _cut_torn_end(self._path).splitlines(keepends=True)
        self._size = sum(map(len, lines))
        self.lines = len(lines)
        self.last_step: int = json.loads(lines[-1])["step"] if lines else -1
        sent = folder / SENT
        self.sent = min(int(sent.read_text()), self.lines) if sent.exists() else 0
        self._sent_end = sum(map(len, lines[: self.sent]))
        self._save(replace(run, session=run.session + 1))

    def append(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Write one record; if `step` is not after the last one, write nothing and return False.

        Raises: OSError, leaving the file as it was before.
        """
        if step <= self.last_step:
            return False
        record = Record(step, time.time_ns() // 1_000_000, dict(metrics))
        line = json.dumps(asdict(record)).encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"{self._path}: only a part of a line could be written")
        except OSError:
            # A partial line would corrupt the next one.
            self._file.truncate(self._size)
            raise
        self._size += len(line)
        self.last_step = step
        self.lines += 1
        return True

    def next_batch(self, most_metrics: int) -> Batch:
        """Return the next records to send, within `most_metrics` values (a single record may exceed
        it)."""
        records: list[Record] = []
        values = 0
        with open(self._path, "rb") as file:
            file.seek(self._sent_end)
            end = self._sent_end
            for _ in range(self.lines - self.sent):
                line = file.readline()
                record = Record(**json.loads(line))
                values += len(record.metrics)
                if records and values > most_metrics:
                    break
                records.append(record)
                end += len(line)
        return Batch(records, end)

    def mark_sent(self, batch: Batch) -> None:
        """Note on disk that MLflow has this batch."""
        self._mark_sent(self.sent + len(batch.records), batch.end)

    def move(self, run: Run) -> None:
        """Let the folder belong to this run from now on, and send it all records."""
        with self._lock:
            self._save(replace(run, session=self._run.session))
        self.mark_all_unsent()

    def mark_all_unsent(self) -> None:
        """Start again at the first line, since the run that had the records is gone."""
        self._mark_sent(0, 0)

    def _mark_sent(self, lines: int, end: int) -> None:
        with self._lock:
            self.sent, self._sent_end = lines, end
            if not self._file.closed:
                write_bytes(str(self.folder / SENT), b"%d\n" % lines)

    def has_unsent(self) -> bool:
        """Whether anything is missing in MLflow, including the run itself."""
        return self.sent < self.lines or bool(self._run.untold) or self._run.run_id is None

    @property
    def run(self) -> Run:
        return self._run

    def belongs_to(self, experiment_id: str, run_id: str) -> None:
        """Note which MLflow run the folder belongs to, and in which experiment."""
        with self._lock:
            self._save(replace(self._run, experiment_id=experiment_id, run_id=run_id))

    def enqueue(self, *notes: Note) -> None:
        """Queue what to send to MLflow, with one write. A status replaces an earlier one."""
        with self._lock:
            status, waiting = self._run.status, list(self._run.untold)
            for new in notes:
                if new.kind == "status":
                    status = new.value
                    waiting = [note for note in waiting if note.kind != "status"]
                waiting = [*(note for note in waiting if note != new), new]
            self._save(replace(self._run, status=status, untold=tuple(waiting)))

    def mark_received(self, received: Sequence[Note]) -> None:
        """Note that MLflow has received these."""
        with self._lock:
            waiting = tuple(note for note in self._run.untold if note not in received)
            self._save(replace(self._run, untold=waiting))

    def close(self) -> None:
        """Release the folder: a thread that is still sending no longer changes anything in it."""
        with self._lock:
            self._file.close()

    def _save(self, run: Run) -> None:
        self._run = run
        if not self._file.closed:
            version = FORMAT_VERSION if any(note.kind == "json" for note in run.untold) else 2
            write_json(str(self.folder / RUN), asdict(run) | {"format_version": version})


def await_release(folder: Path) -> None:
    """Wait until no process uses the folder, before it is removed. Raises: ResourceError."""
    if (folder / METRICS).exists():
        _locked(folder / METRICS).close()


def _locked(path: Path) -> FileIO:
    """Return the file open for appending, once no other process writes it, and locked until closed.

    Raises: ResourceError if that takes longer than LOCK_TIMEOUT_S.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (open as long as the spool is)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if time.monotonic() >= deadline:
                raise ResourceError(
                    f"{path}: wanted to write it, another process is doing so and has not ended "
                    f"within {LOCK_TIMEOUT_S:g} s: stop that run, or give another output"
                ) from None
            time.sleep(0.05)
            continue
        except OSError:
            return file  # a file system without locks
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # the file was removed while we waited
        path.parent.mkdir(parents=True, exist_ok=True)


def _cut_torn_end(path: Path) -> bytes:
    """Remove incomplete records at the file's end on disk, and return the remaining bytes."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        try:
            Record(**json.loads(data[start:end]))
            break
        except (ValueError, TypeError):
            end = start
    if end < len(data):
        os.truncate(path, end)
    return data[:end]
