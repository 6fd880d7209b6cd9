"""Versions whose loading has ended the process that tried, which another process should not repeat.

A version that does not fit into memory takes the process down that loads it, and then every process
that is started in its place. So there is a note on this machine while a version is tried for the
first time: from before it is loaded until it has answered. Whoever tries it holds a shared lock on
the note (flock), which the kernel releases however the process ends: a note without a lock was left
by one that did not get through.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bert_core.errors import ResourceError
from tracking.cache import cache_folder
from tracking.models.references import Reference

AGAIN_S, LONGEST_S = 300.0, 86_400.0
"""How long a version that has ended a process is left alone: at first, and at most; it doubles."""


class Attempt:
    """A version that is being tried, until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        """Use `attempt` instead."""
        self._path, self._lock = path, lock

    def close(self) -> None:
        """It has answered, or it is not tried any more, and this process lives."""
        if self._lock >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


@contextmanager
def attempt(reference: Reference, version: str, *, uri: str) -> Iterator[Attempt]:
    """Inside, the version is loaded; afterwards it is still being tried, unless that raised.

    Processes of one machine load it one after the other, so that it ends one of them at most.
    Raises: ResourceError if it has ended another one lately; OSError.
    """
    path = _path(reference, version, uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    turn = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        trying = _begun(path)
        try:
            yield trying
        except BaseException:
            trying.close()
            raise
    finally:
        os.close(turn)


def _begun(path: Path) -> Attempt:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        note = _read(lock)
        if note.get("is_tried") and _is_nobodys(lock):
            note["ended"] = note.get("ended", 0) + 1
            note["again_at"] = time.time() + min(AGAIN_S * 2 ** (note["ended"] - 1), LONGEST_S)
        wait_s = note.get("again_at", 0.0) - time.time()
        note["is_tried"] = wait_s <= 0
        _write(lock, {**note, "pid": os.getpid()})
        if wait_s > 0:
            raise ResourceError(
                f"loading it has ended {note['ended']} process(es) of this machine, most likely "
                "for want of memory: serve another version, or on a machine or in a container with "
                f"more memory; it is not tried again for {wait_s:.0f} s"
            )
        fcntl.flock(lock, fcntl.LOCK_SH)
    except BaseException:
        os.close(lock)
        raise
    return Attempt(path, lock)


def _is_nobodys(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(lock: int) -> dict[str, Any]:
    try:
        note = json.loads(os.pread(lock, 1 << 16, 0))
    except ValueError:  # new, or cut short
        return {}
    return note if isinstance(note, dict) else {}


def _write(lock: int, note: dict[str, Any]) -> None:
    data = json.dumps(note).encode()
    os.pwrite(lock, data, 0)
    os.ftruncate(lock, len(data))


def _path(reference: Reference, version: str, uri: str) -> Path:
    # A digest, since the URI may hold a password.
    key = "\n".join([uri, str(reference), version])
    return cache_folder() / "tried" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
