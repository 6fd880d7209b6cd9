import math
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ResourceError
from tracking.runs.sender import SOURCE_TYPES
from tracking.store.mlflow_runs import MlflowRuns
from tracking.store.runs import Dataset, Metric, Runs
from tracking.store.server import connect
from tracking.store.sqlite_runs import SqliteRuns, reach

TABLES = (
    *("experiments", "experiment_tags", "runs", "tags", "params", "metrics", "latest_metrics"),
    *("datasets", "inputs", "input_tags"),
)
DRAWN = (
    *("creation_time", "last_update_time", "start_time", "end_time", "run_uuid", "artifact_uri"),
    *("artifact_location", "dataset_uuid", "input_uuid", "source_id", "destination_id"),
)
"""Columns whose values are drawn, times or places; of these only whether they are set counts."""


def rows_of(uri: str) -> dict[str, list[str]]:
    """All rows about runs, but for what differs from run to run."""
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        database.row_factory = sqlite3.Row

        def shown(row: sqlite3.Row) -> str:
            entries = {name: row[name] for name in row.keys()}  # noqa: SIM118 (a row has no names)
            return str({k: v is not None if k in DRAWN else v for k, v in entries.items()})

        return {
            table: sorted(shown(row) for row in database.execute(f"SELECT * FROM {table}"))
            for table in TABLES
        }


def sqlite_runs(uri: str) -> SqliteRuns:
    runs = reach(uri)
    assert runs is not None, "the schema is that of the installed MLflow"
    return runs


def record(runs: Runs, folder: Path) -> Path:
    """Everything that a stage records, some of it twice; return the folder with its files."""
    (folder / "plots").mkdir(exist_ok=True)
    (folder / "plots" / "loss.png").write_bytes(b"png")
    experiment = runs.experiment("raybert")
    assert runs.experiment("raybert") == experiment
    assert runs.find(experiment, None, "key") is None
    run = runs.create(experiment, "pretrain x", "key")
    assert run.steps == {}
    for params in ({"lr": "0.1", "note": "ä"}, {"seed": "3"}):
        runs.log(run.run_id, params=params, tags={"stage": "pretrain", "restart.lr": "1"})
    runs.log(run.run_id, tags={"stage": "finetune"})
    values = [1.5, math.nan, math.inf, -math.inf, 0.0]
    metrics = [Metric("loss", value, 1000 + n, n) for n, value in enumerate(values)]
    runs.log(run.run_id, [*metrics, Metric("nan", math.nan, 7, 7), Metric("late", 1.0, 5, 9)])
    runs.log(run.run_id, [metrics[0], metrics[4], Metric("late", 2.0, 6, 3)])
    for _ in range(2):
        source = '{"uri": "a"}'
        data = [Dataset(name, "0" * 36, "local", source, "training") for name in ("a", "b")]
        runs.log_inputs(run.run_id, data)
    runs.log_file(run.run_id, folder / "plots" / "loss.png", "pictures")
    runs.log_file(run.run_id, folder / "plots", "all")
    runs.log_text(run.run_id, "notes/manifest.json", "{}")
    runs.set_status(run.run_id, "RUNNING")
    runs.set_status(run.run_id, "FAILED")
    assert runs.params(run.run_id) == {"lr": "0.1", "note": "ä", "seed": "3"}
    for found in (runs.find(experiment, run.run_id, ""), runs.find(experiment, None, "key")):
        assert found is not None
        assert (found.run_id, found.experiment_id) == (run.run_id, experiment)
        assert found.steps == {"loss": 4, "nan": 7, "late": 9}
    other = runs.create(experiment, "evaluate x", "other")
    runs.log_inputs(other.run_id, data)
    return folder / "mlartifacts" / run.run_id / "artifacts"


