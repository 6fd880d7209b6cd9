"""Checks whether a folder or bucket can hold what stages write, by writing it once."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from bert_core import conditional, files
from bert_core.cache import FOLDER as CACHE_FOLDER
from bert_core.errors import RaybertError, ResourceError

PROBE = ".probe-"
"""Begins the names of the files that are written here; of no run's output."""
RECORD_BYTES = 1 << 20
"""Size of the record of a run without many points and pictures."""
PARTS_BYTES = 16 << 20
"""More than a store takes in one piece: such a file is uploaded in parts."""


@contextmanager
def marker(place: str) -> Iterator[str]:
    """Yield the path of a small file in `place`, which exists while the block runs.

    Raises: ResourceError with the way out, if it cannot be written.
    """
    path = files.join(place, f"{PROBE}{uuid4().hex[:8]}")
    local = files.local_path(place)
    absent = local is not None and not local.exists()
    _step(place, "write", lambda: files.write_bytes(path, b"probe"))
    try:
        yield path
    finally:
        _step(place, "delete", lambda: files.remove(path))
        if local is not None and absent:
            with suppress(OSError):  # another process has put something there
                local.rmdir()


def check_cache(folder: Path) -> None:
    """Check that the cache folder can be written. It holds downloads, and the records of runs whose
    output is elsewhere.

    Raises: ResourceError with the way out.
    """
    path = folder / f"{PROBE}{uuid4().hex[:8]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(RECORD_BYTES))
    except OSError as error:
        raise ResourceError(
            f"{folder}: wanted a cache that takes {RECORD_BYTES:,} bytes, for the run's record and "
            f"downloads, got {error.strerror or error}: free some space there, or set "
            f"{CACHE_FOLDER} to a folder on another disk of this machine"
        ) from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def check_storage(place: str) -> Iterator[str]:
    """Do in `place` all that stages do, yield each operation that works, and leave nothing behind.

    Raises: ResourceError at the first thing that does not, with the way out.
    """
    with marker(place) as path:
        yield "a file is written"
        _require(place, "read", lambda: files.read_bytes(path) == b"probe")
        _require(place, "list", lambda: path.rpartition("/")[2] in files.list_names(place))
        yield "read and listed"
        check_excludes(place, path)
        yield "written by conditional put, which keeps a second writer out"
    with marker(place) as path:
        data = os.urandom(PARTS_BYTES)
        write_s = _timed(lambda: _step(place, "multipart upload", lambda: _in_parts(path, data)))
        read_s = _timed(
            lambda: _require(place, "read", lambda: files.read_bytes(path) == data),
        )
        mb = PARTS_BYTES / 1e6
        yield f"{mb:.0f} MB in parts: {mb / write_s:,.0f} MB/s written, {mb / read_s:,.0f} read"
    _require(place, "delete", lambda: not files.exists(path))
    yield "deleted"


def check_excludes(place: str, path: str) -> None:
    """Check that `place`, where `path` was written, keeps a second writer out.

    Raises: ResourceError with the way out: two runs would share an output there.
    """
    _require(place, "conditional put", lambda: _excludes(path))


def _excludes(path: str) -> bool:
    """Whether only the first of two writers succeeds."""
    if conditional.create(path, b"second") is not None:  # it exists
        return False
    _, tag = conditional.read_tagged(path)
    replaced = conditional.replace_if(path, b"first", tag)
    return replaced is not None and conditional.replace_if(path, b"second", tag) is None


def _in_parts(path: str, data: bytes) -> None:
    with files.writing(path) as file:
        file.write(data)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-6)


def _require(place: str, what: str, holds: Callable[[], bool]) -> None:
    if not _step(place, what, holds):
        raise ResourceError(
            f"{place}: {what}: wanted what was written before, got something else: this storage "
            "cannot hold a run; give another place"
        )


def _step(place: str, what: str, work: Callable[[], bool | None]) -> bool | None:
    try:
        return work()
    except RaybertError as error:
        reason = str(error).removeprefix(place).lstrip("/:")
        raise ResourceError(f"{place}: {what}: {reason}") from error
    except OSError as error:
        raise ResourceError(
            f"{place}: {what}: {error}: correct its permissions, or give another place"
        ) from error
