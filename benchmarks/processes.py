"""CPU time by who takes it: other processes of the machine, and a command with all it starts."""

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

KERNEL = 2  # `kthreadd`: its threads work for everybody
LOOK_EVERY_S = 0.2
PR_SET_CHILD_SUBREAPER = 36
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Others:
    """How much of the machine's CPU time other processes take, from when this is made.

    Others are all that this process has not started, with what the host takes from a virtual
    machine. One that starts and ends meanwhile counts where its parent waits for it and lives on.
    """

    def __init__(self) -> None:
        self._began, self._before, self._stolen_s = time.perf_counter(), processes(), _stolen_s()

    def share(self) -> float:
        """Of all cores since then: 0.5 is one core of two."""
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
        """What those that have ended had taken before, by who waited for them: it is not new."""
        found: dict[int, float] = {}
        for pid, process in self._before.items():
            if pid not in after:
                heir = process.parent
                while heir not in after and heir in self._before:
                    heir = self._before[heir].parent
                found[heir] = found.get(heir, 0.0) + process.cpu_s
        return found


@dataclass(frozen=True)
class Process:
    """A process as it is now."""

    parent: int
    own_s: float
    """CPU time of its own threads."""
    children_s: float
    """That of children which it has waited for."""

    @property
    def cpu_s(self) -> float:
        """Both."""
        return self.own_s + self.children_s


def processes() -> dict[int, Process]:
    """Every process of the machine but the kernel's, by its id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            # A name may hold anything, blanks and brackets too.
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            parent, (user, system, *of_children) = int(fields[1]), map(int, fields[11:15])
            if int(path.parent.name) != KERNEL and parent != KERNEL:
                found[int(path.parent.name)] = Process(
                    parent, (user + system) / TICKS_PER_S, sum(of_children) / TICKS_PER_S
                )
    return found


def descendants(found: Mapping[int, Process]) -> set[int]:
    """This process, and what it has started with all that these have."""
    ours = {os.getpid()}
    while more := {
        pid for pid, process in found.items() if process.parent in ours and pid not in ours
    }:
        ours |= more
    return ours


def _stolen_s() -> float:
    with open("/proc/stat", encoding="utf-8") as lines:
        return int(next(lines).split()[8]) / TICKS_PER_S


@dataclass(frozen=True)
class Timed:
    """What a command took."""

    wall_s: float
    cpu_s: float
    """In user and system mode, of the command and of all that it started, also in the background.

    A process counts as it was last seen, `LOOK_EVERY_S` at most before it ended: Ray's workers are
    waited for by nobody, so that the system adds them to no parent's time.
    """


def timed(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Timed:
    """Run a command to its end. Raises: CalledProcessError with what it printed.

    NOTE: this process becomes the parent of what a child leaves behind, and waits for all of it.
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
            with suppress(ChildProcessError):  # there are no more
                while True:
                    os.wait()
            if process.returncode:
                printed.seek(0)
                said = printed.read()
                error = subprocess.CalledProcessError(process.returncode, command, said)
                error.add_note(said.decode(errors="replace")[-2000:])
                raise error
    finally:
        ended.set()
        looking.join()
    return Timed(wall_s, sum(seen.values()))


def _look(seen: dict[int, float], ended: threading.Event) -> None:
    """Note the CPU time of what this process has started, again and again."""
    while not ended.wait(LOOK_EVERY_S):
        found = processes()
        for pid in descendants(found) - {os.getpid()}:
            seen[pid] = max(seen.get(pid, 0.0), found[pid].own_s)
