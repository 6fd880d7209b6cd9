"""What every test shares: checked types, Ray and MLflow on this machine, the real data sets."""

import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import httpx
import psutil
import pytest
from hypothesis import settings
from jaxtyping import config, install_import_hook

from tests.type_checks import checked

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.hub import Hub

# What is imported to collect the tests stays until the end: the garbage collector would search all
# of it in vain again and again, which takes longer than the imports.
gc.disable()

settings.register_profile("raybert", deadline=None)  # machines are shared
settings.load_profile("raybert")

# Tests compute on small tensors, on machines that do other things too: threads only wait for each
# other there. Before torch is imported, for this process and those that it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As `bert_core.determinism` sets it, for which it would be too late after a test that computes.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# A client of httpx reads all certificates of a file, which takes 50 ms, but of a folder only those
# that it needs.
os.environ.pop("SSL_CERT_FILE", None)
os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every child
# that a test sends it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before the first import of ours: from here on a wrong type or shape is an error, in this process
# only (Ray's workers import the packages unchecked, as in production).
install_import_hook(
    ["bert_core", "pipelines", "serve", "tracking"], f"{checked.__module__}.checked"
)


@pytest.fixture(scope="module")
def unchecked() -> Iterator[None]:
    """No checks of types: where a model is traced, sizes are symbols and no numbers."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator["Hub"]:
    """A hub of this test alone, with an empty cache and no token."""
    from tests.hub import running_hub

    with running_hub(tmp_path / "hf_home") as hub:
        yield hub


S3_REGION = "us-east-1"

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


# Session fixtures that take seconds → the group of the tests that use one, which share a process.
# Two heads in two processes would give their clients' servers the same ports, from 23000: nobody
# joins the mortal one, or a head from tests/serve, through Ray's client.
SHARED = {
    "local_ray": "local_ray",
    "head": "head",
    "open_head": "head",
    "mortal_head": "mortal",
    "together": "together",
    "separate": "separate",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="drills that are cut short by default at their whole size: `make endurance`",
    )


@pytest.fixture
def recovered(
    record_property: Callable[[str, object], None],
) -> Callable[[str, float, float], None]:
    """Takes what failed, when (by the monotonic clock), and within how many seconds all has to go
    on, as it does now. `benchmarks.recovery` collects it."""

    def recovered(what: str, began_s: float, within_s: float) -> None:
        seconds = time.monotonic() - began_s
        line = {"what": what, "seconds": round(seconds, 1), "within_s": within_s}
        record_property("recovered", json.dumps(line))
        assert seconds < within_s, what

    return recovered


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Chromium; tests of pages are skipped where there is none."""
    from tests.pages import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts disks, each with options of `mount`, such as `size=1m`."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"a small disk cannot be mounted here: {result.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether drills are to be as long as it takes."""
    return bool(request.config.getoption("whole"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests go to one process (else those of a file do); give out the long ones first."""
    whole_path_first = sorted(items, key=lambda item: str(item.path), reverse=True)
    on_ray = [item for item in whole_path_first if item.get_closest_marker("ray")]
    items[:] = on_ray + [item for item in items if not item.get_closest_marker("ray")]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def group_of(item: pytest.Item) -> str:
    """The tests that go to one process, one after the other."""
    fixtures = getattr(item, "fixturenames", ())
    group = next((SHARED[name] for name in SHARED if name in fixtures), item.path.stem)
    if group == "head":
        group = f"head-{item.path.relative_to(Path(__file__).parent).parts[0]}"
    return group


@pytest.hookimpl(trylast=True)  # after the test's own fixtures
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what a group shares after its last test: servers with nothing to do took half of two
    cores. Without xdist groups are not in one piece, and it stays to the end."""
    if not hasattr(item.config, "workerinput"):
        return
    if nextitem is None or group_of(nextitem) != group_of(item):
        for name in SHARED:
            for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
                fixture.finish(item._request)  # type: ignore[attr-defined]  # of a function


@pytest.hookimpl(tryfirst=True)  # before xdist, which asks nobody else
def pytest_runtestloop() -> None:
    """Collect garbage from here on: that of the tests."""
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes go by the argument's name: those of a gzip file differ by the second they were made."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One cluster of this test session on this machine, four CPUs whatever the machine has."""
    from pipelines.runtime import cluster

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
        log = self.folder / "start.log"
        # NOTE: `ray start` gives up when its own processes are not up within 30 s, which no setting
        # changes and a busy machine exceeds.
        for _ in range(HEAD_STARTS):
            with log.open("w") as output:
                self.process = subprocess.Popen(
                    command,
                    env=self.environment | {"RAY_AUTH_MODE": self.mode},
                    cwd=self.folder,
                    stdout=output,
                    stderr=output,
                )
            if _is_up(self, self.process):
                return
            self.process.kill()
            self.process.wait()
        pytest.fail(f"ray start did not come up: {log.read_text()}")

    def stop(self) -> None:
        """End it in good order."""
        assert self.process is not None
        of_all = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()  # with --block it ends its own processes
        self.process.wait(timeout=60)
        for process in of_all:  # nodes that its autoscaler has started
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
            [sys.executable, "-m", "pipelines.cli", *arguments],
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
    lasting_server: "Server", s3_endpoint: str, tmp_path_factory: pytest.TempPathFactory
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
    from tracking.ports import free_ports

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


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder that holds `wikitext2`, `sst2`, …, named by RAYBERT_DATA; skips without it."""
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        pytest.skip("RAYBERT_DATA is not set: it names the folder that holds wikitext2, sst2, …")
    if not Path(folder).is_dir():
        pytest.fail(f"RAYBERT_DATA is {folder}, which is not a folder: correct it, or unset it")
    return Path(folder)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of a server on this machine that speaks S3's protocol."""
    from moto.server import ThreadedMotoServer  # here: it takes a second

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def object_store(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of an empty bucket; `s3://` leads to it while the test runs."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", S3_REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    import boto3

    bucket = f"bucket-{uuid4().hex[:8]}"
    boto3.client("s3", region_name=S3_REGION).create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


class Server:
    """An `mlflow server` on a port of this machine that can be stopped and started again."""

    def __init__(
        self,
        folder: Path,
        *,
        store: str = "",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Its store is in `folder` by default; of an option given twice, the last counts."""
        from tracking.ports import free_ports  # after the hook above

        self.folder = folder
        self.store = store or f"sqlite:///{folder}/mlflow.db"
        self.options = list(options)
        self.environment = environment or {}
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        from tracking.server import connect

        if self.store.startswith("sqlite"):
            connect(self.store)  # sooner than the server makes it
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", self.store]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += self.options
        # Its runner of jobs would outlive it, and leave the process group.
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        environment |= self.environment
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        end = time.monotonic() + 120
        while not self._answers():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.uri}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that is not started yet."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same for all tests of a module."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()
