"""CPU time of the machine's other processes, and of a command with everything it starts."""

import ctypes
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KERNEL = 2  # `kthreadd`, whose threads work for all processes
LOOK_EVERY_S = 0.2
PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Others:
    """How much of the machine's CPU time other processes take, from this object's creation on.

    Others are all processes that this one has not started, plus the time that the host steals from
    a virtual machine. A process that starts and ends in between counts if its parent waits for it
    and is still alive.
    """

    def __init__(self) -> None:
        self._began, self._before, self._stolen_s = time.perf_counter(), processes(), _stolen_s()

    def share(self) -> float:
        """Share of all cores since then: 0.5 is one core of two."""
        after = processes()
        ours, ended_s = descendants(after), self._ended_s(after)
        taken_s = _stolen_s() - self._stolen_s
        for pid, process in after.items():
            if pid not in ours:
                before = self._before.get(pid, Process(process.parent, 0.0, 0.0))
                waited_s = process.children_s - before.children_s - ended_s.get(pid, 0.0)
                taken_s += process.own_s - before.own_s + max(0.0, waited_s)
        return taken_s / (time.perf_counter() - self._began) / (os.cpu_count() or 1)

    def _ended_s(self, after: Mapping[int, "Process"]) -> dict[int, float]:
        """Earlier CPU time of processes that ended, by who waited for them: it is not new."""
        passed_on: dict[int, float] = {}
        for pid, process in self._before.items():
            if pid not in after:
                heir = process.parent
                while heir not in after and heir in self._before:
                    heir = self._before[heir].parent
                passed_on[heir] = passed_on.get(heir, 0.0) + process.cpu_s
        return passed_on


@dataclass(frozen=True)
class Process:
    """A process as it is now."""

    parent: int
    own_s: float
    """CPU time of its own threads."""
    children_s: float
    """CPU time of the children that it has waited for."""

    @property
    def cpu_s(self) -> float:
        """Both."""
        return self.own_s + self.children_s


def processes() -> dict[int, Process]:
    """Every process of the machine except the kernel's, by its id."""
    by_pid = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            # A name may contain anything, even blanks and parentheses.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            parent, (user, system, *of_children) = int(fields[1]), map(int, fields[11:15])
            if int(path.parent.name) != KERNEL and parent != KERNEL:
                by_pid[int(path.parent.name)] = Process(
                    parent, (user + system) / TICKS_PER_S, sum(of_children) / TICKS_PER_S
                )
    return by_pid


def descendants(by_pid: Mapping[int, Process]) -> set[int]:
    """This process and its descendants."""
    ours = {os.getpid()}
    while more := {
        pid for pid, process in by_pid.items() if process.parent in ours and pid not in ours
    }:
        ours |= more
    return ours


def _stolen_s() -> float:
    with open("/proc/stat", encoding="utf-8") as lines:
        return int(next(lines).split()[8]) / TICKS_PER_S


@dataclass(frozen=True)
class Timed:
    """Time that a command took."""

    wall_s: float
    cpu_s: float
    """In user and system mode, of the command and of everything it started, also in the background.

    A process counts as last seen, at most `LOOK_EVERY_S` before it ended: nothing waits for Ray's
    workers, so the system adds their time to no parent's.
    """


def timed(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Timed:
    """Run a command to its end. Raises: CalledProcessError with its output.

    NOTE: this process becomes the parent of all orphans that a child leaves, and waits for them.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    seen: dict[int, float] = {}
    ended = threading.Event()
    looking = threading.Thread(target=_look, args=(seen, ended))
    looking.start()
    try:
        with tempfile.TemporaryFile() as printed:
            began = time.perf_counter()
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT
            )
            process.wait()
            wall_s = time.perf_counter() - began
            with suppress(ChildProcessError):  # none are left
                while True:
                    os.wait()
            if process.returncode:
                printed.seek(0)
                output = printed.read()
                error = subprocess.CalledProcessError(process.returncode, command, output)
                error.add_note(output.decode(errors="replace")[-2000:])
                raise error
    finally:
        ended.set()
        looking.join()
    return Timed(wall_s, sum(seen.values()))


def _look(seen: dict[int, float], ended: threading.Event) -> None:
    """Record the CPU time of this process's descendants, periodically."""
    while not ended.wait(LOOK_EVERY_S):
        running = processes()
        for pid in descendants(running) - {os.getpid()}:
            seen[pid] = max(seen.get(pid, 0.0), running[pid].own_s)
