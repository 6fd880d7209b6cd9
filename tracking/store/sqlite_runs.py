"""Records runs in MLflow's SQLite file without MLflow, whose client takes two seconds of CPU.

The tables are those of one version of MLflow's schema, by its Alembic revision; a file with another
is left to MLflow's client. The tests compare every row with what the client writes.
"""

import math
import os
import shutil
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bert_core.errors import ResourceError
from tracking.store import page
from tracking.store.mlflow_runs import MlflowRuns
from tracking.store.runs import KEY_TAG, Dataset, Metric, StoredRun
from tracking.store.server import SQLITE, artifact_folder, make_database, not_done

REVISION = "dc11669786a5"
"""Of the schema of MLflow 3.17."""
BUSY_TIMEOUT_S = 20.0
"""How long to wait for other processes that write the file."""
_WORKSPACES = "MLFLOW_ENABLE_WORKSPACES"
_LATEST = """
INSERT INTO latest_metrics (run_uuid, key, value, timestamp, step, is_nan)
VALUES (:run, :key, :value, :time_ms, :step, :is_nan)
ON CONFLICT (run_uuid, key) DO UPDATE SET value = excluded.value, timestamp = excluded.timestamp,
    step = excluded.step, is_nan = excluded.is_nan
WHERE (excluded.step, excluded.timestamp, excluded.value)
    > (latest_metrics.step, latest_metrics.timestamp, latest_metrics.value)
"""


def reach(uri: str) -> "SqliteRuns | None":
    """Return the runs of a SQLite file, which is made if missing; None if the store is of another
    kind or schema. Raises: OSError."""
    if not uri.startswith(SQLITE) or "?" in uri or os.environ.get(_WORKSPACES):
        return None
    make_database(Path(uri.removeprefix(SQLITE)))
    runs = SqliteRuns(uri)
    return runs if runs.revision() == REVISION else None


