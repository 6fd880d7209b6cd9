"""MLflow as a team runs it: a server with PostgreSQL and S3, which may die at any time."""

import http.server
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bert_core import files
from bert_core.errors import ResourceError
from bert_core.train.config import LoopConfig
from pipelines import cli, pretrain
from pipelines.commands import ui
from tests.mlflow_server import Server
from tests.postgres import Postgres
from tests.s3 import S3_REGION
from tests.waiting import wait_until
from tracking.runs.recorder import RunRecorder
from tracking.runs.spool import METRICS
from tracking.store.probe import write_and_delete_run
from tracking.store.server import RefusedError, connect, require_answer, require_consent

if TYPE_CHECKING:
    from mlflow.entities import Run

BUCKET = "artifacts"


@dataclass
class Tracking:
    """A server whose runs are in PostgreSQL, and their artifacts in a bucket."""

    database: Postgres
    server: Server
    s3: Any

    def objects(self) -> list[str]:
        """Keys of the objects in the bucket."""
        return [each["Key"] for each in self.s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def runs(self, experiment: str) -> "list[Run]":
        client = connect(self.server.uri)
        found = client.get_experiment_by_name(experiment)
        return [] if found is None else list(client.search_runs([found.experiment_id]))


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory, s3_endpoint: str) -> Iterator[Tracking]:
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed: pip install '.[tracking-server]'")
    import boto3

    credentials = {"aws_access_key_id": "anyone", "aws_secret_access_key": "anything"}
    s3 = boto3.client("s3", endpoint_url=s3_endpoint, region_name=S3_REGION, **credentials)
    s3.create_bucket(Bucket=BUCKET)
    database = Postgres()
    try:
        # As docs/tracking.md has it: the tables are made by a command, not by the first server.
        upgrade = [sys.executable, "-m", "mlflow", "db", "upgrade", database.uri]
        subprocess.run(upgrade, check=True, capture_output=True, timeout=240)
        server = Server(
            tmp_path_factory.mktemp("server"),
            store=database.uri,
            options=["--artifacts-destination", f"s3://{BUCKET}/proxied"],
            environment={
                "AWS_ENDPOINT_URL": s3_endpoint,
                "AWS_DEFAULT_REGION": S3_REGION,
                **{name.upper(): value for name, value in credentials.items()},
                "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "2",
                "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "2",
            },
        )
        server.options += ["--allowed-hosts", f"127.0.0.1:{server.port}"]
        server.start()
        yield Tracking(database, server, s3)
        server.stop()
    finally:
        database.remove()


@pytest.mark.guard
def test_a_name_that_the_server_does_not_allow_is_distinguished(
    tracking: Tracking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"localhost:{tracking.server.port}"
    require_answer(tracking.server.uri)
    with pytest.raises(RefusedError) as caught:
        require_answer(f"http://{named}")
    wanted = (
        f"wanted MLflow at http://{named}, it refuses to be called {named}: start it with "
        f"--allowed-hosts {named} (names of hosts, with their ports, separated by commas)"
    )
    assert str(caught.value) == wanted
    # A stage does not begin: it would record nothing, however long it runs.
    with pytest.raises(SystemExit):
        cli.main(
            ["vocab", "--corpus.source", "absent.txt", "--output", f"{tmp_path}/vocab",
             "--num_workers", "0", "--tracking_uri", f"http://{named}"]
        )  # fmt: skip
    assert capsys.readouterr().err == f"raybert vocab: {wanted}\n"


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (
            401,
            r"it refuses these credentials \(401\): set MLFLOW_TRACKING_USERNAME and MLFLOW_TRAC",
        ),
        (404, r"what answers there is not MLflow \(404\): correct tracking_uri"),
        (200, r"what answers there is not MLflow \(200\): correct tracking_uri"),  # to log in
    ],
)
def test_another_refusal_is_distinguished(status: int, wanted: str) -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):  # as a proxy in front of MLflow does
        def do_POST(self) -> None:
            self.send_error(status)  # with a page in HTML

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        with pytest.raises(RefusedError, match=wanted):
            require_consent(f"http://127.0.0.1:{proxy.server_address[1]}")
        proxy.shutdown()


