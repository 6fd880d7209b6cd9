"""Servers under test: each in its own process, which is waited for, queried, and ended with
all that it started.

Peers come from packages that cannot share an environment with this project: each has a virtual
environment of its own, made on demand from `benchmarks/peers/<name>.txt` below the folder that
RAYBERT_PEERS names, by default `~/.cache/raybert/peers`.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

PEERS = Path(__file__).with_name("peers")
START_S, END_S = 240.0, 60.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "BENTOML_DO_NOT_TRACK": "True",
    "ANONYMIZED_TELEMETRY": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Nothing is fetched or reported."""


class ServerError(RuntimeError):
    """A server did not start, or did not answer."""


@contextmanager
def running(
    command: Sequence[str | Path],
    ready: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    working: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A server, while it is needed.

    Args:
        ready: URL that gives 200 once it answers.
        folder: where its output goes, `server.log`.
        working: the folder that it starts in, `folder` by default.
    Raises: ServerError with its output if it does not answer in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=working or folder,
            env={**_environment(), **QUIET, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, ready, log)
        yield process
    finally:
        _end(process)


def _environment() -> dict[str, str]:
    """This process's, without a Ray cluster that it may belong to."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") or name == "RAY_TMPDIR"
    }


def _wait_until_ready(process: subprocess.Popen[bytes], ready: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with suppress(httpx.TransportError):
            if httpx.get(ready, timeout=30).status_code == 200:
                return
        time.sleep(0.2)
    output = log.read_text(errors="replace")[-3000:]
    raise ServerError(f"{ready}: wanted an answer within {START_S:.0f} s, got:\n{output}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and what of its group is left then."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def interpreter(name: str, *, with_project: bool = False) -> Path:
    """Python of a peer's virtual environment, which is made first if necessary.

    Args:
        with_project: whether it also sees the packages that this project has, which saves a second
            torch where the peer takes the same versions.
    Raises: CalledProcessError if pip fails.
    """
    requirements = PEERS / f"{name}.txt"
    seen = f"{requirements.read_text()}{sys.version}{with_project}{sys.prefix}"
    digest = hashlib.sha256(seen.encode()).hexdigest()[:12]
    root = Path(os.environ.get("RAYBERT_PEERS") or Path.home() / ".cache" / "raybert" / "peers")
    folder = root / f"{name}-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    print(f"making {folder} from {requirements}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True, clear=True)
    if with_project:
        (place,) = folder.glob("lib/python*/site-packages")
        (place / "project.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]
    subprocess.run(install, check=True, stdout=sys.stderr)
    complete.touch()
    return python


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions of packages in an environment."""
    script = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [python, "-c", script, *packages], check=True, capture_output=True, text=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found
