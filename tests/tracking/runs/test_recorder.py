import json
import logging
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bert_core.errors import FormatError
from tracking.runs.recorder import DatasetInput, RunRecorder, finish_run, flatten
from tracking.runs.spool import METRICS, RUN, Spool
from tracking.store.ports import free_ports
from tracking.store.server import connect

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput as DatasetInputEntity
    from mlflow.entities import Run

    from tests.mlflow_server import Server

_numbers = count()


@pytest.fixture
def experiment() -> str:
    return f"experiment {next(_numbers)}"


def run_of(uri: str, experiment: str) -> "Run":
    """The only run of an experiment."""
    client = connect(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return run


def inputs_of(run: "Run") -> "list[DatasetInputEntity]":
    assert run.inputs is not None
    return run.inputs.dataset_inputs


def history(uri: str, run_id: str, metric: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in connect(uri).get_metric_history(run_id, metric)]


def free_uri() -> str:
    """A URI where nothing listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"


def test_a_stage_is_one_run_with_params_inputs_metrics_and_plots(
    tmp_path: Path, store: str, experiment: str
) -> None:
    inputs = [
        DatasetInput("shards", "f" * 64, "runs/shards"),
        DatasetInput("corpus", "0" * 64, "s3://bucket/corpus"),
        DatasetInput("hub", "1" * 64, "hf://stanfordnlp/imdb", context="evaluation"),
    ]
    (tmp_path / "loss.png").write_bytes(b"png")
    with RunRecorder.open(
        tmp_path / "run",
        uri=store,
        experiment=experiment,
        run_name="pretrain",
        params={"optimizer": {"lr": 2e-4}, "note": "x" * 7000},
        inputs=inputs,
        tags={"git": "abc"},
    ) as recorder:
        for step in (0, 10, 20):
            recorder.record(step, {"loss": 3.0 - step / 10, "heldout/mlm_loss": 1})
        recorder.artifact(tmp_path / "loss.png", "plots")
        recorder.json_artifact("manifest.json", {"counts": {"rows": 3}})
    run = run_of(store, experiment)
    assert run.info.run_id == recorder.run_id
    assert (run.info.run_name, run.info.status) == ("pretrain", "FINISHED")
    assert run.data.params == {"optimizer.lr": "0.0002", "note": "x" * 5999 + "…"}
    assert run.data.tags["git"] == "abc"
    assert history(store, run.info.run_id, "loss") == [(0, 3.0), (10, 2.0), (20, 1.0)]
    assert run.data.metrics["heldout/mlm_loss"] == 1.0
    datasets = {each.dataset.name: each for each in inputs_of(run)}
    assert datasets["shards"].dataset.digest == "f" * 36
    assert json.loads(datasets["shards"].dataset.source) == {"uri": "runs/shards"}
    assert datasets["corpus"].dataset.source_type == "s3"
    assert [tag.value for tag in datasets["hub"].tags] == ["evaluation"]
    (plot,) = connect(store).list_artifacts(run.info.run_id, "plots")
    assert plot.path == "plots/loss.png"
    manifest = connect(store).download_artifacts(run.info.run_id, "manifest.json", str(tmp_path))
    assert json.loads(Path(manifest).read_text()) == {"counts": {"rows": 3}}
    # Beside the database, not in the working directory.
    assert f"{Path(store.removeprefix('sqlite:///')).parent}/mlartifacts/" in run.info.artifact_uri


def test_mlflow_reads_its_own_data_set_sources_back(
    tmp_path: Path, store: str, experiment: str
) -> None:
    import mlflow.data

    sources = [str(tmp_path), f"file://{tmp_path}", "s3://bucket/x", "hf://imdb", "docstrings"]
    inputs = [DatasetInput(f"{index}", "a", source) for index, source in enumerate(sources)]
    with RunRecorder.open(tmp_path, uri=store, experiment=experiment, inputs=inputs):
        pass
    for dataset in inputs_of(run_of(store, experiment)):
        wanted = sources[int(dataset.dataset.name)]
        assert wanted in json.dumps(mlflow.data.get_source(dataset).to_dict())


def test_a_restart_continues_the_run_and_logs_no_step_twice(
    tmp_path: Path, store: str, experiment: str
) -> None:
    def open_again(workers: int) -> RunRecorder:
        params = {"lr": 0.1, "num_workers": workers}
        inputs = [DatasetInput("shards", "abc", "runs/shards")]
        return RunRecorder.open(
            tmp_path, uri=store, experiment=experiment, params=params, inputs=inputs
        )

    first = open_again(workers=2)
    for step in range(0, 50, 10):
        first.record(step, {"loss": float(step)})
    first.close("FAILED")
    second = open_again(workers=4)
    assert second.last_step == 40
    for step in range(20, 80, 10):
        second.record(step, {"loss": -1.0})
    assert second.flush()
    assert run_of(store, experiment).info.status == "RUNNING"
    second.close()
    run = run_of(store, experiment)
    assert run.info.status == "FINISHED"
    assert history(store, run.info.run_id, "loss") == [
        *((step, float(step)) for step in range(0, 50, 10)),
        *((step, -1.0) for step in range(50, 80, 10)),
    ]
    assert run.data.params == {"lr": "0.1", "num_workers": "2"}
    assert run.data.tags["restart.num_workers"] == "4"
    assert len(inputs_of(run)) == 1


def test_a_run_is_handed_from_driver_to_controller_and_back(
    tmp_path: Path, store: str, experiment: str
) -> None:
    driver = RunRecorder.open(tmp_path, uri=store, experiment=experiment, params={"lr": 1})
    assert driver.close("RUNNING") is None
    controller = RunRecorder.open(tmp_path, uri=store)
    controller.record(7, {"loss": 0.5})
    assert controller.close("RUNNING") is None
    assert run_of(store, experiment).info.status == "RUNNING"
    driver = RunRecorder.open(tmp_path, uri=store, experiment=experiment)
    assert driver.last_step == 7
    driver.close()
    run = run_of(store, experiment)
    assert run.info.status == "FINISHED"
    assert history(store, run.info.run_id, "loss") == [(7, 0.5)]


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")],
)
def test_the_status_shows_how_the_run_ended(
    tmp_path: Path, store: str, experiment: str, error: type[BaseException], status: str
) -> None:
    with (
        pytest.raises(error),
        RunRecorder.open(tmp_path, uri=store, experiment=experiment),
    ):
        raise error
    assert run_of(store, experiment).info.status == status


def test_a_run_that_was_deleted_in_mlflow_is_recorded_anew(
    tmp_path: Path, store: str, experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = RunRecorder.open(tmp_path, uri=store, experiment=experiment)
    first.record(1, {"loss": 1.0})
    first.close()
    assert first.run_id is not None
    connect(store).delete_run(first.run_id)
    second = RunRecorder.open(tmp_path, uri=store)
    second.record(2, {"loss": 2.0})
    second.close()
    assert "MLflow has lost the run" in caplog.text
    run = run_of(store, experiment)
    assert history(store, run.info.run_id, "loss") == [(1, 1.0), (2, 2.0)]


def test_a_run_whose_id_was_not_noted_is_found_again(
    tmp_path: Path, store: str, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same process as it retries, and by the next one."""
    monkeypatch.setattr("tracking.runs.sender.SEND_EVERY_S", 0.1)
    noted, lost = Spool.belongs_to, [OSError("the disk is full")]

    def belongs_to(spool: Spool, *ids: str) -> None:
        if lost:
            raise lost.pop()
        noted(spool, *ids)

    monkeypatch.setattr(Spool, "belongs_to", belongs_to)
    first = RunRecorder.open(tmp_path, uri=store, experiment=experiment)
    first.record(1, {"loss": 1.0})
    assert first.close("RUNNING") is None
    assert not lost
    assert first.run_id == run_of(store, experiment).info.run_id
    kept = json.loads((tmp_path / RUN).read_text())
    (tmp_path / RUN).write_text(json.dumps(kept | {"run_id": None}))
    second = RunRecorder.open(tmp_path, uri=store)
    second.close()
    assert second.run_id == first.run_id == run_of(store, experiment).info.run_id


def test_another_experiment_gets_a_run_with_all_records(
    tmp_path: Path, store: str, experiment: str
) -> None:
    for number, name in enumerate((experiment, f"{experiment} moved")):
        recorder = RunRecorder.open(tmp_path, uri=store, experiment=name)
        recorder.record(number, {"loss": float(number)})
        recorder.close()
    run = run_of(store, f"{experiment} moved")
    assert history(store, run.info.run_id, "loss") == [(0, 0.0), (1, 1.0)]


def test_more_records_than_one_call_takes_arrive_in_order(
    tmp_path: Path, store: str, experiment: str
) -> None:
    params = {f"p{index}": index for index in range(150)}
    recorder = RunRecorder.open(tmp_path, uri=store, experiment=experiment, params=params)
    wide = {f"m{index}": float(index) for index in range(1100)}
    recorder.record(0, wide)
    for step in range(1, 700):
        recorder.record(step, {"loss": 1 / step, "learning_rate": 0.1})
    assert recorder.close() is None
    run = run_of(store, experiment)
    assert len(run.data.params) == 150
    assert set(wide) < set(run.data.metrics)
    assert [step for step, _ in history(store, run.info.run_id, "loss")] == [*range(1, 700)]


def test_recording_never_raises(
    tmp_path: Path, store: str, experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    import numpy as np
    import torch

    recorder = RunRecorder.open(tmp_path, uri=store, experiment=experiment)
    metrics: dict[str, Any] = {"a": np.float32(1), "b": torch.tensor(2.0), "c": float("nan")}
    metrics |= {"text": "high", "none": None, "many": torch.ones(2), "odd(name)%": 4}
    recorder.record(1, metrics)
    recorder.record(2, {"text": "low"})
    recorder.artifact(tmp_path / "absent.png")
    assert recorder.close() is None
    recorder.record(3, {"a": 1.0})
    logged = run_of(store, experiment).data.metrics
    assert logged.pop("c") != logged.get("c")
    assert logged == {"a": 1.0, "b": 2.0, "odd_name__": 4.0}
    complaints = [record.getMessage() for record in caplog.records]
    assert complaints == [
        "metric text is left out: wanted a number, got 'high'",
        "metric none is left out: wanted a number, got None",
        "metric many is left out: wanted a number, got tensor([1., 1.])",
        f"{tmp_path}/absent.png is gone and cannot be sent to MLflow",
        f"step 3 is not recorded in {tmp_path}: I/O operation on closed file",
    ]


def test_a_failing_artifact_store_delays_only_files(
    tmp_path: Path, store: str, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracking.runs.sender.SEND_EVERY_S", 0.1)
    artifacts, card = tmp_path / "artifacts", tmp_path / "card.md"
    artifacts.write_text("a file in the place of the folder")
    card.write_text("# Card")
    connect(store).create_experiment(experiment, artifact_location=artifacts.as_uri())
    recorder = RunRecorder.open(
        tmp_path / "run", uri=store, experiment=experiment, params={"lr": 1}
    )
    recorder.record(1, {"rows": 3.0})
    recorder.artifact(card)
    recorder.json_artifact("manifest.json", {"counts": {"rows": 3}})
    line = recorder.close()
    assert line is not None
    assert "has yet to be sent files of the run: " in line
    run = run_of(store, experiment)
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "1"})
    assert history(store, run.info.run_id, "rows") == [(1, 3.0)]
    artifacts.unlink()
    assert finish_run(tmp_path / "run", uri=store) is None
    run = run_of(store, experiment)
    assert run.info.status == "FINISHED"
    assert history(store, run.info.run_id, "rows") == [(1, 3.0)]
    files = [file.path for file in connect(store).list_artifacts(run.info.run_id)]
    assert files == ["card.md", "manifest.json"]


def test_a_dead_server_delays_nothing_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tracking.runs.sender")
    uri = free_uri()
    recorder = RunRecorder.open(tmp_path, uri=uri, experiment="e", params={"lr": 1})
    begin = time.monotonic()
    for step in range(1000):
        recorder.record(step, {"loss": 1.0})
    assert time.monotonic() - begin < 10
    assert recorder.run_id is None
    line = recorder.close()
    assert time.monotonic() - begin < 15
    assert line is not None
    assert caplog.messages[-1] == line
    assert f"MLflow at {uri} has yet to be sent 1,000 records: " in line
    assert f"The next start of the same stage sends what is in {tmp_path}" in line
    assert any(record.exc_info for record in caplog.records), "what went wrong is there to debug"


def test_a_run_that_was_left_open_is_ended_and_what_it_left_behind_is_sent_later(
    tmp_path: Path, store: str, experiment: str
) -> None:
    recorder = RunRecorder.open(tmp_path, uri=store, experiment=experiment)
    recorder.close("RUNNING")
    spool = Spool(tmp_path, recorder._spool.run)
    spool.append(1, {"loss": 1.0})
    spool.close()
    assert finish_run(tmp_path / "absent", uri=store) is None
    assert finish_run(tmp_path, uri=free_uri()) is None, "another place is another run"
    assert run_of(store, experiment).info.status == "RUNNING"
    assert finish_run(tmp_path, uri=store) is None
    run = run_of(store, experiment)
    assert history(store, run.info.run_id, "loss") == [(1, 1.0)]
    assert run.info.status == "FINISHED"


def test_a_damaged_run_file_stops_the_start_not_the_training(tmp_path: Path, store: str) -> None:
    (tmp_path / "mlflow_run.json").write_text("not JSON")
    with pytest.raises(FormatError, match="remove the file"):
        RunRecorder.open(tmp_path, uri=store)


def test_names_and_values_are_brought_within_mlflows_limits() -> None:
    flat = flatten({"a": {"b": {"c": [1, 2]}, "d": None}, "odd=name": True, "k" * 300: 1})
    assert flat == {"a.b.c": "[1, 2]", "a.d": "None", "odd_name": "True", "k" * 250: "1"}
    assert flatten({"../a//b/./": 1, "/": 2}) == {"a/b": "1", "_": "2"}


def test_names_that_mlflow_would_refuse_delay_no_records(tmp_path: Path, store: str) -> None:
    run = RunRecorder.open(tmp_path, uri=store, params={"prompts": {"query/": "q: "}})
    run.record(1, {"system//rack/node/cpu": 3.0, "loss": 1.0})
    assert run.close(timeout_s=60.0) is None
    data = connect(store).get_run(run.run_id or "").data
    assert data.metrics == {"system/rack/node/cpu": 3.0, "loss": 1.0}
    assert data.params == {"prompts.query": "q: "}


def test_importing_the_recorder_does_not_import_mlflow() -> None:
    modules = "tracking.runs.recorder, tracking.models.registry, tracking.models.references"
    code = f"import sys, {modules}; print(*({{'mlflow', 'torch', 'pandas'}} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert output.stdout.strip() == b""


@pytest.mark.guard
def test_a_server_stopped_and_started_gets_every_record_once_in_one_run(
    tmp_path: Path, server: "Server"
) -> None:
    recorder = RunRecorder.open(tmp_path, uri=server.uri, experiment="e", params={"lr": 1})
    steps = iter(range(10_000))

    def record_ten() -> None:
        for step in [next(steps) for _ in range(10)]:
            recorder.record(step, {"loss": float(step)})

    record_ten()
    server.start()
    assert recorder.flush(60.0), "the run is made once there is a server"
    first_id = recorder.run_id
    record_ten()
    assert recorder.flush(60.0)
    server.stop()
    record_ten()
    assert not recorder.flush(2.0)
    line = recorder.close("RUNNING")
    assert line is not None
    assert "has yet to be sent 10 records: " in line
    recorder = RunRecorder.open(tmp_path, uri=server.uri)
    record_ten()
    begin = time.monotonic()
    assert recorder.close("FINISHED") is not None
    assert time.monotonic() - begin < 20
    server.start()
    assert finish_run(tmp_path, uri=server.uri, timeout_s=60.0) is None
    run = run_of(server.uri, "e")
    assert run.info.run_id == first_id
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "1"}
    assert history(server.uri, run.info.run_id, "loss") == [(s, float(s)) for s in range(40)]


@pytest.mark.guard
def test_a_recording_process_killed_at_any_moment_loses_at_most_the_last_line(
    tmp_path: Path, store: str, experiment: str
) -> None:
    code = (
        "import sys; from tracking.runs.recorder import RunRecorder\n"
        "recorder = RunRecorder.open(sys.argv[1], uri=sys.argv[2], experiment=sys.argv[3])\n"
        "print('recording', flush=True)\n"
        "for step in range(recorder.last_step - 100, 10**9):\n"
        "    recorder.record(step, {'loss': float(step)})\n"
        "    if step % 300 == 0: recorder.flush(60)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), store, experiment]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            size = -1
            while size < 0 or (tmp_path / METRICS).stat().st_size < size + 50_000:
                size = (tmp_path / METRICS).stat().st_size if size < 0 else size
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
    recorder = RunRecorder.open(tmp_path, uri=store)
    last_step = recorder.last_step
    assert recorder.close(timeout_s=120.0) is None
    values = history(store, run_of(store, experiment).info.run_id, "loss")
    assert values == [(step, float(step)) for step in range(last_step + 1)]
