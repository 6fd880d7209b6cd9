"""Ray is joined or started once, by settings that stand in one place, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bert_core.errors import ConfigError, ResourceError
from pipelines import cluster

# Connects, tells its marker, and then works on Ray until it is ended.
DRIVER = """
    import os, subprocess, time
    {first}
    from pipelines import cluster
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
        print(cluster._started, cpus, ray.get(work.remote()), flush=True)
        ray.get(wait.remote())
    finally:
        print("finally", flush=True)
"""
# Ray has read its settings by then, and another cluster was there before.
IMPORTED_FIRST = "import ray.data"
ANOTHER_BEFORE = "from pipelines import cluster; cluster.connect(num_cpus=2); cluster.disconnect()"


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY")}


@pytest.mark.ray
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
        assert cluster._processes(marker)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=60)
        assert output.startswith("finally\n"), output
        assert process.returncode != 0
        assert cluster._processes(marker) == []
        assert not (tmp_path / ".ray").exists()
    finally:
        process.kill()


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    cluster._set_defaults(cluster.SETTINGS)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_child_can_have_a_cluster_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    environment = cluster.child_environment()
    assert environment == {**os.environ, "RAY_ADDRESS": "local"}


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        free_address = f"127.0.0.1:{held.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(ResourceError) as caught:
        cluster._join(free_address)
    assert time.monotonic() - began < 20
    assert f"wanted a Ray cluster at {free_address}, could not reach or join it" in str(
        caught.value
    )
    assert "start one with `ray start --head`" in str(caught.value)


@pytest.mark.parametrize("address", ["nonsense", "head:port", "http://127.0.0.1:8265"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"address is {address}: wanted host:6379, ray://"):
        cluster._join(address)


def test_a_workers_environment_is_ours_unless_the_users_own_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "glibc.malloc.hugetlb=1" in cluster.worker_environment()["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert cluster.worker_environment() == {"GLIBC_TUNABLES": "glibc.malloc.check=3"}
