"""A training run that is told to end writes a checkpoint first, and goes on from there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest

from bert_core import files
from bert_core.train.checkpoint import LAST_FILE, latest_checkpoint
from pipelines.training.driver import write_last_checkpoint
from pipelines.training.records import STOPPING_FILE
from tests.fault_proxy import Hold, fault_proxy


@pytest.mark.ray
@pytest.mark.drill
def test_a_run_that_is_told_to_end_while_it_writes_a_checkpoint_writes_one_more(
    prepared: Any, object_store: str, s3_endpoint: str, tmp_path: Path
) -> None:
    """The one that it is writing is of earlier weights. The store lets its first part through when
    the run has been told."""
    import boto3

    config = prepared.pretrain(tmp_path / "out")
    output, tracking_uri = f"{object_store}/out", f"sqlite:///{tmp_path}/mlflow.db"
    command = [
        sys.executable, "-m", "pipelines.cli", "pretrain", "--output", output,
        # Of this size a checkpoint is uploaded in parts.
        "--shards", config.shards, "--tokenizer", config.tokenizer, "--variant", "bert-mini",
        "--global_batch_size", "16", "--micro_batch_tokens", "256", "--held_out_rows", "64",
        "--log_every_steps", "1", "--report_every_s", "0", "--checkpoint_every_steps", "4",
        "--loop.max_steps", "1000000", "--loop.precision", "fp32", "--num_workers", "2",
        "--tracking_uri", tracking_uri,
    ]  # fmt: skip
    hold, says = Hold("PUT", r"/step-00000004/model\.safetensors\?.*partNumber=1"), tmp_path / "log"
    with fault_proxy(s3_endpoint, hold) as proxy, says.open("wb") as log:
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.address}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:

            def wait_for(what: Any) -> None:
                deadline_s = time.monotonic() + 240
                while not what():
                    assert time.monotonic() < deadline_s, says.read_text()
                    assert process.poll() is None, says.read_text()
                    time.sleep(0.1)

            wait_for(hold.began.is_set)
            process.send_signal(signal.SIGTERM)
            wait_for(lambda: files.exists(f"{output}/{STOPPING_FILE}"))
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


def test_a_last_checkpoint_that_cannot_be_asked_for_is_told(
    object_store: str,
    s3_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("bert_core.storage.bucket._patience_s", 0.5)
    with fault_proxy(s3_endpoint, lambda method, path: "away") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        write_last_checkpoint(f"{object_store}/out")
    told = capsys.readouterr().out
    assert f"the last checkpoint could not be written: {object_store}/out/stopping: could" in told


@pytest.mark.drill
def test_a_run_that_is_told_to_end_while_its_bucket_is_silent_is_killed_in_mlflow(
    prepared: Any, object_store: str, s3_endpoint: str, tmp_path: Path
) -> None:
    config = prepared.pretrain(tmp_path / "out")
    tracking_uri, says = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "log"
    command = [
        sys.executable, "-m", "pipelines.cli", "pretrain", "--output", f"{object_store}/out",
        "--shards", config.shards, "--tokenizer", config.tokenizer, "--variant", "bert-tiny",
        "--global_batch_size", "16", "--micro_batch_tokens", "256", "--held_out_rows", "64",
        "--loop.max_steps", "1000000", "--loop.precision", "fp32", "--num_workers", "0",
        "--tracking_uri", tracking_uri,
    ]  # fmt: skip
    with fault_proxy(s3_endpoint, silence_s=120) as proxy, says.open("wb") as log:
        environment = os.environ | {"AWS_ENDPOINT_URL": proxy.address}
        environment |= {"RAYBERT_STORAGE_TIMEOUT_S": "3"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline_s = time.monotonic() + 240
            while "pretraining: " not in says.read_text():
                assert time.monotonic() < deadline_s, says.read_text()
                assert process.poll() is None, says.read_text()
                time.sleep(0.1)
            proxy.decide = lambda method, path: "silence"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 128 + signal.SIGTERM, says.read_text()
        finally:
            process.kill()
            process.wait()
    client = mlflow.MlflowClient(tracking_uri)
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "KILLED", says.read_text()
