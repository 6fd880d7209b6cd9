"""Conditional writes: create a file only if it does not exist, replace it only if it is unchanged.

Leases are built on them. On this machine a lock on the folder makes a write conditional; an object
store does it itself.
"""

import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bert_core import files, storage
from bert_core.errors import ConfigError
from bert_core.storage_schemes import SCHEMES


def create(path: str, data: bytes) -> str | None:
    """Write `path` only if it does not exist; return its version tag, or None if it exists.

    Of all processes that try at the same time, on any host, exactly one gets a tag.
    Raises: ResourceError; ConfigError if the storage has no conditional writes (`http://`,
        `hdfs://`, …).
    """
    if storage.opens(path):
        bucket, key = files.bucket_and_key(path)
        return bucket.create(key, data)
    with _locked(path) as (inner, part):
        with files.writing_to_disk(path, part, len(data)), open(part, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with files.writing_to_disk(path, part):
            try:
                os.link(part, inner)
            except FileExistsError:
                return None
    return hashlib.sha256(data).hexdigest()


def read_tagged(path: str) -> tuple[bytes, str]:
    """Return the whole file and its version tag. Raises: FileNotFoundError, ResourceError."""
    if storage.opens(path):
        bucket, key = files.bucket_and_key(path)
        return bucket.read_tagged(key)
    data = files.read_bytes(path)
    return data, hashlib.sha256(data).hexdigest()


def replace_if(path: str, data: bytes, tag: str) -> str | None:
    """Replace `path` only if its version is still `tag`; return the new tag, or None if it is not.

    Raises: as `create` does.
    """
    if storage.opens(path):
        bucket, key = files.bucket_and_key(path)
        return bucket.replace_if(key, data, tag)
    with _locked(path):
        try:
            if read_tagged(path)[1] != tag:
                return None
        except FileNotFoundError:
            return None
        files.write_bytes(path, data)
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _locked(path: str) -> Iterator[tuple[str, str]]:
    """Hold the lock of a local file's folder; yield the file's path and that of a temporary file
    next to it.

    The temporary file is removed at the end.
    """
    local = files.local_path(path)
    if local is None:
        raise ConfigError(
            f"{path}: wanted a local path, or storage with conditional writes "
            f"({', '.join(SCHEMES)}): give another path"
        )
    part = f"{local}.{uuid.uuid4().hex[:8]}.part"
    with files.writing_to_disk(path, part):
        local.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(local.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield str(local), part
    finally:
        os.close(folder)
        with suppress(OSError):
            os.unlink(part)
