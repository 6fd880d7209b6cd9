"""A server in a process of its own, as a user starts it."""

import os
import signal
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests import processes
from tests.waiting import wait_until
from tracking.ports import free_ports

START_S = 240.0
MARKER = "RAYBERT_TEST_SERVER"


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


def kill(server: Server) -> None:
    """End all of its processes at once, so that they disturb no other test."""
    while pids := server.pids():
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        server.process.wait()


@contextmanager
def running_together(bundles: Mapping[str, Any], folder: Path, *options: str) -> Iterator[Server]:
    """One with a model per bundle, all in one process, and a log in JSON."""
    (port,) = free_ports(1)
    models = ",".join(f"{name}={place}" for name, place in bundles.items())
    command = ["pipelines.cli", "serve", "--models", models, "--port", str(port)]
    command += ["--together", "--num_cpus", "0.5", "--log_format", "json", *options]
    server = Server.start(command, port, folder, RAY_metrics_report_interval_ms="1000")
    try:
        server.wait_until_ready(say="logs:")
        yield server
    finally:
        kill(server)
