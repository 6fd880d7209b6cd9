"""Processes under test: started with their output in a file or input from here, and killed."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def start(
    command: Sequence[str], log: Path, *, mode: str = "wb", **options: Any
) -> subprocess.Popen[Any]:
    """Start a command, with all that it prints in `log`; `options` are those of Popen."""
    with log.open(mode) as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, **options)


def start_with_input(
    command: Sequence[str], content: bytes, **options: Any
) -> subprocess.Popen[Any]:
    """Start a command whose standard input has this content."""
    process: subprocess.Popen[Any] = subprocess.Popen(command, stdin=subprocess.PIPE, **options)
    assert process.stdin is not None
    process.stdin.write(content)
    process.stdin.close()
    return process


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and those that they started (Linux)."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    below, newest = set[int](), {pid}
    while newest := {child for child, parent in parents.items() if parent in newest} - below:
        below |= newest
    return sorted(below)


def kill_all(*pids: int) -> None:
    """Kill processes, those that have ended excepted."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process with all that it has started."""
    kill_all(process.pid, *descendants(process.pid))
    process.wait()


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill the process group that a process leads."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
