"""A job that is stopped while it writes a checkpoint to a bucket, or while the bucket is away."""

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from bert_core import files
from pipelines import pretrain
from pipelines.pretrain import PretrainConfig
from pipelines.training.records import CHECKPOINTS, STOPPING_FILE
from tests import processes
from tests.commands import raybert
from tests.fault_proxy import Fault, Hold, fault_proxy, no_fault
from tests.waiting import wait_until

STEPS = 16
PART = r"/step-\d+/optimizer\.safetensors\?.*partNumber=1"


def in_open_bucket(
    prepared: Any, config: PretrainConfig, object_store: str, tmp_path: Path
) -> PretrainConfig:
    """The same in a bucket that is open to all, with a record of its own."""
    from tests.pipelines.test_on_a_bucket import open_to_all

    open_to_all(object_store)
    moved: PretrainConfig = prepared.on_bucket(config, object_store)
    return replace(moved, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")


def command_of(config: PretrainConfig) -> list[str]:
    from tests.pipelines.jobs.test_survival import words_of

    return [*words_of(config), "--tracking_uri", str(config.tracking_uri)]


def settings(address: str) -> dict[str, str]:
    return {"RAYBERT_STORAGE_ENDPOINT": address, "RAYBERT_STORAGE_ANONYMOUS": "true"}


def submitted(
    config: PretrainConfig, head: Any, address: str, says: Path
) -> "subprocess.Popen[bytes]":
    """A job whose bucket is at `address`, and whose output goes to the file `says`."""
    from tests.pipelines.jobs.test_survival import ROOT

    command = raybert("submit", *command_of(config))
    return processes.start(command, says, env=head.environment | settings(address), cwd=ROOT)


def stopping(head: Any, says: Path) -> "subprocess.Popen[str]":
    """`raybert jobs stop`, of the job that `says` tells of."""
    from tests.pipelines.jobs.test_survival import ROOT

    [job_id] = set(re.findall(r"raybert-pretrain-[0-9a-f]{12}", says.read_text()))
    return subprocess.Popen(
        raybert("jobs", "stop", job_id),
        env=head.environment, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def uploads(bucket: str) -> list[str]:
    import boto3

    found = boto3.client("s3").list_multipart_uploads(Bucket=bucket.removeprefix("s3://"))
    return [each["Key"] for each in found.get("Uploads", [])]


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
    from bert_core.train.checkpoint import LAST_FILE, latest_checkpoint
    from tests.pipelines.jobs.test_survival import WITHIN_S, run_of

    # Of this size it is uploaded in parts.
    alone = replace(prepared.pretrain(tmp_path / "alone", steps=STEPS), variant="bert-mini")
    config = in_open_bucket(prepared, alone, object_store, tmp_path)
    output = config.output

    with fault_proxy(s3_endpoint) as proxy:

        def stopped(hold: Hold, *, is_let_through: bool) -> str:
            """What a job says that is stopped while one of its checkpoints is held."""
            proxy.decide = hold
            says = tmp_path / "says.txt"
            process = submitted(config, head, proxy.address, says)
            wait_until(
                "a checkpoint is being written", hold.began.is_set,
                timeout_s=WITHIN_S, process=process, log=says,
            )  # fmt: skip
            assert len(uploads(object_store)) == 1
            stop = stopping(head, says)
            began_s = time.monotonic()
            asked_to_stop = partial(files.exists, f"{output}/{STOPPING_FILE}")
            wait_until("the job is asked to stop", asked_to_stop, timeout_s=60, log=says)
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
        assert f"the same command continues after step {newest.step:,}" in told
        for name in files.list_names(f"{output}/{CHECKPOINTS}"):
            assert LAST_FILE in files.list_names(f"{output}/{CHECKPOINTS}/{name}"), name
        told = stopped(Hold("PUT", PART), is_let_through=False)
        assert f"the same command continues after step {newest.step:,}" in told
        assert latest_checkpoint(f"{output}/{CHECKPOINTS}") == newest

        proxy.decide = no_fault
        done = head.raybert("submit", *command_of(config), **settings(proxy.address))
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


@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["away", "silence"])
def test_a_job_that_is_stopped_while_its_bucket_is_away_says_so_and_mlflow_says_killed(
    fault: Fault,
    prepared: Any,
    head: Any,
    object_store: str,
    s3_endpoint: str,
    tmp_path: Path,
    recovered: Callable[[str, float, float], None],
) -> None:
    from bert_core.train.checkpoint import latest_checkpoint
    from tests.pipelines.jobs.test_survival import WITHIN_S, run_of

    alone = prepared.pretrain(tmp_path, steps=1000)
    config = in_open_bucket(prepared, alone, object_store, tmp_path)
    says = tmp_path / "says.txt"
    with fault_proxy(s3_endpoint, silence_s=120) as proxy:
        process = submitted(config, head, proxy.address, says)
        checkpoints = f"{config.output}/{CHECKPOINTS}"
        wait_until(
            "there is a checkpoint", lambda: latest_checkpoint(checkpoints) is not None,
            timeout_s=WITHIN_S, process=process, log=says,
        )  # fmt: skip
        proxy.decide = lambda method, path: fault
        began_s = time.monotonic()
        told, _ = stopping(head, says).communicate(timeout=120)
        how = "silent" if fault == "silence" else fault
        recovered(f"a job is stopped while its bucket is {how}", began_s, 60)
    assert run_of(config)[0].info.status == "KILLED", told
    assert "the last checkpoint could not be written" in told
    assert re.search(r"job \S+ stopped after \d+ s", told)
    assert process.wait(timeout=60) == 1
