"""Keeps notes on versions that killed the process that loaded them, so that no other process
retries them soon.

A version that does not fit into memory kills the process that loads it, and then every process that
is started in its place. So a note is kept on this machine while a version is tried for the first
time: from before it is loaded until it has answered. The process that tries it holds a shared lock
on the note (flock), which the kernel releases however the process ends. A note without a lock was
therefore left by a process that died.
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
    """A first try of a version, in progress until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        """Use `attempt` instead."""
        self._path, self._lock = path, lock

    def close(self) -> None:
        """Remove the note: the version has answered or is no longer tried, and this process
        survived."""
        if self._lock >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


@contextmanager
def attempt(reference: Reference, version: str, *, uri: str) -> Iterator[Attempt]:
    """Keep a note that a version is being tried, while the context loads it and until
    `Attempt.close`.

    If the context raises, the attempt is closed. Processes of one machine load the version in turn,
    so that it kills at most one of them.
    Raises: ResourceError if the version has recently killed another process; OSError.
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
