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
    import ray

    @ray.remote
    def work():
        subprocess.Popen(["sleep", "300"])  # as HAProxy is: no child of Ray's own processes
        return os.environ["RAY_AUTH_MODE"]

    @ray.remote
    def wait():
        time.sleep(300)

    print(cluster._started, ray.get(work.remote()), flush=True)
    try:
        ray.get(wait.remote())
    finally:
        print("finally", flush=True)
"""


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY")}


@pytest.mark.ray
@pytest.mark.parametrize(
    ("signum", "code", "first"),
    [(signal.SIGTERM, 128 + signal.SIGTERM, ""), (signal.SIGINT, 1, "import ray, ray.data")],
    ids=["SIGTERM", "SIGINT, and Ray imported first"],
)
def test_a_driver_that_is_ended_leaves_no_process_and_no_token_behind(
    signum: int, code: int, first: str, tmp_path: Path
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
        line = process.stdout.readline()
        assert line.endswith(" token\n"), line + process.stdout.read()
        marker = line.split()[0]
        assert cluster._processes(marker)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=60)
        assert output.startswith("finally\n"), output
        assert process.returncode == code
        assert cluster._processes(marker) == []
        assert not (tmp_path / ".ray").exists()
    finally:
        process.kill()


@pytest.mark.ray
def test_a_process_can_connect_again_and_finds_another_cluster() -> None:
    program = """
        import os
        from pipelines import cluster
        cluster.disconnect()  # nothing to leave yet
        seen = []
        for num_cpus in (1, 2):
            cluster.connect(address="local", num_cpus=num_cpus)
            cluster.connect(address="local", num_cpus=7)  # nothing happens
            import ray
            seen.append((ray.cluster_resources()["CPU"], ray.get_runtime_context().get_node_id()))
            cluster.disconnect()
            assert not cluster.is_connected()
        (first_cpus, first), (second_cpus, second) = seen
        assert (first_cpus, second_cpus) == (1, 2) and first != second
        assert "RAYBERT_CLUSTER" not in os.environ
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # A person who runs a stage sees what the stage has to say, and nothing of Ray.
    assert done.stdout + done.stderr == ""


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    cluster._set_defaults(cluster.SETTINGS)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


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
