"""Finds and ends the processes of a cluster that this process started, and handles SIGTERM."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from bert_core import storage

# Set while a cluster is starting, so that its processes inherit it and can be found by it.
MARKER = "RAYBERT_CLUSTER"
END_TIMEOUT_S = 5.0
STORAGE_PATIENCE_S = 10.0
"""How long, in all, a process that got SIGTERM retries storage that fails; a job has a minute to
stop."""


def end_processes(marker: str) -> None:
    """End the processes that carry `marker`: first SIGTERM, then SIGKILL.

    Ray ends its own, but leaves HAProxy and anything that user code has started.
    """
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_of(marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        deadline = time.monotonic() + END_TIMEOUT_S
        while processes_of(marker) and time.monotonic() < deadline:
            time.sleep(0.05)


def processes_of(marker: str) -> list[int]:
    """Return the ids of the running processes that have `marker` in their environment (Linux)."""
    variable = f"{MARKER}={marker}\0".encode()
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or is another user's
            if variable in environment.read_bytes():
                pids.append(int(environment.parent.name))
    return pids


def exit_on_sigterm() -> None:
    """Make SIGTERM exit normally, so that `finally` blocks run, unless it already has a handler."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, exit_normally)


def exit_normally(signum: int, frame: object) -> None:
    storage.give_up_after(STORAGE_PATIENCE_S)
    # A normal exit, so that `finally` blocks and `disconnect` run.
    sys.exit(128 + signum)
