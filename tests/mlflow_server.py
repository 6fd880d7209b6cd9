"""MLflow's server, in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from tests.processes import kill_group, start
from tests.waiting import wait_until


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
        from tracking.store.ports import free_ports

        self.folder = folder
        self.store = store or f"sqlite:///{folder}/mlflow.db"
        self.options = list(options)
        self.environment = environment or {}
        (self.port,) = free_ports(1)
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        from tracking.store.server import connect

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
        log = self.folder / "log"
        self.process = start(
            command, log, mode="ab", cwd=self.folder, env=environment, start_new_session=True
        )
        wait_until("MLflow answers", self._answers, timeout_s=120, process=self.process, log=log)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.uri}/health", timeout=5).is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self.process is not None:
            kill_group(self.process)
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
