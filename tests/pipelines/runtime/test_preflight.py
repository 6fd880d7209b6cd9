"""A stage finds out in the first seconds that it cannot work, and what mends it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bert_core import files
from pipelines import cli
from tests import processes
from tests.commands import raybert
from tests.fault_proxy import fault_proxy


def vocab(folder: Path, *more: str) -> list[str]:
    """Of a corpus that does not exist: whatever is told, was found before it was looked for."""
    return [
        "vocab", "--corpus.source", f"{folder}/absent.txt", "--vocab_size", "100",
        "--output", f"{folder}/vocab", "--tracking_uri", f"sqlite:///{folder}/mlflow.db", *more,
    ]  # fmt: skip


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code in (1, 2)
    return capsys.readouterr().err.splitlines()[-1]


def test_an_output_that_cannot_be_written_is_found_before_the_input_is_read(
    tmp_path: Path, object_store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(vocab(tmp_path, "--output", "s3://no-such-bucket-1/vocab"), capsys)
    assert "s3://no-such-bucket-1/vocab" in told
    assert "there is no bucket 'no-such-bucket-1'" in told


def test_a_read_only_bucket_is_noticed_before_the_input_is_read(
    tmp_path: Path,
    guarded: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = vocab(tmp_path, "--output", f"{guarded}/vocab")
    told = refused(command, capsys)
    assert f"raybert vocab: {guarded}/vocab: write: " in told
    assert told.endswith(
        "these credentials may not write to it: grant them that, or give others, or another bucket"
        "; finished work is kept: the same command continues from there"
    )
    assert files.list_names(guarded) == []
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert "the credentials are wrong or have expired: correct" in refused(command, capsys)


def test_a_store_without_conditional_writes_is_noticed_before_the_input_is_read(
    tmp_path: Path,
    object_store: str,
    s3_endpoint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fault_proxy(s3_endpoint) as proxy:
        proxy.ignores = ("if-none-match", "if-match")  # as stores did before S3 had them
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        told = refused(vocab(tmp_path, "--output", f"{object_store}/vocab"), capsys)
    assert f"raybert vocab: {object_store}/vocab: conditional put: wanted what was written " in told
    assert told.endswith("this storage cannot hold a run; give another place")
    assert files.list_names(object_store) == []


def test_nothing_is_left_where_the_input_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent.txt: wanted a file" in refused(vocab(tmp_path, "--num_workers", "0"), capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.guard
def test_too_few_cpus_are_found_before_the_input_is_read(head: Any, tmp_path: Path) -> None:
    done = head.raybert(*vocab(tmp_path, "--num_workers", "3", "--address", "auto"))
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "raybert vocab: wanted 3 CPUs (3 workers with 1 thread), the cluster has 1: lower "
        "num_workers or threads_per_worker, add nodes, or wait for some with --wait"
    )


@pytest.mark.guard
def test_a_wrong_token_is_found_before_the_input_is_read(head: Any, tmp_path: Path) -> None:
    address = head.addresses["host:port"]
    command = vocab(tmp_path, "--num_workers", "1", "--address", address)
    done = head.raybert(*command, RAY_AUTH_TOKEN="00ff" * 16)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"raybert vocab: wanted the token of the Ray cluster at {address}, "
    )


OTHER_RAY = """
import sys
import ray
ray.__version__ = "2.1.0"
from pipelines import cli
cli.main(sys.argv[1:])
"""


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["host:port", "ray://"])
def test_another_version_of_ray_is_reported(kind: str, head: Any, tmp_path: Path) -> None:
    command = vocab(tmp_path, "--num_workers", "1", "--address", head.addresses[kind])
    done = subprocess.run(
        [sys.executable, "-c", OTHER_RAY, *command],
        env=head.environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    told = done.stderr.splitlines()[-1]
    assert "wanted a Ray cluster with the Ray and Python of this process" in told
    assert "was started with: Ray: 2.1.0" in told
    assert told.endswith("use the cluster's here, or restart it with these")


MOUNT = 'mount -t tmpfs none "$0" && exec "$@"'
JOINED = """
import sys, time
from pipelines.runtime import cluster
from pipelines.runtime.capacity import require_room
cluster.connect(address=sys.argv[1])
import ray
deadline = time.monotonic() + 120
while ray.cluster_resources().get("GPU", 0) < 1 and time.monotonic() < deadline:
    time.sleep(0.2)
try:
    require_room(2, 0)
except Exception as error:
    print(type(error).__name__, error)
"""


@contextmanager
def another_node(head: Any, log: Path, *before: str) -> Iterator[None]:
    """A second node of one CPU and, by its own account, one GPU.

    Args:
        before: command that runs what follows it.
    """
    from tracking.store.ports import free_ports

    names = ("node-manager-port", "object-manager-port", "dashboard-agent-listen-port",
             "dashboard-agent-grpc-port", "metrics-export-port")  # fmt: skip
    ports = zip(names, free_ports(len(names)), strict=True)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    command += [f"--address={head.addresses['host:port']}", "--num-gpus=1"]
    command += ["--disable-usage-stats", *(f"--{name}={port}" for name, port in ports)]
    environment = head.environment | {"RAY_AUTH_MODE": "token"}
    process = processes.start([*before, *command], log, env=environment)
    yield
    process.terminate()
    process.wait(timeout=60)


@pytest.fixture
def blind_node(head: Any, tmp_path: Path) -> Iterator[Path]:
    """A second node which sees another folder in this place."""
    folder = tmp_path / "own"
    folder.mkdir()
    alone = ["unshare", "--mount", "sh", "-c", MOUNT, str(folder)]
    able = subprocess.run([*alone, "true"], capture_output=True)
    if able.returncode:
        pytest.skip(f"this process cannot mount, so no two nodes see different folders: {able}")
    with another_node(head, tmp_path / "log", *alone):
        yield folder


@pytest.mark.drill
def test_a_waiting_stage_starts_when_the_cluster_has_room(head: Any, tmp_path: Path) -> None:
    arguments = vocab(tmp_path, "--num_workers", "2", "--address", "auto", "--wait")
    with subprocess.Popen(
        raybert(*arguments),
        env=head.environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == (
            "wanted 2 CPUs (2 workers with 1 thread), the cluster has 1: lower num_workers or "
            "threads_per_worker, or add nodes; waiting for some\n"
        )
        with another_node(head, tmp_path / "log"):
            _, told = process.communicate(timeout=120)
    assert "absent.txt: wanted a file" in told, Path(tmp_path, "log").read_text()


@pytest.mark.drill
def test_an_output_that_not_all_nodes_see_and_too_few_gpus_are_reported(
    head: Any, blind_node: Path, tmp_path: Path
) -> None:
    joined = subprocess.run(
        [sys.executable, "-c", JOINED, head.addresses["host:port"]],
        env=head.environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert joined.stdout == (
        "ResourceError wanted 2 GPUs, one per worker, the cluster has 1: lower num_workers to 1, "
        "add nodes, or wait for some with --wait\n"
    ), joined.stderr + Path(tmp_path, "log").read_text()
    began = time.monotonic()
    command = vocab(tmp_path, "--address", "auto", "--output", f"{blind_node}/vocab")
    done = head.raybert(*command)
    assert done.returncode == 1, done.stderr
    told = done.stderr.splitlines()[-1]
    assert told.startswith(
        f"raybert vocab: {blind_node}/vocab: wanted a place that all nodes share, "
        f"{os.uname().nodename} ("
    )
    assert told.endswith(
        "it does not see what was written there: give a folder that is mounted on all nodes, or a "
        "URI that they have credentials for"
    )
    assert time.monotonic() - began < 120
