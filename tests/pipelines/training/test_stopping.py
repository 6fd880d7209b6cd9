"""A training run that is told to end writes a checkpoint first, and goes on from there."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bert_core import files
from pipelines.training.driver import write_last_checkpoint
from pipelines.training.records import STOPPING_FILE
from tests.commands import pretrain_arguments, raybert
from tests.fault_proxy import Hold, fault_proxy
from tests.processes import start
from tests.waiting import wait_for_words, wait_until

STEPS = 1_000_000  # more than are trained


@pytest.mark.ray
@pytest.mark.guard
def test_a_run_told_to_stop_while_it_writes_a_checkpoint_writes_one_more(
    prepared: Any, object_store: str, s3_endpoint: str, tmp_path: Path
) -> None:
    """The one that it is writing is of earlier weights. The store lets its first part through when
    the run has been told."""
    import boto3
    import mlflow

    from bert_core.train.checkpoint import LAST_FILE, latest_checkpoint

    output, tracking_uri = f"{object_store}/out", f"sqlite:///{tmp_path}/mlflow.db"
    # Of this size a checkpoint is uploaded in parts.
    config = replace(prepared.pretrain(tmp_path, STEPS), output=output, variant="bert-mini")
    arguments = pretrain_arguments(
        config,
        "--log_every_steps", "1", "--report_every_s", "0", "--checkpoint_every_steps", "4",
        "--num_workers", "2", "--tracking_uri", tracking_uri,
    )  # fmt: skip
    hold, says = Hold("PUT", r"/step-00000004/model\.safetensors\?.*partNumber=1"), tmp_path / "log"
    with fault_proxy(s3_endpoint, hold) as proxy:
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.address}
        process = start(raybert(*arguments), says, env=environment)
        wait = partial(wait_until, timeout_s=240, process=process, log=says)
        try:
            wait("a checkpoint is being written", hold.began.is_set)
            process.send_signal(signal.SIGTERM)
            wait("the run is asked to stop", lambda: files.exists(f"{output}/{STOPPING_FILE}"))
            assert latest_checkpoint(f"{output}/checkpoints") is None
            hold.released.set()
            assert process.wait(timeout=120) != 0
        finally:
            hold.released.set()
            process.kill()
            process.wait()
    newest = latest_checkpoint(f"{output}/checkpoints")
    assert newest is not None
    assert newest.step > 4, says.read_text()
    for name in files.list_names(f"{output}/checkpoints"):
        assert LAST_FILE in files.list_names(f"{output}/checkpoints/{name}"), name
    bucket = object_store.removeprefix("s3://")
    assert boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []
    assert files.read_json(f"{output}/lease.json")["released"]
    assert not files.exists(f"{output}/{STOPPING_FILE}")
    client = mlflow.MlflowClient(tracking_uri)
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "KILLED"


def test_a_last_checkpoint_that_cannot_be_requested_is_reported(
    object_store: str,
    s3_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("bert_core.storage.retries._patience_s", 0.5)
    with fault_proxy(s3_endpoint, lambda method, path: "away") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        write_last_checkpoint(f"{object_store}/out")
    told = capsys.readouterr().out
    assert f"the last checkpoint could not be written: {object_store}/out/stopping: could" in told


@pytest.mark.guard
def test_a_run_told_to_stop_while_its_bucket_is_silent_is_killed_in_mlflow(
    prepared: Any, object_store: str, s3_endpoint: str, tmp_path: Path
) -> None:
    import mlflow

    tracking_uri, says = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "log"
    config = replace(prepared.pretrain(tmp_path, STEPS), output=f"{object_store}/out")
    options = ("--num_workers", "0", "--tracking_uri", tracking_uri)
    with fault_proxy(s3_endpoint, silence_s=120) as proxy:
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.address}
        environment |= {"RAYBERT_STORAGE_TIMEOUT_S": "3"}
        process = start(raybert(*pretrain_arguments(config, *options)), says, env=environment)
        try:
            wait_for_words("pretraining: ", says, timeout_s=240, process=process)
            proxy.decide = lambda method, path: "silence"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 128 + signal.SIGTERM, says.read_text()
        finally:
            process.kill()
            process.wait()
    client = mlflow.MlflowClient(tracking_uri)
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "KILLED", says.read_text()