def test_every_row_and_file_is_as_mlflows_client_stores_it(tmp_path: Path) -> None:
    def stored(kind: Any) -> tuple[dict[str, list[str]], list[str]]:
        folder = tmp_path / kind.__name__
        folder.mkdir()
        uri = f"sqlite:///{folder}/mlflow.db"
        connect(uri)  # MLflow's own experiment, `Default`, is there from then on
        attached = record(kind(uri), folder)
        return rows_of(uri), sorted(str(f.relative_to(attached)) for f in attached.rglob("*"))

    ours, theirs = stored(sqlite_runs), stored(MlflowRuns)
    assert ours == theirs
    assert len(ours[1]) == 6


def test_a_run_without_mlflow_is_read_by_mlflow(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    record(sqlite_runs(uri), tmp_path)  # the file is new: MLflow has not opened it yet
    client = connect(uri)
    run, _ = sorted(client.search_runs(["1"]), key=lambda run: run.info.start_time)
    assert (run.info.run_name, run.info.status) == ("pretrain x", "FAILED")
    assert run.data.metrics["loss"] == 0.0
    assert {each.name for each in client.search_experiments()} == {"raybert", "Default"}
    assert [file.path for file in client.list_artifacts(run.info.run_id, "all")] == ["all/loss.png"]


def test_recording_to_a_file_imports_neither_mlflow_nor_sqlalchemy(tmp_path: Path) -> None:
    reach(f"sqlite:///{tmp_path}/mlflow.db")
    code = (
        "import sys; from tracking.runs.recorder import RunRecorder\n"
        "with RunRecorder.open('run', uri=sys.argv[1], params={'lr': 1}) as recorder:\n"
        "    recorder.record(1, {'loss': 1.0})\n"
        "assert recorder.run_id\n"
        "print(*{'mlflow', 'sqlalchemy', 'pandas'} & set(sys.modules))\n"
    )
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path}/mlflow.db"]
    env = {"PYTHONPATH": str(Path(__file__).parents[3])}
    output = subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env=env)
    assert output.stdout.strip() == b""


def test_a_file_of_another_schema_and_other_stores_are_left_to_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert reach(uri) is not None
    assert reach("postgresql://localhost/mlflow") is None
    assert reach(f"{uri}?timeout=3") is None
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = 'newer'")
        database.commit()
    assert reach(uri) is None
    (tmp_path / "text.db").write_text("not a database, but a text that is long enough" * 9)
    assert reach(f"sqlite:///{tmp_path}/text.db") is None
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "true")
    assert reach(f"sqlite:///{tmp_path}/new.db") is None


def test_what_was_deleted_gets_no_records(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    runs = sqlite_runs(uri)
    experiment = runs.experiment("raybert")
    run = runs.create(experiment, "x", "key")
    connect(uri).delete_run(run.run_id)
    assert runs.find(experiment, run.run_id, "key") is None
    assert runs.find(experiment, None, "key") is None
    with pytest.raises(ResourceError, match=f"the run {run.run_id} was deleted: see what"):
        runs.set_status(run.run_id, "FINISHED")
    connect(uri).delete_experiment(experiment)
    assert runs.experiment("raybert") == experiment
    with pytest.raises(ResourceError, match="the experiment 1 was deleted"):
        runs.create(experiment, "x", "key")
    with pytest.raises(ResourceError, match="the run absent does not exist"):
        runs.log("absent", tags={"a": "b"})


def test_a_file_that_is_gone_or_cannot_be_opened_is_told(tmp_path: Path) -> None:
    runs = sqlite_runs(f"sqlite:///{tmp_path}/mlflow.db")
    runs.require_answer()
    (tmp_path / "mlflow.db").unlink()
    with pytest.raises(ResourceError, match=r"mlflow\.db, the file is gone"):
        runs.require_answer()
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(
        ResourceError, match="does not do what was asked: OperationalError: unable to open"
    ):
        runs.experiment("raybert")


def test_the_types_of_sources_are_those_that_mlflow_has() -> None:
    from mlflow.data.dataset_source_registry import get_registered_sources

    from bert_core.storage_schemes import SCHEMES

    types = {known._get_source_type() for known in get_registered_sources()}
    assert types & {*SCHEMES, "hdfs"} == {*SOURCE_TYPES}
