"""PostgreSQL, as Debian installs it, on a port of this machine."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import start

START_TIMEOUT_S = 60.0


def program(name: str) -> str:
    """The path of one of its programs; skips the test where it is not installed."""
    path = shutil.which(name) or next(
        map(str, sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None
    )
    if path is None:
        pytest.skip(f"{name} is not installed: apt-get install postgresql")
    return path


class Postgres:
    """A server with an empty database `mlflow`, that can be killed and started again."""

    def __init__(self) -> None:
        from tracking.store.ports import free_ports

        # It refuses to run as root, and the folders of tests are their owner's alone.
        self.user = None if os.geteuid() else next(filter(_exists, ("postgres", "nobody")))
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        if self.user is not None:
            shutil.chown(self.folder, self.user)
        (self.port,) = free_ports(1)
        self.uri = f"postgresql://mlflow@127.0.0.1:{self.port}/mlflow"
        self.process: subprocess.Popen[bytes] | None = None
        subprocess.run(
            [program("initdb"), "--pgdata", f"{self.folder}/data", "--username", "mlflow",
             "--auth", "trust", "--no-sync"],
            user=self.user, cwd=self.folder, check=True, capture_output=True,
        )  # fmt: skip
        self.start()
        self._ask("createdb", "--username", "mlflow", "mlflow").check_returncode()

    def start(self) -> None:
        """Returns once it takes connections; until the last one's processes have ended it cannot
        start."""
        command = [program("postgres"), "-D", f"{self.folder}/data", "-p", str(self.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        deadline = time.monotonic() + START_TIMEOUT_S
        log = self.folder / "log"
        while self._ask("pg_isready").returncode:
            assert time.monotonic() < deadline, log.read_text()
            if self.process is None or self.process.poll() is not None:
                self.process = start(command, log, mode="ab", user=self.user, cwd=self.folder)
            time.sleep(0.2)

    def kill(self) -> None:
        """As a crash does: no connection is closed, nothing is written down."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def remove(self) -> None:
        """End it, with its files."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)  # it closes all connections
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
        place = ["--host", "127.0.0.1", "--port", str(self.port)]
        return subprocess.run([program(name), *place, *arguments], capture_output=True)


def _exists(user: str) -> bool:
    with suppress(KeyError):
        return bool(pwd.getpwnam(user))
    return False
