"""The thread that copies a spool to MLflow, and retries while MLflow is unreachable."""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bert_core.storage_schemes import SCHEMES
from tracking.runs.spool import Note, NoteKind, Spool
from tracking.store.server import client_of, experiment_id, refusals_told, require_answer

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as StoredRun

logger = logging.getLogger(__name__)

KEY_TAG = "raybert.key"
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
        self._client: MlflowClient | None = None
        self._wake = threading.Event()
        self._finishing = False
        self._abandoned = False
        self._reason: str | None = None
        self._stored: StoredRun | None = None
        """The run as MLflow had it when the connection was opened."""
        self._stored_steps: dict[str, int] = {}
        self._has_tried = False

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
                self._client = None
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
        if self._client is not None:
            require_answer(self._uri)
        client = self._client = self._client or self._open_run()
        run = self._stored
        assert run is not None
        # Files are sent last, after what the run is, how it went and how it ended: they may go to
        # another store, whose failure must not hold up the rest.
        notes = self._spool.run.untold
        self._send_notes(client, run, [n for n in notes if n.kind not in (*FILES, "status")])
        self._send_records(client, run.info.run_id)
        self._send_notes(client, run, [n for n in notes if n.kind == "status"])
        self._send_notes(client, run, [n for n in notes if n.kind in FILES])

    def _open_run(self) -> "MlflowClient":
        """Find the run that the spool belongs to, or create it."""
        client = client_of(self._uri)
        with refusals_told(self._uri):
            stored = self._stored = self._find_run(client) or self._create_run(client)
        self._stored_steps = {each.key: each.step for each in stored.to_proto().data.metrics}
        run = self._spool.run
        if (stored.info.experiment_id, stored.info.run_id) != (run.experiment_id, run.run_id):
            self._spool.belongs_to(stored.info.experiment_id, stored.info.run_id)
        return client

    def _find_run(self, client: "MlflowClient") -> "StoredRun | None":
        """Return the run with its newest metrics; None if its id is not known yet, or it does not
        exist or was deleted."""
        from mlflow.exceptions import MlflowException

        run = self._spool.run
        if run.run_id is None:
            return None
        try:
            stored = client.get_run(run.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        else:
            if stored.info.lifecycle_stage == "active":
                return stored
        logger.warning("MLflow has lost the run of %s: it gets a new one", run.run_name)
        self._spool.mark_all_unsent()
        return None

    def _create_run(self, client: "MlflowClient") -> "StoredRun":
        """Create the run, unless it was created before and the answer got lost."""
        run = self._spool.run
        experiment = experiment_id(client, self._uri, run.experiment)
        is_first_try = run.session == 1 and not self._has_tried
        self._has_tried = True
        if run.run_id is None and not is_first_try:
            by_key = f"tags.`{KEY_TAG}` = '{run.key}'"
            if runs := client.search_runs([experiment], by_key, max_results=1):
                return runs[0]
        return client.create_run(experiment, run_name=run.run_name, tags={KEY_TAG: run.key})

    def _send_records(self, client: "MlflowClient", run_id: str) -> None:
        from mlflow.entities import Metric

        while not self._abandoned and (batch := self._spool.next_batch(BATCH_METRICS)).records:
            metrics = [
                Metric(name, value, record.time_ms, record.step)
                for record in batch.records
                for name, value in record.metrics.items()
                if record.step > self._stored_steps.get(name, -1)
            ]
            for start in range(0, len(metrics), BATCH_METRICS):
                client.log_batch(run_id, metrics=metrics[start : start + BATCH_METRICS])
            self._spool.mark_sent(batch)

    def _send_notes(self, client: "MlflowClient", run: "StoredRun", notes: Sequence[Note]) -> None:
        received = []
        try:
            for note in notes:
                if not self._abandoned:
                    self._send_note(client, run, note)
                    received.append(note)
        finally:
            if received:
                self._spool.mark_received(received)

    def _send_note(self, client: "MlflowClient", run: "StoredRun", note: Note) -> None:
        from mlflow.exceptions import MlflowException

        value = note.value
        if note.kind == "artifact":
            value = [str(self._spool.folder / value[0]), value[1]]
        try:
            _SENDERS[note.kind](client, run, value)
        except MlflowException as error:
            if error.get_http_status_code() != 400:
                raise
            # MLflow would refuse it every time, and it must not hold up the rest.
            logger.warning("MLflow refuses the %s of run %s: %s", note.kind, run.info.run_id, error)


def _send_params(client: "MlflowClient", run: "StoredRun", params: dict[str, str]) -> None:
    """Send params. MLflow keeps the first value of a param; a different value now becomes a tag."""
    from mlflow.entities import Param, RunTag

    stored = run.data.params
    new = [Param(key, value) for key, value in params.items() if key not in stored]
    changed = [
        RunTag(f"{RESTART_TAG}{key}", value)
        for key, value in params.items()
        if stored.get(key, value) != value
    ]
    for start in range(0, max(len(new), len(changed)), BATCH_PARAMS):
        batch = slice(start, start + BATCH_PARAMS)
        client.log_batch(run.info.run_id, params=new[batch], tags=changed[batch])


def _send_tags(client: "MlflowClient", run: "StoredRun", tags: dict[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run.info.run_id, tags=[RunTag(key, value) for key, value in tags.items()])


def _send_inputs(client: "MlflowClient", run: "StoredRun", inputs: list[dict[str, str]]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    datasets = []
    for data in inputs:
        kind = _source_type(data["source"])
        # The JSON that MLflow's source classes read back: mlflow/data/*_source*.py.
        source = {"tags": {"source": data["source"]}} if kind == "code" else {"uri": data["source"]}
        dataset = Dataset(data["name"], data["digest"], kind, json.dumps(source))
        datasets.append(DatasetInput(dataset, [InputTag("mlflow.data.context", data["context"])]))
    client.log_inputs(run.info.run_id, datasets)


def _source_type(source: str) -> str:
    """Return MLflow's name for the type of a data source; `code`, which is plain text, if it knows
    none."""
    from mlflow.data.dataset_source_registry import get_registered_sources

    scheme = urlsplit(source).scheme
    if scheme in _LOCAL:
        return "local"
    types = {known._get_source_type() for known in get_registered_sources()}
    return scheme if scheme in types and scheme in (*SCHEMES, "hdfs") else "code"


def _send_artifact(client: "MlflowClient", run: "StoredRun", value: list[str | None]) -> None:
    local_path, artifact_path = value
    assert local_path is not None
    path = Path(local_path)
    if path.is_dir():
        client.log_artifacts(run.info.run_id, local_path, artifact_path)
    elif path.exists():
        client.log_artifact(run.info.run_id, local_path, artifact_path)
    else:
        logger.warning("%s is gone and cannot be sent to MLflow", path)


def _send_json(client: "MlflowClient", run: "StoredRun", value: list[Any]) -> None:
    name, content = value
    client.log_dict(run.info.run_id, content, name)


def _send_status(client: "MlflowClient", run: "StoredRun", status: str) -> None:
    if status == "RUNNING":
        if run.info.status != status:  # it was ended, and goes on
            client.update_run(run.info.run_id, status=status)
    else:
        client.set_terminated(run.info.run_id, status)


_SENDERS: dict[NoteKind, Callable[["MlflowClient", "StoredRun", Any], None]] = {
    "params": _send_params,
    "tags": _send_tags,
    "inputs": _send_inputs,
    "artifact": _send_artifact,
    "json": _send_json,
    "status": _send_status,
}
