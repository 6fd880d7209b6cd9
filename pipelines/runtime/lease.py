"""Ensures that each output has a single writer: who it is, and when another may take over.

While an output is written it has a lease, the file `lease.json`. At a URI the file is created and
replaced conditionally, so that only one of several simultaneous attempts succeeds, and its holder
renews it. A lease that is not renewed for a while can be taken over: its holder is dead, or will
find out that it has lost the lease before it completes the output. The clocks of two hosts are
never compared: a process that wants a lease watches whether the file changes. On this machine, a
lock on the file does all of this; the kernel releases it when its holder ends.
"""

import fcntl
import json
import logging
import os
import pwd
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from bert_core import conditional, files, storage
from bert_core.errors import FormatError, RaybertError, ResourceError
from pipelines.runtime import cluster
from pipelines.runtime.processes import exit_on_sigterm
from pipelines.runtime.progress import say

logger = logging.getLogger(__name__)

NAME = "lease.json"
FORMAT_VERSION = 1
RENEW_EVERY_S = 5.0
EXPIRES_AFTER_S = 30.0
WATCH_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who has an output: the content of `lease.json`."""

    number: int
    """Fencing number: one more every time that the output is taken."""
    token: str
    """Random, of this holder alone; empty in a local folder."""
    host: str
    user: str
    pid: int
    job: str | None
    """Submission id of the Ray job, if it is one."""
    since: str
    """UTC."""
    renewals: int = 0
    expires_after_s: float
    """The lease can be taken over when it has not changed for so long."""
    released: bool = False
    format_version: int = FORMAT_VERSION

    @classmethod
    def me(cls, number: int, token: str = "") -> "Holder":
        """Describe this process as a holder."""
        return cls(
            number=number,
            token=token,
            host=socket.gethostname(),
            user=_user(),
            pid=os.getpid(),
            job=cluster.job_id(),
            since=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
            expires_after_s=EXPIRES_AFTER_S,
        )

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.user} on {self.host} (process {self.pid}{job})"

    def encoded(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        return str(os.getuid())


def _decoded(data: bytes, path: str) -> Holder:
    try:
        fields = json.loads(data)
        version = fields["format_version"]
        holder = Holder(**fields) if version <= FORMAT_VERSION else None
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path}: wanted a lease that raybert wrote, got something else ({error}): remove the "
            "file if nothing writes the output"
        ) from None
    if holder is None:
        raise FormatError(
            f"{path}: wanted format_version {FORMAT_VERSION} or older, got {version}: "
            "update raybert"
        )
    return holder


class Lease:
    """A lease that this process holds."""

    lost: str | None = None
    """Who has it now, if another process took it over."""

    def check(self) -> None:
        """Raise ResourceError if another process has taken over the output.

        If none has, none will within `EXPIRES_AFTER_S` from now.
        """

    def release(self) -> None:
        """Let another process take the output."""


@contextmanager
def held(output: str, *, wait: bool = False) -> Iterator[Lease]:
    """Hold an output while the block runs; interrupt the block if another process takes over.

    From here on, SIGTERM ends the process in good order, so that it releases the output.

    Args:
        wait: wait for a process that holds the output to end.
    Raises: ResourceError if another process holds the output, or takes it over.
    """
    exit_on_sigterm()
    folder = files.local_path(output)
    lease: Lease
    if folder is not None:
        lease = _LocalLease(folder, wait)
    elif storage.opens(output):
        lease = _ObjectLease(files.join(output, NAME), wait)
    else:
        lease = Lease()  # storage without conditional writes
    try:
        try:
            yield lease
        finally:
            lease.release()  # an interrupt sent just before may arrive here
    except BaseException as error:
        if lease.lost is not None and not isinstance(error, RaybertError):
            raise ResourceError(lease.lost) from error
        raise


class _LocalLease(Lease):
    def __init__(self, folder: Path, wait: bool) -> None:
        """Take the lock. Raises: ResourceError if another process has it and `wait` is off."""
        self._path = folder / NAME
        self._file: IO[bytes] | None = None
        announced = False
        while self._file is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = open(self._path, "a+b")  # noqa: SIM115 (open as long as the lease is held)
            except OSError:
                return  # the next write will report the problem
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                announced = _stand_by(str(folder), self._holder(), wait, announced)
                continue
            except OSError:
                pass  # a file system without locks
            if self._path.exists() and os.path.samestat(
                os.fstat(file.fileno()), os.stat(self._path)
            ):
                self._file = file
            else:
                file.close()  # released while it was opened
        self._file.truncate(0)
        self._file.write(Holder.me(1).encoded())
        self._file.flush()

    def _holder(self) -> Holder | None:
        try:
            return _decoded(self._path.read_bytes(), str(self._path))
        except (OSError, FormatError):  # about to be written or removed
            return None

    def release(self) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()


class _ObjectLease(Lease):
    def __init__(self, path: str, wait: bool) -> None:
        """Take the lease. Raises: ResourceError if another process has it and `wait` is off."""
        self._path = path
        self._holder, self._tag = _take(path, wait)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._in_main = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        with self._lock:
            self._renew()

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        if self.lost is None:
            # If storage fails now, the lease expires.
            with suppress(Exception):
                released = replace(self._holder, released=True)
                conditional.replace_if(self._path, released.encoded(), self._tag)

    def _keep(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S):
            try:
                self.check()
            except ResourceError:
                if self.lost is not None:
                    self._interrupt()
                    return
                logger.debug("the lease could not be renewed", exc_info=True)
            except Exception:
                logger.debug("the lease could not be renewed", exc_info=True)

    def _interrupt(self) -> None:
        """Interrupt the work as Ctrl-C does. If the work is in another thread, its next `check`
        ends it."""
        ident = threading.main_thread().ident
        if self._in_main and ident is not None and not self._ended.is_set():
            signal.pthread_kill(ident, signal.SIGINT)

    def _renew(self) -> None:
        if self.lost is None:
            renewed = replace(self._holder, renewals=self._holder.renewals + 1)
            tag = conditional.replace_if(self._path, renewed.encoded(), self._tag)
            if tag is None:
                self._look_again()
            else:
                self._holder, self._tag = renewed, tag
        if self.lost is not None:
            raise ResourceError(self.lost)

    def _look_again(self) -> None:
        """Find out who holds the lease after a renewal failed. It may still be ours: if the answer
        to a write was lost, repeating the write fails."""
        other = None
        try:
            data, tag = conditional.read_tagged(self._path)
            other = _decoded(data, self._path)
        except (FileNotFoundError, FormatError):
            pass
        if other is not None and other.token == self._holder.token:
            self._holder, self._tag = other, tag
            return
        who = "nobody, it was removed" if other is None else f"{other} since {other.since}"
        self.lost = (
            f"{self._path.removesuffix('/' + NAME)}: wanted to go on writing it, it is now another "
            f"run's ({who}), since this one had not renewed its lease for "
            f"{self._holder.expires_after_s:g} s or more: wait for that run, or stop it and run "
            "the same command again; this one writes nothing more"
        )


def _take(path: str, wait: bool) -> tuple[Holder, str]:
    """Take the lease; return the holder that was written, and its tag.

    Raises: ResourceError if another process has it and `wait` is off.
    """
    output, token = path.removesuffix(f"/{NAME}"), uuid.uuid4().hex
    last_tag, unchanged_s, announced = None, 0.0, False
    while True:
        try:
            data, tag = conditional.read_tagged(path)
        except FileNotFoundError:
            mine = Holder.me(1, token)
            new_tag = conditional.create(path, mine.encoded())
        else:
            other = _decoded(data, path)
            if other.token == token:  # the answer to our own write got lost
                return other, tag
            renewed, last_tag = last_tag not in (None, tag), tag
            # Only successful reads count: while storage is unreachable, nobody can renew.
            unchanged_s = 0.0 if renewed else unchanged_s
            mine, new_tag = Holder.me(other.number + 1, token), None
            if other.released or unchanged_s >= other.expires_after_s:
                new_tag = conditional.replace_if(path, mine.encoded(), tag)
            else:
                announced = _stand_by(output, other, wait, announced, lives=renewed)
                unchanged_s += WATCH_EVERY_S
        if new_tag is not None:
            return mine, new_tag


def _stand_by(
    output: str, holder: Holder | None, wait: bool, announced: bool, *, lives: bool = True
) -> bool:
    """Sleep for a while, and say why unless that was already announced.

    Args:
        lives: whether it is certain that the holder has not died.
    Returns: True. Raises: ResourceError if the holder lives and `wait` is off.
    """
    who = "another process" if holder is None else str(holder)
    since = "" if holder is None else f" since {holder.since}"
    if lives and not wait:
        raise ResourceError(
            f"{output}: wanted to write it, {who} has been writing it{since}: stop that run, give "
            "another output, or add --wait to go on when that run has ended"
        )
    if not announced:
        until = "waiting until that run has ended" if wait else "checking whether that run is alive"
        say(f"{output}: {who} has been writing it{since}: {until}")
    time.sleep(WATCH_EVERY_S)
    return True
