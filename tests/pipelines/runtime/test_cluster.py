"""Ray is joined or started once, by settings that stand in one place, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bert_core.errors import ConfigError, ResourceError
from pipelines.runtime import cluster
from pipelines.runtime.processes import processes_of
from tracking.store.ports import free_ports

# Connects, tells its marker, and then works on Ray until it is ended.
DRIVER = """
    import os, subprocess, time
    {first}
    from pipelines.runtime import cluster
    cluster.connect(address="local", num_cpus=1)
    cluster.connect(address="local", num_cpus=7)  # nothing happens, it is connected
    import ray

    @ray.remote
    def work():
        subprocess.Popen(["sleep", "300"])  # as HAProxy is: no child of Ray's own processes
        return os.environ["RAY_AUTH_MODE"]

    @ray.remote
    def wait():
        time.sleep(300)

    cpus = ray.cluster_resources()["CPU"]
    try:
        print(cluster.started(), cpus, ray.get(work.remote()), flush=True)
        ray.get(wait.remote())
    finally:
        print("finally", flush=True)
"""
# Ray has read its settings by then, and another cluster was there before.
IMPORTED_FIRST = "import ray.data"
ANOTHER_BEFORE = (
    "from pipelines.runtime import cluster; cluster.connect(num_cpus=2); cluster.disconnect()"
)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY")}


@pytest.mark.usefixtures("local_ray")
def test_a_cluster_of_our_own_has_no_process_that_it_does_without() -> None:
    """By Ray's private names: a Ray that moves them starts 160 MiB more."""
    marker = cluster.started()
    assert marker is not None
    lines = [psutil.Process(pid).cmdline() for pid in processes_of(marker)]
    programs = {Path(word).name for line in lines for word in line if "/ray/" in word}
    assert {"gcs_server", "raylet"} <= programs, programs
    spare = {"monitor.py", "log_monitor.py", "dashboard.py"}
    assert not spare & programs, spare & programs


@pytest.mark.ray
def test_a_cluster_for_training_or_serving_starts_no_worker_in_advance() -> None:
    code = """
        import time
        import psutil
        from pipelines.runtime import cluster
        from pipelines.runtime.processes import processes_of
        cluster.set_defaults(cluster.NO_SPARE_WORKERS)
        cluster.connect(address="local", num_cpus=1)
        time.sleep(1)  # in which Ray would start one
        lines = [psutil.Process(pid).cmdline() for pid in processes_of(cluster.started())]
        assert any("raylet" in line[0] for line in lines), lines  # it names the worker's program
        workers = [" ".join(line) for line in lines if "raylet" not in line[0]]
        print(*(each for each in workers if "default_worker.py" in each or "ray::IDLE" in each))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == ""


@pytest.mark.ray
@pytest.mark.guard
@pytest.mark.parametrize(
    ("signum", "first"),
    [(signal.SIGTERM, ""), (signal.SIGINT, f"{IMPORTED_FIRST}; {ANOTHER_BEFORE}")],
    ids=["SIGTERM", "SIGINT, the second cluster of a process that had imported Ray"],
)
def test_a_driver_that_is_ended_leaves_no_process_and_no_token_behind(
    signum: int, first: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER).format(first=first)],
        env={**clean_environment(), "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # the first: of Ray itself a person sees nothing
        assert line.endswith(" 1.0 token\n"), line + process.stdout.read()
        marker = line.split()[0]
        assert processes_of(marker)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=60)
        assert output.startswith("finally\n"), output
        assert process.returncode != 0
        assert processes_of(marker) == []
        assert not (tmp_path / ".ray").exists()
    finally:
        process.kill()


@pytest.mark.usefixtures("local_ray")
def test_workers_of_our_own_cluster_give_way_to_nobody() -> None:
    import ray

    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)  # Ray's own default is 15


@pytest.mark.ray
def test_a_cluster_that_does_not_start_is_reported_in_one_line() -> None:
    code = "from pipelines.runtime import cluster; cluster.connect(address='local')"
    # Ray cannot write where its session goes, so its processes cannot start.
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment() | {"RAY_TMPDIR": "/proc/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr.splitlines()[-1].startswith(
        "bert_core.errors.ResourceError: wanted to start Ray on this machine, it did not start ("
    )
    assert ended.stderr.rstrip().endswith(
        "): if the machine is busy, run the same command again; a stage does without Ray with "
        "--num_workers 0"
    )


def test_user_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    cluster.set_defaults(cluster.SETTINGS)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_child_can_have_a_cluster_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    environment = cluster.child_environment()
    assert environment == {**os.environ, "RAY_ADDRESS": "local"}


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start of a process: this one may have joined the cluster that tests share."""
    monkeypatch.setattr(cluster, "is_connected", lambda: False)


