"""Live servers: in a process of their own, as users start them, or in this one, by uvicorn.

What a test does not need is imported where it is used: a server of another process takes nothing of
`serve` here.
"""

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests import processes
from tests.waiting import wait_until
from tracking.models.references import Folder
from tracking.store.ports import free_ports

if TYPE_CHECKING:
    from fastapi import FastAPI

    from serve.model.model import Model
    from serve.request.limits import Limits
    from serve.versions.loaded_model import LoadedModel
    from serve.versions.plan import Plan

START_S = 240.0
MARKER = "RAYBERT_TEST_SERVER"
COMMAND = ("pipelines.cli", "serve")


@dataclass
class Server:
    """A server in a process of its own. All processes that it starts inherit its mark."""

    process: subprocess.Popen[bytes]
    port: int
    output: Path
    mark: str
    tls: ssl.SSLContext | None = None
    """What the server's certificate is checked by, if it speaks HTTPS."""

    @classmethod
    def start(cls, arguments: list[str], port: int, folder: Path, **environment: str) -> "Server":
        """Start a module with arguments; see `running_alone` for what most tests need."""
        mark, output = uuid.uuid4().hex, folder / "output.txt"
        ours = ("RAY", "MKL_CBWR")  # which users do not set
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        process = processes.start(
            [sys.executable, "-m", *arguments],
            output,
            env={**clean, MARKER: mark, "RAY_ADDRESS": "local", **environment},
            process_group=0,  # so that a test may send it a signal
        )
        return cls(process, port, output, mark)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def wait_until_ready(self, say: str | None = None) -> None:
        """Until it answers, and has said so where it is waited for what it says."""

        def is_ready() -> bool:
            try:
                response = httpx.get(f"{self.url}/readyz", timeout=20, verify=self.tls or True)
            except httpx.TransportError:
                return False
            return response.status_code == 200 and (say is None or say in self.output.read_text())

        wait_until(
            "the server is ready", is_ready,
            timeout_s=START_S, every_s=0.3, process=self.process, log=self.output,
        )  # fmt: skip

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)

    def pids(self) -> list[int]:
        """The processes that carry the mark."""
        pids = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARKER}={self.mark}".encode() in environment.read_bytes():
                    pids.append(int(environment.parent.name))
        return pids

    def processes(self) -> list[str]:
        """Their names."""
        names = []
        for pid in self.pids():
            with suppress(OSError):
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        return names

    def processes_of(self, title: str) -> list[int]:
        """Those whose title or command line begins so."""
        found = []
        for pid in self.pids():
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if " ".join(process.cmdline()).startswith(title) or process.name() == title:
                    found.append(pid)
        return sorted(found)

    def replicas(self, model: str) -> list[int]:
        """Those that serve a model."""
        return self.processes_of(f"ray::ServeReplica:model-{model}:")


def kill(server: Server) -> None:
    """End all of its processes at once, so that they disturb no other test."""
    while pids := server.pids():
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        server.process.wait()


@contextmanager
def running_alone(
    folder: Path,
    *options: str,
    config: str = "",
    tls: ssl.SSLContext | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`raybert serve` in a process of its own, once it is ready.

    Args:
        folder: for its output, and for the file with `config`, TOML without the port.
        tls: what its certificate is checked by, where it has one.
    """
    (port,) = free_ports(1)
    command = [*COMMAND, "--port", str(port), *options]
    if config:
        (folder / "serve.toml").write_text(config)
        command += ["--config", str(folder / "serve.toml")]
    server = Server.start(command, port, folder, **(environment or {}))
    server.tls = tls
    try:
        server.wait_until_ready(say="logs:")
        yield server
    finally:
        kill(server)


@contextmanager
def running_together(
    bundles: Mapping[str, Any], folder: Path, *options: str, tls: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """One with a model per bundle, all in one process, and a log in JSON."""
    models = ",".join(f"{name}={place}" for name, place in bundles.items())
    options = ("--models", models, "--together", "--num_cpus", "0.5", *options)
    soon = {"RAY_metrics_report_interval_ms": "1000"}
    with running_alone(
        folder, "--log_format", "json", *options, tls=tls, environment=soon
    ) as server:
        yield server


def loaded(name: str, folder: Path, **settings: Any) -> "Model":
    """A model on one thread, with small batches."""
    from serve.model.model import Model

    usual: dict[str, Any] = {
        "device": "cpu",
        "threads": 1,
        "max_batch_tokens": 256,
        "max_wait_ms": 1.0,
    }
    return Model(name, folder, **usual | settings)


@contextmanager
def running(app: "FastAPI") -> Iterator[str]:
    """URL of an app that uvicorn runs on a thread."""
    import uvicorn

    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[str]:
    """URL that one model answers at."""
    from serve.http.app import create_model_app
    from serve.versions.slot import Slot

    slot = Slot(loaded("own", folder, **settings))
    with running(create_model_app(slot, alone=True)) as url:
        yield url


def plan_of(folder: Path, **settings: Any) -> "Plan":
    """The plan that serves the bundle in a folder, as it is now."""
    from bert_core.bundle.format import bundle_digest
    from serve.versions.plan import Plan, Source

    digest = bundle_digest(folder)
    source = Source(reference=Folder(str(folder)), tracking_uri="sqlite://", digest=digest)
    return Plan(name="docs", source=source, **settings)


@contextmanager
def hosted(plan: "Plan", **arguments: Any) -> Iterator[tuple["LoadedModel", str]]:
    """A model that follows its plan, and the URL that it answers at."""
    from serve.http.app import create_model_app
    from serve.versions.loaded_model import LoadedModel

    model = LoadedModel(plan, **arguments)
    with running(create_model_app(model.slot, alone=True)) as url:
        try:
            yield model, url
        finally:
            model.close()


@contextmanager
def fronted(
    models: Mapping[str, Path], limits: "Limits | None" = None, keys: Any = None
) -> Iterator[str]:
    """URL of a front with models in the same process, which ask for keys if given."""
    from serve.http.app import LocalModel, create_front_app
    from serve.versions.slot import Slot

    local = {name: LocalModel(Slot(loaded(name, folder)), keys) for name, folder in models.items()}
    app = create_front_app(local, limits, keys)
    with running(app) as url:
        yield url


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of this machine, by itself and with its private key in one file."""
    key, chain, pem = (folder / name for name in ("key.pem", "chain.pem", "both.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", chain],
        check=True, capture_output=True,
    )  # fmt: skip
    pem.write_text(chain.read_text() + key.read_text())
    return chain, pem


def eventually(
    holds: Callable[[], bool], timeout_s: float = 60.0, *, every_s: float = 0.05
) -> None:
    """Wait until it holds; if it never does, pytest shows the line that waits."""
    __tracebackhide__ = True
    wait_until("this holds", holds, timeout_s=timeout_s, every_s=every_s)