class SqliteRuns:
    """The runs of a SQLite file (`tracking.store.runs.Runs`). Raises: ResourceError if SQLite does
    not do what is asked, or a run or experiment was deleted."""

    def __init__(self, uri: str) -> None:
        """Use `reach` instead."""
        self._uri, self._path = uri, uri.removeprefix(SQLITE)

    @contextmanager
    def _transaction(self, run_id: str | None = None) -> Iterator[sqlite3.Connection]:
        """Open the file for a transaction, in which the run may be changed."""
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)) as database:
                database.isolation_level = None
                database.execute("PRAGMA foreign_keys = ON")
                database.execute("BEGIN IMMEDIATE")
                if run_id is not None:
                    _require_active(database, "run", run_id)
                yield database
                database.execute("COMMIT")
        except (sqlite3.Error, LookupError) as error:
            raise not_done(self._uri, error) from error

    def revision(self) -> str | None:
        """Return the revision of the schema; None if that is unknown."""
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)) as database:
                (row,) = database.execute("SELECT version_num FROM alembic_version")
        except (sqlite3.Error, ValueError):  # MLflow's client says what is wrong with the file
            return None
        return str(row[0])

    def require_answer(self) -> None:
        if not Path(self._path).is_file():
            raise ResourceError(f"wanted MLflow's runs in {self._path}, the file is gone")

    def experiment(self, name: str) -> str:
        with self._transaction() as database:
            row = database.execute(
                "SELECT experiment_id, lifecycle_stage FROM experiments WHERE name = ?", (name,)
            ).fetchone()
            if row is None:
                now, folder = _now_ms(), artifact_folder(self._uri)
                (number,) = database.execute(
                    "INSERT INTO experiments (name, artifact_location, lifecycle_stage, "
                    "creation_time, last_update_time) VALUES (?, ?, 'active', ?, ?) "
                    "RETURNING experiment_id",
                    (name, folder, now, now),
                ).fetchone()
            else:
                number = row[0]
            if row is None or row[1] == "active":
                known = dict(
                    database.execute(
                        "SELECT key, value FROM experiment_tags WHERE experiment_id = ?", (number,)
                    ).fetchall()
                )
                database.executemany(
                    "INSERT OR REPLACE INTO experiment_tags (experiment_id, key, value) "
                    "VALUES (?, ?, ?)",
                    [(number, *tag) for tag in page.missing_tags(known).items()],
                )
        return str(number)

    def find(self, experiment_id: str, run_id: str | None, key: str) -> StoredRun | None:
        with self._transaction() as database:
            if run_id is None:
                row = database.execute(
                    "SELECT run_uuid, experiment_id FROM runs JOIN tags USING (run_uuid) WHERE "
                    "experiment_id = ? AND lifecycle_stage = 'active' AND key = ? AND value = ?",
                    (int(experiment_id), KEY_TAG, key),
                ).fetchone()
            else:
                row = database.execute(
                    "SELECT run_uuid, experiment_id FROM runs "
                    "WHERE run_uuid = ? AND lifecycle_stage = 'active'",
                    (run_id,),
                ).fetchone()
            if row is None:
                return None
            steps = database.execute(
                "SELECT key, step FROM latest_metrics WHERE run_uuid = ?", (row[0],)
            ).fetchall()
        return StoredRun(str(row[1]), row[0], dict(steps))

    def create(self, experiment_id: str, name: str, key: str) -> StoredRun:
        run_id = uuid.uuid4().hex
        with self._transaction() as database:
            location = _require_active(database, "experiment", int(experiment_id))
            database.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, "
                "user_id, status, start_time, source_version, lifecycle_stage, artifact_uri, "
                "experiment_id) "
                "VALUES (?, ?, 'UNKNOWN', '', '', 'unknown', 'RUNNING', ?, '', 'active', ?, ?)",
                (run_id, name, _now_ms(), f"{location.rstrip('/')}/{run_id}/artifacts",
                 int(experiment_id)),
            )  # fmt: skip
            _set_tags(database, run_id, {KEY_TAG: key, "mlflow.runName": name})
        return StoredRun(experiment_id, run_id, {})

    def params(self, run_id: str) -> dict[str, str]:
        with self._transaction() as database:
            rows = database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run_id,))
            return dict(rows.fetchall())

    def log(
        self,
        run_id: str,
        metrics: Iterable[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        rows = [{**each._asdict(), "run": run_id, **_stored(each.value)} for each in metrics]
        with self._transaction(run_id) as database:
            database.executemany(
                "INSERT OR IGNORE INTO metrics (run_uuid, key, value, timestamp, step, is_nan) "
                "VALUES (:run, :key, :value, :time_ms, :step, :is_nan)",
                rows,
            )
            database.executemany(_LATEST, rows)
            database.executemany(
                "INSERT OR IGNORE INTO params (run_uuid, key, value) VALUES (?, ?, ?)",
                [(run_id, *each) for each in (params or {}).items()],
            )
            _set_tags(database, run_id, tags or {})

    def log_inputs(self, run_id: str, datasets: Iterable[Dataset]) -> None:
        with self._transaction(run_id) as database:
            for each in datasets:
                self._log_input(database, run_id, each)

    @staticmethod
    def _log_input(database: sqlite3.Connection, run_id: str, data: Dataset) -> None:
        (experiment,) = database.execute(
            "SELECT experiment_id FROM runs WHERE run_uuid = ?", (run_id,)
        ).fetchone()
        database.execute(
            "INSERT OR IGNORE INTO datasets (dataset_uuid, experiment_id, name, digest, "
            "dataset_source_type, dataset_source) VALUES (?, ?, ?, ?, ?, ?)",
            (uuid.uuid4().hex, experiment, data.name, data.digest, data.source_type, data.source),
        )
        (dataset,) = database.execute(
            "SELECT dataset_uuid FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?",
            (experiment, data.name, data.digest),
        ).fetchone()
        new = database.execute(
            "INSERT OR IGNORE INTO inputs (input_uuid, source_type, source_id, destination_type, "
            "destination_id) VALUES (?, 'DATASET', ?, 'RUN', ?) RETURNING input_uuid",
            (uuid.uuid4().hex, dataset, run_id),
        ).fetchone()
        if new is not None:
            database.execute(
                "INSERT INTO input_tags (input_uuid, name, value) "
                "VALUES (?, 'mlflow.data.context', ?)",
                (new[0], data.context),
            )

    def set_status(self, run_id: str, status: str) -> None:
        ended_ms = None if status == "RUNNING" else _now_ms()
        with self._transaction(run_id) as database:
            database.execute(
                "UPDATE runs SET status = ?, end_time = coalesce(?, end_time) WHERE run_uuid = ?",
                (status, ended_ms, run_id),
            )

    def log_file(self, run_id: str, path: Path, folder: str | None) -> None:
        place = self._artifacts(run_id)
        if place is None:
            MlflowRuns(self._uri).log_file(run_id, path, folder)
            return
        target = place / (folder or "")
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)

    def log_text(self, run_id: str, name: str, text: str) -> None:
        place = self._artifacts(run_id)
        if place is None:
            MlflowRuns(self._uri).log_text(run_id, name, text)
            return
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)

    def _artifacts(self, run_id: str) -> Path | None:
        """Return the folder of what is attached to a run; None if it is not on this machine."""
        with self._transaction() as database:
            (uri,) = database.execute(
                "SELECT artifact_uri FROM runs WHERE run_uuid = ?", (run_id,)
            ).fetchone()
        parts = urlsplit(uri)
        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return Path(unquote(parts.path))
        return Path(uri) if uri.startswith("/") else None


def _require_active(database: sqlite3.Connection, kind: str, key: str | int) -> str:
    """Return where a run or experiment keeps what is attached. Raises: LookupError if it does not
    exist, or was deleted."""
    column, place = (
        ("run_uuid", "artifact_uri") if kind == "run" else ("experiment_id", "artifact_location")
    )
    row = database.execute(
        f"SELECT {place}, lifecycle_stage FROM {kind}s WHERE {column} = ?", (key,)
    ).fetchone()
    if row is None or row[1] != "active":
        raise LookupError(f"the {kind} {key} {'does not exist' if row is None else 'was deleted'}")
    return str(row[0])


def _set_tags(database: sqlite3.Connection, run_id: str, tags: Mapping[str, str]) -> None:
    database.executemany(
        "INSERT OR REPLACE INTO tags (run_uuid, key, value) VALUES (?, ?, ?)",
        [(run_id, *tag) for tag in tags.items()],
    )


def _stored(value: float) -> dict[str, float | bool]:
    """Return a value as MLflow's tables have it: they have neither NaN nor infinity."""
    if math.isnan(value):
        return {"value": 0.0, "is_nan": True}
    largest = sys.float_info.max
    return {"value": max(-largest, min(value, largest)), "is_nan": False}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
