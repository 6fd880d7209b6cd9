"""A training run that is told to end writes a checkpoint first, and goes on from there."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlflow
import pytest

from pipelines.training.records import STOPPING, read_records


@pytest.mark.ray
@pytest.mark.drill
def test_a_run_that_is_told_to_end_writes_a_checkpoint_first(prepared: Any, tmp_path: Path) -> None:
    config = prepared.pretrain(tmp_path / "out")
    folder, tracking_uri = tmp_path / "out", f"sqlite:///{tmp_path}/mlflow.db"
    command = [
        sys.executable, "-m", "pipelines.cli", "pretrain", "--output", str(folder),
        "--shards", config.shards, "--tokenizer", config.tokenizer, "--variant", "bert-tiny",
        "--global_batch_size", "16", "--micro_batch_tokens", "256", "--held_out_rows", "64",
        "--log_every_steps", "1", "--checkpoint_every_steps", "1000000",
        "--loop.max_steps", "1000000", "--loop.precision", "fp32", "--num_workers", "2",
        "--tracking_uri", tracking_uri,
    ]  # fmt: skip
    with (tmp_path / "says.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 240
        while max(read_records(folder) if folder.exists() else {}, default=0) < 3:
            assert time.monotonic() < deadline_s, (tmp_path / "says.txt").read_text()
            assert process.poll() is None, (tmp_path / "says.txt").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) != 0
    finally:
        process.kill()
        process.wait()
    assert list(folder.glob("checkpoints/step-*/checkpoint.json")), "there was none before"
    assert not (folder / STOPPING).exists()
    client = mlflow.MlflowClient(tracking_uri)
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.status == "KILLED"
