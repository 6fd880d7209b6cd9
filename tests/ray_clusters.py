"""Ray on this machine: the cluster of a test session, and those that `ray start --head` makes."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import processes
from tests.commands import raybert
from tests.mlflow_server import Server
from tests.s3 import S3_REGION

# Every port that `ray start` gives a fixed number to, so that another cluster is in nobody's way.
HEAD_PORTS = (
    "dashboard-port",
    "port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)
HEAD_STARTS, HEAD_START_TIMEOUT_S = 3, 120


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One cluster of this test session on this machine, four CPUs whatever the machine has."""
    from pipelines.runtime import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # reports wait for it
        cluster.connect(address="local", num_cpus=4)
        yield
        cluster.disconnect()


@dataclass
class Head:
    """A cluster that `ray start --head` made."""

    environment: dict[str, str]
    """Of its clients: its job server, and its token if it has one; no RAY_ADDRESS."""
    ports: dict[str, int]
    folder: Path
    mode: str
    """Its RAY_AUTH_MODE, which clients are not told: they are to find out."""
    options: Sequence[str] = ("--num-cpus=1",)
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Start it and wait until it is up."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [f"--temp-dir={self.folder}/ray", "--dashboard-host=127.0.0.1"]
        command += ["--disable-usage-stats", *self.options]
        command += [f"--{name}={port}" for name, port in self.ports.items()]
        log, environment = (
            self.folder / "start.log",
            self.environment | {"RAY_AUTH_MODE": self.mode},
        )
        # NOTE: `ray start` gives up when its own processes are not up within 30 s, which no setting
        # changes and a busy machine exceeds.
        for _ in range(HEAD_STARTS):
            self.process = processes.start(command, log, env=environment, cwd=self.folder)
            if _is_up(self, self.process):
                return
            self.process.kill()
            self.process.wait()
        pytest.fail(f"ray start did not come up: {log.read_text()}")

    def stop(self) -> None:
        """End it in good order."""
        assert self.process is not None
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()  # with --block it ends its own processes
        self.process.wait(timeout=60)
        for process in started:  # nodes that its autoscaler has started
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def kill(self) -> None:
        """Kill all of its processes at once, jobs included, as if its machine were gone."""
        assert self.process is not None
        top = psutil.Process(self.process.pid)
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    @property
    def addresses(self) -> dict[str, str]:
        """Every way to name it to a driver, by kind."""
        return {
            "host:port": f"127.0.0.1:{self.ports['port']}",
            "ray://": f"ray://127.0.0.1:{self.ports['ray-client-server-port']}",
            "auto": "auto",
        }

    def raybert(self, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run a command line as a client of it, with more in its environment."""
        return subprocess.run(
            raybert(*arguments),
            env=self.environment | more,
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=240,
        )


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    """One that asks for a token."""
    with running_head({"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}, mode="token") as head:
        yield head


@pytest.fixture(scope="session")
def open_head() -> Iterator[Head]:
    """One that lets in everybody, as `ray start --head` makes it where there is no token."""
    with running_head({"HOME": "/nonexistent"}, mode="disabled") as head:
        yield head


@pytest.fixture(scope="module")
def mortal_head(
    lasting_server: Server, s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Head]:
    """One that a test may kill and start again, with a cache of its own. Secrets are in the
    environment of its processes and clients, a password of an MLflow server among them; all but the
    token have `planted` in them."""
    lasting_server.start()
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "planted-aws-secret",
        "HF_TOKEN": "planted-hub-token",
        "MLFLOW_TRACKING_URI": lasting_server.uri.replace("://", "://me:planted-password@"),
        "RAY_AUTH_TOKEN": "fedcba9876543210" * 4,
    }
    others = {
        "AWS_ACCESS_KEY_ID": "anyone",
        "AWS_DEFAULT_REGION": S3_REGION,
        "RAYBERT_CACHE": str(tmp_path_factory.mktemp("cache")),
        "RAYBERT_STORAGE_ENDPOINT": s3_endpoint,
    }
    with running_head(secrets | others, mode="token") as head:
        yield head


@contextmanager
def running_head(
    variables: dict[str, str], *, mode: str, grows_by: Mapping[str, Mapping[str, int]] | None = None
) -> Iterator[Head]:
    """A cluster of its own, with variables in the environment of all of its processes.

    Args:
        grows_by: resources of a kind of node, by its name: Ray's autoscaler starts up to one of
            each where something waits for it, and ends those that are idle. The head then has no
            CPU.
    """
    from tracking.store.ports import free_ports

    ports = dict(zip(HEAD_PORTS, free_ports(len(HEAD_PORTS)), strict=True))
    # A short path: Ray's sockets lie under it, and a socket's path ends at 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray-")
    environment = {name: value for name, value in os.environ.items() if name[:3] != "RAY"}
    environment |= {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{ports['dashboard-port']}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # nobody waits for it
        "RAY_TMPDIR": folder,  # where `auto` looks
        # What a job calls `python` is what its cluster was started in.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **variables,
    }
    head = Head(environment, ports, Path(folder), mode)
    if grows_by is not None:
        config = Path(folder) / "autoscaling.json"
        config.write_text(json.dumps(_growing(f"127.0.0.1:{ports['port']}", grows_by)))
        head.options = ("--num-cpus=0", f"--autoscaling-config={config}")
        environment |= {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
    head.start()
    try:
        yield head
    finally:
        head.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _growing(gcs_address: str, grows_by: Mapping[str, Mapping[str, int]]) -> dict[str, object]:
    """A description of a cluster for Ray's autoscaler whose nodes are all on this machine."""
    kinds = {
        name: {"resources": dict(resources), "node_config": {}, "min_workers": 0, "max_workers": 1}
        for name, resources in grows_by.items()
    }
    # Of Ray's own name for it.
    head = {"ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0}}
    lists = ("initialization_commands", "setup_commands", "head_setup_commands",
             "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
             "cluster_synced_files", "rsync_exclude", "rsync_filter")  # fmt: skip
    return {
        "cluster_name": "growing",
        "provider": {
            "type": "fake_multinode",
            "gcs_address": gcs_address,
            "disable_node_updaters": True,
            "use_node_id_as_ip": True,  # of several nodes at one address
        },
        "available_node_types": kinds | head,
        "head_node_type": "ray.head.default",
        "max_workers": len(kinds),
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.25,
        "docker": {},
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in lists},
    }


def _is_up(head: Head, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the job server answers and the client server, which comes up on its own, listens;
    False where the process ends before."""
    request = urllib.request.Request(f"{head.environment['RAY_API_SERVER_ADDRESS']}/api/jobs/")
    if token := head.environment.get("RAY_AUTH_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    client_server = ("127.0.0.1", head.ports["ray-client-server-port"])
    deadline = time.monotonic() + HEAD_START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            socket.create_connection(client_server, timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return True
    return False
