"""`raybert serve` in a process of its own, as a user would run it."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from bert_core.errors import ResourceError
from pipelines.runtime import cluster

START_TIMEOUT_S, END_TIMEOUT_S = 120.0, 30.0
_SERVING = re.compile(r"^serving .* at (https?://\S+)", re.MULTILINE)
"""What the server prints once it answers."""


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """A server that answers, at `url`, until `stop` or the end of a `with` block."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path
    """File with all that the server prints."""

    @classmethod
    def start(
        cls, arguments: Sequence[str], log: Path, module: str = "pipelines.cli"
    ) -> "ServerProcess":
        """Start a server with its own Ray, and return once it answers.

        Args:
            arguments: those of `raybert serve`.
            log: file to write.
            module: what to run; it gets a pipe as its standard input, which ends with this process.
        Raises: ResourceError with the log if the server ends, or does not answer in time.
        """
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "serve", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=cluster.child_environment(),
            )
        try:
            return cls(process=process, url=_url(process, log), log=log)
        except BaseException:
            _end(process)
            raise

    def stop(self) -> None:
        """Stop the server and its processes; does nothing if it has stopped."""
        _end(self.process)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Return the URL of the server once it says that it answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        printed = log.read_text(encoding="utf-8", errors="replace")
        if (serving := _SERVING.search(printed)) is not None:
            return serving[1]
        if ended:
            raise ResourceError(f"raybert serve: wanted a running server, it exited:\n{printed}")
        time.sleep(0.1)
    raise ResourceError(
        f"raybert serve: wanted a server that answers within {START_TIMEOUT_S:.0f} s, got none; "
        f"its log is {log}"
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)  # does nothing if it has ended
    try:
        process.wait(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