def test_an_unreachable_server_is_not_a_refusal() -> None:
    require_consent("http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="it does not answer: start it"):
        require_answer("http://127.0.0.1:9")


@pytest.mark.guard
def test_the_doctor_writes_and_deletes_a_run_with_an_artifact(tracking: Tracking) -> None:
    before = tracking.objects()
    told = write_and_delete_run(tracking.server.uri)
    assert "was written to http://127.0.0.1" in told
    assert "its artifacts are in mlflow-artifacts:/" in told
    assert tracking.runs("raybert-doctor") == []
    assert tracking.objects() == before


@pytest.mark.guard
@pytest.mark.parametrize("way", ["proxied", "direct"])
def test_artifacts_go_through_the_server_or_directly_to_the_bucket(
    way: str, tracking: Tracking, object_store: str, tmp_path: Path
) -> None:
    uri = tracking.server.uri
    if way == "direct":
        connect(uri).create_experiment(way, artifact_location=f"s3://{BUCKET}/direct")
    (tmp_path / "card.md").write_text("# a card")
    with RunRecorder.open(tmp_path / "run", uri=uri, experiment=way) as recorder:
        recorder.record(1, {"loss": 0.5})
        recorder.artifact(tmp_path / "card.md")
    [run] = tracking.runs(way)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 0.5})
    [key] = [
        key for key in tracking.objects() if key.startswith(f"{way}/") and run.info.run_id in key
    ]
    assert tracking.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"# a card"


@pytest.mark.guard
def test_the_page_of_a_run_is_on_the_server_that_it_was_written_to(
    tracking: Tracking,
    object_store: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RunRecorder.open(tmp_path / "run", uri=tracking.server.uri, experiment="ui") as recorder:
        recorder.flush()
    # Of an output in a bucket, the record lies in a folder of it.
    record = (tmp_path / "run" / "mlflow_run.json").read_bytes()
    files.write_bytes(f"{object_store}/out/record/mlflow_run.json", record)
    assert recorder.run_id is not None
    experiment = connect(tracking.server.uri).get_run(recorder.run_id).info.experiment_id
    for output in (f"{tmp_path}/run", f"{object_store}/out"):
        ui.run(ui.UiConfig(run=output))
        assert capsys.readouterr().out == (
            f"MLflow is already at {tracking.server.uri}/#/experiments/{experiment}/runs/"
            f"{recorder.run_id}?workflowType=machine_learning: open it in a browser\n"
        )


@pytest.mark.guard
@pytest.mark.usefixtures("local_ray")
def test_processes_killed_under_a_training_run_lose_and_repeat_no_point(
    tracking: Tracking,
    prepared: Any,
    tmp_path: Path,
    recovered: Callable[[str, float, float], None],
) -> None:
    """The database, and when MLflow gets points again, the server."""
    folder, killed = tmp_path / "out", list[str]()
    config = replace(
        prepared.pretrain(folder),
        # As long as it takes, on any machine, for MLflow to get points, and to be missed for some.
        loop=LoopConfig(max_steps=100_000, max_hours=40 / 3600, precision="fp32"),
        num_workers=1,
        report_every_s=0.5,
        checkpoint_every_steps=500,
        tracking_uri=tracking.server.uri,
        experiment="without its server",
    )

    def lines() -> int:
        path = folder / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def points() -> int:
        """How many MLflow has."""
        client, runs = connect(tracking.server.uri), tracking.runs(config.experiment)
        return sum(len(client.get_metric_history(run.info.run_id, "loss")) for run in runs)

    def kill_and_start_again(name: str, victim: Postgres | Server) -> None:
        had = points()
        wait_until("MLflow has another point", lambda: points() > had, timeout_s=120)
        victim.kill() if isinstance(victim, Postgres) else victim.stop()
        killed.append(name)
        before = lines()
        goes_on = f"training goes on without the {name}"
        wait_until(goes_on, lambda: lines() > before + 20, timeout_s=120)
        victim.start()
        started_s = time.monotonic()
        back = f"MLflow has a point of the time without the {name}"
        wait_until(back, lambda: points() > before, timeout_s=120)
        recovered(f"MLflow's {name} is killed, and started again", started_s, 60)

    def drill() -> None:
        kill_and_start_again("database", tracking.database)
        kill_and_start_again("server", tracking.server)

    with ThreadPoolExecutor(1) as threads:
        drilled = threads.submit(drill)
        pretrain.run(config)
        assert killed == ["database", "server"], "training ended before all were killed"
        drilled.result()
    pretrain.run(config)  # skipped, but for what MLflow has yet to be sent
    [run] = tracking.runs(config.experiment)
    assert run.info.status == "FINISHED"
    records = [json.loads(line) for line in (folder / METRICS).read_bytes().splitlines()]
    client = connect(tracking.server.uri)
    for name in ("loss", "tokens_per_s"):
        kept = [
            (each["step"], each["metrics"][name]) for each in records if name in each["metrics"]
        ]
        sent = client.get_metric_history(run.info.run_id, name)
        assert len(kept) > 20
        assert sorted((each.step, each.value) for each in sent) == kept
    system = {name.rpartition("/")[2] for name in run.data.metrics if name.startswith("system/")}
    assert system >= {
        "cpu_utilization_percentage",
        "system_memory_usage_megabytes",
        "network_receive_megabytes",
    }