@pytest.mark.usefixtures("unconnected")
def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    free_address = f"127.0.0.1:{free_ports(1)[0]}"
    began = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        cluster.connect(address=free_address)
    assert time.monotonic() - began < 20
    assert f"wanted a Ray cluster at {free_address}, could not reach or join it" in str(
        caught.value
    )
    assert "start one with `ray get-auth-token --generate` and `RAY_AUTH_MODE=" in str(caught.value)


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("address", ["nonsense", "head:port", "http://127.0.0.1:8265"])
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"address is {address}: wanted host:6379, ray://"):
        cluster.connect(address=address)


def test_a_workers_environment_is_ours_unless_the_users_own_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "glibc.malloc.hugetlb=1" in cluster.worker_environment()["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert cluster.worker_environment() == {"GLIBC_TUNABLES": "glibc.malloc.check=3"}


ADDRESSES = ["host:port", "ray://", "auto"]
DANGER = "requires no token: anyone who reaches its ports can run code on it"


def vocab_command(folder: Path) -> list[str]:
    """A stage that joins a cluster."""
    (folder / "text.txt").write_text("\n\n".join(f"One sentence, {i}." for i in range(50)))
    return [
        "vocab", "--corpus.source", f"{folder}/text.txt", "--vocab_size", "100",
        "--num_workers", "1", "--output", f"{folder}/vocab",
        "--tracking_uri", f"sqlite:///{folder}/mlflow.db",
    ]  # fmt: skip


@pytest.mark.guard
@pytest.mark.parametrize("kind", ADDRESSES)
def test_a_stage_refuses_a_cluster_that_asks_for_no_token(
    kind: str, open_head: Any, tmp_path: Path
) -> None:
    address = open_head.addresses[kind]
    refused = open_head.raybert(*vocab_command(tmp_path), "--address", address)
    assert refused.returncode == 1, refused.stderr
    assert refused.stderr.splitlines()[-1] == (
        "raybert vocab: wanted a Ray cluster that requires a token, the one at "
        f"{address} {DANGER}; restart it with "
        "`ray get-auth-token --generate` and `RAY_AUTH_MODE=token ray start --head`, or join it "
        "anyway with --allow_open_cluster"
    )


@pytest.mark.guard
def test_a_stage_joins_a_cluster_without_a_token_where_that_is_allowed(
    open_head: Any, tmp_path: Path
) -> None:
    # As in a Ray job, by the variable; and in spite of a token that is for another cluster.
    address = open_head.addresses["host:port"]
    done = open_head.raybert(
        *vocab_command(tmp_path), "--allow_open_cluster",
        RAY_ADDRESS=address, RAY_AUTH_TOKEN="0123456789abcdef" * 4,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"warning: the Ray cluster at {address} {DANGER}" in done.stdout
    assert (tmp_path / "vocab" / "manifest.json").is_file()


@pytest.mark.guard
def test_a_stage_joins_a_cluster_with_its_token(head: Any, tmp_path: Path) -> None:
    done = head.raybert(*vocab_command(tmp_path), "--address", "auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout
    assert (tmp_path / "vocab" / "manifest.json").is_file()


JOIN = """
import os, sys
from pipelines.runtime import cluster

cluster.connect(address=sys.argv[1], allow_open_cluster=True)
import ray

work = ray.remote(lambda: os.environ["RAYBERT_STORAGE_TIMEOUT_S"])
print("timeout of storage:", ray.get(work.remote()))
"""


@pytest.mark.drill
@pytest.mark.parametrize("which", ["head", "open_head"])
def test_a_driver_joins_through_rays_client(which: str, head: Any, open_head: Any) -> None:
    joined = {"head": head, "open_head": open_head}[which]
    done = subprocess.run(
        [sys.executable, "-c", JOIN, joined.addresses["ray://"]],
        env=joined.environment | {"RAYBERT_STORAGE_TIMEOUT_S": "7"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    # The settings of object stores go along.
    assert done.stdout.endswith("timeout of storage: 7\n"), done.stdout + done.stderr
    assert (DANGER in done.stdout) == (which == "open_head")


@pytest.mark.drill
def test_commands_that_rays_client_cannot_run_say_so(head: Any, tmp_path: Path) -> None:
    done = head.raybert(*vocab_command(tmp_path), "--address", head.addresses["ray://"])
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "raybert vocab: address: wanted host:6379 or auto, since Ray Data does not run through "
        "ray://: run it on a machine of the cluster, or submit it with `raybert submit`"
    )
