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
from pipelines.training.records import STOPPING
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
            wait_for(lambda: files.exists(f"{output}/{STOPPING}"))
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
    assert not files.exists(f"{output}/{STOPPING}")
    client = mlflow.MlflowClient(tracking_uri)
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "KILLED"
