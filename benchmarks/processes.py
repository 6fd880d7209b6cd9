"""CPU time by who takes it: other processes of the machine, and a command with all it starts."""

import ctypes
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KERNEL = 2  # `kthreadd`: its threads work for everybody
PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Others:
    """How much of the machine's CPU time other processes take, from when this is made.

    Others are all that this process has not started, with what the host takes from a virtual
    machine. One that starts and ends meanwhile counts where its parent waits for it and lives on.
    """

    def __init__(self) -> None:
        self._began, self._before, self._stolen_s = time.perf_counter(), cpu_s(), _stolen_s()

    def share(self) -> float:
        """Of all cores since then: 0.5 is one core of two."""
        taken_s = _stolen_s() - self._stolen_s
        after = cpu_s()
        ours = descendants(after)
        for pid, process in after.items():
            if pid not in ours:
                before = self._before.get(pid)
                taken_s += process.cpu_s - (before.cpu_s if before else 0.0)
        return taken_s / (time.perf_counter() - self._began) / (os.cpu_count() or 1)


@dataclass(frozen=True)
class Process:
    """A process as it is now."""

    parent: int
    cpu_s: float
    """Its own, with that of children which it has waited for."""


def cpu_s() -> dict[int, Process]:
    """Every process of the machine but the kernel's, by its id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            # A name may hold anything, blanks and brackets too.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            parent, ticks = int(fields[1]), sum(map(int, fields[11:15]))
            if int(path.parent.name) != KERNEL and parent != KERNEL:
                found[int(path.parent.name)] = Process(parent, ticks / TICKS_PER_S)
    return found


def descendants(processes: Mapping[int, Process]) -> set[int]:
    """This process, and what it has started with all that these have."""
    found = {os.getpid()}
    while more := {
        pid for pid, process in processes.items() if process.parent in found and pid not in found
    }:
        found |= more
    return found


def _stolen_s() -> float:
    with open("/proc/stat", encoding="utf-8") as lines:
        return int(next(lines).split()[8]) / TICKS_PER_S


@dataclass(frozen=True)
class Timed:
    """What a command took."""

    wall_s: float
    cpu_s: float
    """In user and system mode, of the command and of all that it started, also in the background
    and also what nobody waited for."""


def timed(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Timed:
    """Run a command to its end. Raises: CalledProcessError with what it printed.

    NOTE: this process becomes the parent of what a child leaves behind, and waits for all of it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.perf_counter() - began
    taken_s = usage.ru_utime + usage.ru_stime
    with suppress(ChildProcessError):  # there are no more
        while True:
            _, _, usage = os.wait4(-1, 0)
            taken_s += usage.ru_utime + usage.ru_stime
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, printed)
    return Timed(wall_s, taken_s)
