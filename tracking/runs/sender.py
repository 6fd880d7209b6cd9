"""The thread that copies a spool to MLflow, and retries while MLflow is unreachable."""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tracking.runs.spool import Note, NoteKind, Spool
from tracking.store import sqlite_runs
from tracking.store.mlflow_runs import MlflowRuns
from tracking.store.runs import Dataset, Metric, RefusedByMlflowError, Runs

logger = logging.getLogger(__name__)

RESTART_TAG = "restart."
SEND_EVERY_S = 1.0
LONGEST_PAUSE_S = 30.0
LAST_TRIES = 2
# Maximum per call to `log_batch`: mlflow/utils/validation.py.
BATCH_METRICS = 1000
BATCH_PARAMS = 100
FILES: tuple[NoteKind, ...] = ("artifact", "json")
"""Notes that go to the artifact store."""
_LOCAL = ("", "file")
SOURCE_TYPES = ("abfss", "gs", "hdfs", "s3")
"""Schemes that are MLflow's name of a type of data source, and whose sources it reads back."""


class Sender(threading.Thread):
    """Sends the content of the spool every second, until `finish` is called.

    A daemon: the process may end at any time, since the spool knows what has been sent. MLflow
    knows it too, and is queried whenever a connection to it is opened: a process on another host,
    which trained some steps again, may have sent more than this folder has.
    """

    def __init__(self, spool: Spool, uri: str) -> None:
        super().__init__(name="mlflow-sender", daemon=True)
        self._spool = spool
        self._uri = uri
        self._runs: Runs | None = None
        self._wake = threading.Event()
        self._finishing = False
        self._abandoned = False
        self._reason: str | None = None
        self._stored_steps: Mapping[str, int] = {}

    def run(self) -> None:
        pause_s = 0.0
        tries = LAST_TRIES
        while tries and not self._abandoned:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._abandoned:
                return
            finishing = self._finishing
            try:
                self._send()
            except Exception as error:
                # Whatever the error, training continues, and a later retry may succeed.
                logger.debug("sending to MLflow failed", exc_info=True)
                self._reason = str(error).partition("\n")[0] or repr(error)
                self._runs = None
                tries -= finishing
                pause_s = SEND_EVERY_S if finishing else min(2 * pause_s + 1, LONGEST_PAUSE_S)
            else:
                self._reason = None
                if finishing:
                    return
                pause_s = SEND_EVERY_S

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Try now and every second; returns whether everything was sent before the timeout."""
        end = time.monotonic() + timeout_s
        next_try = 0.0
        while self._spool.has_unsent():
            now = time.monotonic()
            if now >= end or not self.is_alive():
                return False
            if now >= next_try:
                self._wake.set()
                next_try = now + SEND_EVERY_S
            time.sleep(0.02)
        return True

    def finish(self, timeout_s: float) -> str | None:
        """Send what is left and end. Returns why something could not be sent; None if all was."""
        self._finishing = True
        self._wake.set()
        self.join(timeout_s)
        if self.is_alive():
            self._abandoned = True
            return self._reason or f"it took longer than {timeout_s:g} s"
        return self._reason

    def abandon(self) -> None:
        """Send nothing more: another process has taken over the run."""
        self._abandoned = True
        self._wake.set()

    def _send(self) -> None:
        if not self._spool.has_unsent():
            return
        if self._runs is not None:
            self._runs.require_answer()
        runs = self._runs = self._runs or self._open_run()
        run_id = self._spool.run.run_id
        assert run_id is not None
        # Files are sent last, after what the run is, how it went and how it ended: they may go to
        # another store, whose failure must not hold up the rest.
        notes = self._spool.run.untold
        self._send_notes(runs, run_id, [n for n in notes if n.kind not in (*FILES, "status")])
        self._send_records(runs, run_id)
        self._send_notes(runs, run_id, [n for n in notes if n.kind == "status"])
        self._send_notes(runs, run_id, [n for n in notes if n.kind in FILES])

    def _open_run(self) -> Runs:
        """Find the run that the spool belongs to, or create it."""
        runs = sqlite_runs.reach(self._uri) or MlflowRuns(self._uri)
        run = self._spool.run
        experiment = runs.experiment(run.experiment)
        stored = runs.find(experiment, run.run_id, run.key)
        if stored is None:
            if run.run_id is not None:
                logger.warning("MLflow has lost the run of %s: it gets a new one", run.run_name)
                self._spool.mark_all_unsent()
            stored = runs.create(experiment, run.run_name, run.key)
        self._stored_steps = stored.steps
        if (stored.experiment_id, stored.run_id) != (run.experiment_id, run.run_id):
            self._spool.belongs_to(stored.experiment_id, stored.run_id)
        return runs

    def _send_records(self, runs: Runs, run_id: str) -> None:
        while not self._abandoned and (batch := self._spool.next_batch(BATCH_METRICS)).records:
            metrics = [
                Metric(name, value, record.time_ms, record.step)
                for record in batch.records
                for name, value in record.metrics.items()
                if record.step > self._stored_steps.get(name, -1)
            ]
            for start in range(0, len(metrics), BATCH_METRICS):
                runs.log(run_id, metrics=metrics[start : start + BATCH_METRICS])
            self._spool.mark_sent(batch)

    def _send_notes(self, runs: Runs, run_id: str, notes: Sequence[Note]) -> None:
        for note in notes:
            if not self._abandoned:
                self._send_note(runs, run_id, note)

    def _send_note(self, runs: Runs, run_id: str, note: Note) -> None:
        value = note.value
        if note.kind == "artifact":
            value = [str(self._spool.folder / value[0]), value[1]]
        try:
            _SENDERS[note.kind](runs, run_id, value)
        except RefusedByMlflowError as error:  # it must not hold up the rest
            logger.warning("MLflow refuses the %s of run %s: %s", note.kind, run_id, error)
        self._spool.mark_received(note)


def _send_params(runs: Runs, run_id: str, params: dict[str, str]) -> None:
    """Send params. MLflow keeps the first value of a param; a different value now becomes a tag."""
    stored = runs.params(run_id)
    new = [(key, value) for key, value in params.items() if key not in stored]
    changed = [
        (f"{RESTART_TAG}{key}", value)
        for key, value in params.items()
        if stored.get(key, value) != value
    ]
    for start in range(0, max(len(new), len(changed)), BATCH_PARAMS):
        batch = slice(start, start + BATCH_PARAMS)
        runs.log(run_id, params=dict(new[batch]), tags=dict(changed[batch]))


def _send_tags(runs: Runs, run_id: str, tags: dict[str, str]) -> None:
    runs.log(run_id, tags=tags)


def _send_inputs(runs: Runs, run_id: str, inputs: list[dict[str, str]]) -> None:
    datasets = []
    for data in inputs:
        kind = _source_type(data["source"])
        # The JSON that MLflow's source classes read back: mlflow/data/*_source*.py.
        source = {"tags": {"source": data["source"]}} if kind == "code" else {"uri": data["source"]}
        datasets.append(
            Dataset(data["name"], data["digest"], kind, json.dumps(source), data["context"])
        )
    runs.log_inputs(run_id, datasets)


def _source_type(source: str) -> str:
    """Return MLflow's name for the type of a data source; `code`, which is plain text, if it knows
    none."""
    scheme = urlsplit(source).scheme
    return "local" if scheme in _LOCAL else scheme if scheme in SOURCE_TYPES else "code"


def _send_artifact(runs: Runs, run_id: str, value: list[str | None]) -> None:
    local_path, artifact_path = value
    assert local_path is not None
    path = Path(local_path)
    if path.exists():
        runs.log_file(run_id, path, artifact_path)
    else:
        logger.warning("%s is gone and cannot be sent to MLflow", path)


def _send_json(runs: Runs, run_id: str, value: list[Any]) -> None:
    name, content = value
    runs.log_text(run_id, name, json.dumps(content, indent=2))


def _send_status(runs: Runs, run_id: str, status: str) -> None:
    runs.set_status(run_id, status)


_SENDERS: dict[NoteKind, Callable[[Runs, str, Any], None]] = {
    "params": _send_params,
    "tags": _send_tags,
    "inputs": _send_inputs,
    "artifact": _send_artifact,
    "json": _send_json,
    "status": _send_status,
}
