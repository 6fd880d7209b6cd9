"""A job that is stopped while it writes a checkpoint to a bucket."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from bert_core import files
from bert_core.train.checkpoint import LAST_FILE, latest_checkpoint
from pipelines import pretrain
from pipelines.training.records import CHECKPOINTS, STOPPING
from tests.fault_proxy import Hold, fault_proxy, no_fault
from tests.pipelines.jobs.test_survival import ROOT, run_of, wait_for, words_of
from tests.pipelines.test_on_a_bucket import open_to_all

STEPS = 16
PART = r"/step-\d+/optimizer\.safetensors\?.*partNumber=1"


def uploads(bucket: str) -> list[str]:
    import boto3

    found = boto3.client("s3").list_multipart_uploads(Bucket=bucket.removeprefix("s3://"))
    return [each["Key"] for each in found.get("Uploads", [])]


@pytest.mark.ray
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_job_that_is_stopped_in_the_middle_of_a_checkpoint_goes_on_with_the_same_bits(
    prepared: Any,
    head: Any,
    object_store: str,
    s3_endpoint: str,
    tmp_path: Path,
    recovered: Callable[[str, float, float], None],
) -> None:
    """The store lets the checkpoint through as soon as the job is told to stop. Then it is stopped
    once more, and the store never does."""
    open_to_all(object_store)
    for folder in ("vocab", "shards"):
        for path in (prepared.folder / folder).rglob("*"):
            if path.is_file():
                name = path.relative_to(prepared.folder)
                files.write_bytes(f"{object_store}/{name}", path.read_bytes())
    # Of this size it is uploaded in parts.
    alone = replace(prepared.pretrain(tmp_path / "alone", steps=STEPS), variant="bert-mini")
    output = f"{object_store}/out"
    config = replace(
        alone,
        output=output,
        shards=f"{object_store}/shards",
        tokenizer=f"{object_store}/vocab",
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )
    words = [*words_of(config), "--variant", "bert-mini", "--tracking_uri", config.tracking_uri]

    with fault_proxy(s3_endpoint) as proxy:
        settings = {"RAYBERT_STORAGE_ENDPOINT": proxy.address, "RAYBERT_STORAGE_ANONYMOUS": "true"}

        def stopped(hold: Hold, *, is_let_through: bool) -> str:
            """What a job says that is stopped while one of its checkpoints is held."""
            proxy.decide = hold
            says = tmp_path / "says.txt"
            with says.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "pipelines.cli", "submit", *words],
                    env=head.environment | settings,
                    cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                )  # fmt: skip
            wait_for(hold.began.is_set, process, says)
            assert len(uploads(object_store)) == 1
            [job_id] = set(re.findall(r"raybert-pretrain-[0-9a-f]{12}", says.read_text()))
            stop = subprocess.Popen(
                [sys.executable, "-m", "pipelines.cli", "jobs", "stop", job_id],
                env=head.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            began_s = time.monotonic()
            while not files.exists(f"{output}/{STOPPING}"):
                assert time.monotonic() < began_s + 60, says.read_text()
                time.sleep(0.1)
            if is_let_through:
                hold.released.set()
            told, _ = stop.communicate(timeout=120)
            assert stop.returncode == 0, told
            assert process.wait(timeout=60) == 1
            how = "is stopped in the middle of a checkpoint"
            recovered(f"a job {how}" if is_let_through else f"a job {how} that hangs", began_s, 60)
            hold.released.set()  # whoever sent it is gone

            assert uploads(object_store) == []
            assert files.read_json(f"{output}/lease.json")["released"]
            assert run_of(config)[0].info.status == "KILLED"
            return told

        told = stopped(Hold("PUT", PART), is_let_through=True)
        newest = latest_checkpoint(f"{output}/{CHECKPOINTS}")
        assert newest is not None
        assert f"the same command goes on after step {newest.step:,}" in told
        for name in files.list_names(f"{output}/{CHECKPOINTS}"):
            assert LAST_FILE in files.list_names(f"{output}/{CHECKPOINTS}/{name}"), name
        told = stopped(Hold("PUT", PART), is_let_through=False)
        assert f"the same command goes on after step {newest.step:,}" in told
        assert latest_checkpoint(f"{output}/{CHECKPOINTS}") == newest

        proxy.decide = no_fault
        done = head.raybert("submit", *words, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resuming the earlier run of" in done.stdout

    pretrain.run(alone)
    trained = load(files.read_bytes(f"{output}/bundle/model.safetensors"))
    for name, tensor in load_file(Path(alone.output) / "bundle" / "model.safetensors").items():
        np.testing.assert_array_equal(trained[name], tensor, err_msg=name)
    run, client = run_of(config)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == list(range(1, STEPS + 1)), "each once, in order"
