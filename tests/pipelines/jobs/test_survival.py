"""Whatever happens to a pretraining job, it ends with the same bits and tells no secret."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load, load_file

from bert_core import files
from bert_core.storage import open_bucket
from pipelines import pretrain
from pipelines.pretrain import PretrainConfig
from pipelines.training.records import CHECKPOINTS, read_records
from tests import processes
from tests.commands import pretrain_arguments, raybert
from tests.waiting import wait_for_words, wait_until

if TYPE_CHECKING:
    import mlflow

    from tests.mlflow_server import Server
    from tests.ray_clusters import Head

ROOT = Path(__file__).parents[3]
STEPS = 60  # more than are trained until the head is killed, at two steps a second
WITHIN_S = 240.0


def words_of(config: PretrainConfig) -> list[str]:
    return pretrain_arguments(
        config,
        "--log_every_steps", "1", "--checkpoint_every_steps", str(config.checkpoint_every_steps),
        # The controller takes a report every half a second, so no machine trains faster than that.
        "--report_every_s", "0",
        "--optimizer.lr", "1e-3", "--schedule.warmup_steps", "2",
        "--num_workers", "1",
    )  # fmt: skip


def run_of(config: PretrainConfig) -> "tuple[Any, mlflow.MlflowClient]":
    import mlflow

    client = mlflow.MlflowClient(config.tracking_uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    [run] = client.search_runs(experiments, f"tags.output = '{config.output}'")
    return run, client


def last_step(head: "Head") -> int:
    """That a head has recorded of its only run."""
    records = Path(head.environment["RAYBERT_CACHE"]).glob("runs/*")
    return max((max(read_records(folder), default=-1) for folder in records), default=-1)


def wait_for_step(step: int, head: "Head", process: "subprocess.Popen[bytes]", says: Path) -> None:
    wait_until(
        f"step {step} is recorded", lambda: last_step(head) >= step,
        timeout_s=WITHIN_S, process=process, log=says,
    )  # fmt: skip


@pytest.mark.guard
@pytest.mark.timeout(1800)
def test_a_job_that_is_stopped_and_whose_driver_and_head_are_killed_ends_as_one_left_alone(
    prepared: Any,
    tmp_path: Path,
    mortal_head: "Head",
    lasting_server: "Server",
    object_store: str,
    recovered: Callable[[str, float, float], None],
) -> None:
    """All that the job reads and writes is in a bucket; of the disk of the head that is killed, the
    next one has nothing."""
    head, says = mortal_head, tmp_path / "says.txt"
    # A checkpoint only where one is asked for, or a run goes on: otherwise none would be missed.
    alone = replace(
        prepared.pretrain(tmp_path / "alone", steps=STEPS), checkpoint_every_steps=10 * STEPS
    )
    hurt = replace(prepared.on_bucket(alone, object_store), tracking_uri=lasting_server.uri)
    command = raybert("submit", "--patience", "4m", "--retries", "2", *words_of(hurt))

    def submit(says: Path = says) -> "subprocess.Popen[bytes]":
        return processes.start(command, says, env=head.environment, cwd=ROOT)

    process = submit()
    pretrain.run(alone)  # while the job starts
    wait_for_words("pretraining: ", says, timeout_s=WITHIN_S, process=process)
    [job_id] = set(re.findall(r"raybert-pretrain-[0-9a-f]{12}", says.read_text()))

    # Submitted again while it runs, it is found; leaving it leaves it running.
    other = tmp_path / "other.txt"
    second = submit(other)
    for words in (f"job {job_id} is already running", "pretraining: "):
        wait_for_words(words, other, timeout_s=WITHIN_S, process=second)
    second.send_signal(signal.SIGINT)
    assert second.wait(timeout=60) == 130
    assert f"`raybert jobs attach {job_id}` shows it again" in other.read_text()

    # It is stopped: it writes a checkpoint, and says so, here and in MLflow.
    wait_for_step(5, head, process, says)
    stopped = head.raybert("jobs", "stop", job_id)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    [name] = files.list_names(f"{hurt.output}/{CHECKPOINTS}")
    step = int(name.removeprefix("step-"))
    assert f"stopped: the same command continues after step {step:,}" in stopped.stdout
    assert re.search(f"job {job_id} stopped after \\d+ s", stopped.stdout)
    assert process.wait(timeout=60) == 1, "it is not taken for a failure that is to be retried"
    assert "retry" not in says.read_text()
    assert run_of(hurt)[0].info.status == "KILLED"

    # Submitted again it goes on from there. Its driver is killed, and then its head, with all that
    # runs there: when there is one again it goes on by itself.
    process = submit()
    wait_for_step(last_step(head) + 6, head, process, says)
    assert "resuming the earlier run of" in says.read_text()
    [driver] = drivers(head)
    os.kill(driver, signal.SIGKILL)
    killed_s = time.monotonic()
    words = f"job {job_id}-2 lost: retry 1 of 2"
    wait_for_words(words, says, timeout_s=WITHIN_S, process=process)
    before = last_step(head)
    wait_for_step(before + 1, head, process, says)
    recovered("a job's driver is killed", killed_s, 120)
    wait_for_step(before + 6, head, process, says)
    head.kill()
    killed_s = time.monotonic()
    before = last_step(head)
    wait_for_words("does not answer", says, timeout_s=WITHIN_S, process=process)
    head.environment["RAYBERT_CACHE"] = f"{tmp_path}/another-cache"
    head.start()
    wait_for_step(before + 1, head, process, says)
    recovered("a job's head is killed, and started again", killed_s, 240)
    assert process.wait(timeout=600) == 0, says.read_text()
    assert f"job {job_id}-3 lost: retry 2 of 2" in says.read_text()
    assert f"job {job_id}-4 succeeded, exit code 0" in says.read_text()

    trained = load(files.read_bytes(f"{hurt.output}/bundle/model.safetensors"))
    expected = load_file(Path(alone.output) / "bundle" / "model.safetensors")
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(trained[name], tensor, err_msg=name)
    run, client = run_of(hurt)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == list(range(1, STEPS + 1)), "each once, in order"
    # Those of the killed ones end when they were last copied.
    found = files.find_files(f"{hurt.output}/logs/*/driver.log")
    logs = [path.split("/")[-2].partition("-")[2] for path in found]
    assert {job_id, f"{job_id}-4"} <= set(logs)

    assert_nothing_told(head, hurt.output, run, says)


def drivers(head: "Head") -> list[int]:
    """The processes of jobs that run on a head."""
    assert head.process is not None
    pids = []
    for child in psutil.Process(head.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if {"pipelines.cli", "pretrain"} <= set(child.cmdline()):
                pids.append(child.pid)
    return pids


def assert_nothing_told(head: "Head", output: str, run: Any, says: Path) -> None:
    """No planted secret is in what the job server tells, MLflow has or the job wrote."""
    url = head.environment["RAY_API_SERVER_ADDRESS"]
    token = {"Authorization": f"Bearer {head.environment['RAY_AUTH_TOKEN']}"}
    listed = httpx.get(f"{url}/api/jobs/", headers=token, timeout=60).text
    assert "raybert-pretrain-" in listed
    told = {"the job server": listed, "MLflow": str(run.to_dictionary()), "says": says.read_text()}
    bucket, key = open_bucket(output)
    written = [bucket.path(each["path"]) for each in bucket.list_all(key)]
    assert f"{output}/manifest.json" in written
    for path in written:
        told[path] = files.read_bytes(path).decode("latin-1")
    for place, text in told.items():
        assert "planted" not in text, place
        assert head.environment["RAY_AUTH_TOKEN"] not in text, place
