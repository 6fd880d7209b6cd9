"""A folder of downloads that all processes of a machine share, and that never exceeds its limit.

    <folder>/shards/<name>          entries, complete: files or folders
    <folder>/bundles/<name>
    <folder>/<kind>/<name>.part/    an entry that is being fetched

A process that uses an entry holds a shared lock on it (flock). A process that fetches an entry
holds an exclusive lock on its `.part`. The kernel releases both when the process ends, however it
ends: an entry without a lock may be removed, and a part without a lock was left by a process that
was killed. Making room and publishing an entry happen under a lock on the folder itself, which is
held only briefly.
"""

import errno
import fcntl
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from bert_core.errors import ResourceError

FOLDER, LIMIT = "RAYBERT_CACHE", "RAYBERT_CACHE_GB"
"""Environment variables, which `tracking.cache` reads: the folder, its limit in GB (10^9 bytes)."""
SHARDS, BUNDLES = "shards", "bundles"
SHARE_OF_DISK = 0.25
"""The limit by default: this share of the disk that the folder is on."""
PATIENCE_S, POLL_S = 60.0, 0.1
"""How long to wait for entries that other processes use, if the limit leaves no room, and how often
to look."""
_PART, _CONTENT, _RESERVED = ".part", "content", "reserved"


class CacheEntry:
    """A file or folder that stays in the cache until this object is closed or garbage-collected."""

    def __init__(self, path: Path, lock: int) -> None:
        """Use `Cache.find` or `Cache.open` instead."""
        self.path, self.lock = path, lock
        self._release = weakref.finalize(self, os.close, lock)

    def close(self) -> None:
        """Release the entry, so that the cache may remove it."""
        self._release()


class Cache:
    """The entries in a folder. The least recently used ones are removed first; an entry in use
    never is."""

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        """Use `folder`, which is created when it is first needed.

        Args:
            most_bytes: the limit, which also covers entries that are being fetched; None takes
                `SHARE_OF_DISK`.
        """
        self.folder, self._most_bytes = folder, most_bytes

    @property
    def most_bytes(self) -> int:
        if self._most_bytes is not None:
            return self._most_bytes
        above = (self.folder.absolute(), *self.folder.absolute().parents)
        disk = next(folder for folder in above if folder.exists())
        return int(SHARE_OF_DISK * shutil.disk_usage(disk).total)

    def find(self, name: str) -> CacheEntry | None:
        """Return the entry and mark it as recently used; None if it is not in the cache."""
        if not (self.folder / name).exists():
            return None
        with self._locked():
            return self._hold(name)

    def open(self, name: str, size_bytes: int, fetch: Callable[[Path], object]) -> CacheEntry:
        """Return the entry, fetching it first if it is not in the cache. While one process fetches
        it, others wait.

        Args:
            name: `<kind>/<name>`.
            size_bytes: of the whole entry.
            fetch: writes the file or folder to a path that does not exist yet. If it raises, what
                it has written is removed; if the disk was full, it is called once more after
                entries have been removed.
        Raises: ResourceError if there is no room; whatever `fetch` raises.
        """
        return self._fetched(name, size_bytes, fetch, lambda content: name)

    def take_in(
        self,
        kind: str,
        size_bytes: int,
        fetch: Callable[[Path], object],
        name_of: Callable[[Path], str],
    ) -> CacheEntry:
        """Fetch an entry whose name follows from its content. Raises: as `open` does.

        Args:
            kind: folder of the entry: `SHARDS` or `BUNDLES`.
            size_bytes, fetch: as in `open`.
            name_of: returns the name, given the path of the fetched content.
        """
        arriving = f"{kind}/{uuid.uuid4().hex}"
        return self._fetched(arriving, size_bytes, fetch, lambda path: f"{kind}/{name_of(path)}")

    def drop(self, entry: CacheEntry) -> None:
        """Remove an entry that is damaged, unless another process has already replaced it."""
        with self._locked():
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(entry.lock), entry.path.stat()):
                    _remove(entry.path)
            entry.close()

    def _fetched(
        self,
        name: str,
        size_bytes: int,
        fetch: Callable[[Path], object],
        name_of: Callable[[Path], str],
    ) -> CacheEntry:
        full: Exception | None = None
        for spare_bytes in (0, size_bytes):
            part: CacheEntry | _Part | None = None
            try:
                part = self._entry_or_part(name, size_bytes, spare_bytes)
                if isinstance(part, CacheEntry):
                    return part
                fetch(part.content)
                return self._publish(part, name_of(part.content))
            except Exception as error:
                if not is_full(error):
                    raise
                full = error
            finally:
                if isinstance(part, _Part):
                    part.discard()
        raise self._disk_is_full(name, "more", "too little") from full

    def _entry_or_part(self, name: str, size_bytes: int, spare_bytes: int) -> "CacheEntry | _Part":
        """Return the entry, if another process has fetched it, or else a part to fetch it into."""
        give_up_s: float | None = None
        while True:
            with self._locked():
                if (entry := self._hold(name)) is not None:
                    return entry
                self._check_fits(name, size_bytes)
                fetching = _lock_to_wait_for(self._part(name))
                lacking = None if fetching is not None else self._make_room(size_bytes, spare_bytes)
                if fetching is None and lacking is None:
                    return _Part(self._part(name), size_bytes)
            if fetching is not None:
                try:
                    # Returns when the entry is fetched, or the process that fetches it has died.
                    fcntl.flock(fetching, fcntl.LOCK_SH)
                finally:
                    os.close(fetching)
                continue
            if lacking == "disk":
                free_bytes = shutil.disk_usage(self.folder).free
                raise self._disk_is_full(name, f"{size_bytes:,} bytes", f"{free_bytes:,}")
            give_up_s = give_up_s or time.monotonic() + PATIENCE_S
            if time.monotonic() > give_up_s:
                raise ResourceError(
                    f"{self.folder / name}: wanted room for {size_bytes:,} bytes, all of the "
                    f"{self.most_bytes:,} that the cache may take are in use by this and other "
                    f"processes: set {LIMIT} to more GB, or run less at once on this machine"
                )
            time.sleep(POLL_S)

    def _publish(self, part: "_Part", name: str) -> CacheEntry:
        self._check_fits(name, _size_bytes(part.content))
        with self._locked():
            if not (self.folder / name).exists():
                os.rename(part.content, self.folder / name)
            part.free_reserved()
            entry = self._hold(name)
            assert entry is not None
            self._make_room(0)  # in case it is larger than `size_bytes`
            return entry

    def _check_fits(self, name: str, size_bytes: int) -> None:
        if size_bytes > self.most_bytes:
            raise ResourceError(
                f"{self.folder / name}: wanted room for {size_bytes:,} bytes, the cache may take "
                f"{self.most_bytes:,} altogether: set {LIMIT} to at least "
                f"{size_bytes / 1e9:.3g} GB, better to several times that, or {FOLDER} to a folder "
                "on a larger disk"
            )

    def _disk_is_full(self, name: str, needed: str, free: str) -> ResourceError:
        return ResourceError(
            f"{self.folder / name}: wanted {needed} of free space for a download, got {free}, and "
            f"there is nothing left in the cache that could be removed: free some space on that "
            f"disk, or set {FOLDER} to a folder with more"
        )

    def _part(self, name: str) -> Path:
        return self.folder / f"{name}{_PART}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, so that no other process looks for entries, makes room or
        publishes an entry meanwhile."""
        try:
            for kind in (SHARDS, BUNDLES):
                (self.folder / kind).mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ResourceError(
                f"{self.folder}: wanted a folder for downloads that can be written and locked, got "
                f"{error.strerror or error}: set {FOLDER} to a folder on a disk of this machine"
            ) from error
        try:
            yield
        finally:
            os.close(lock)

    def _hold(self, name: str) -> CacheEntry | None:
        path = self.folder / name
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        # Never waits: entries are locked exclusively only while the folder's lock is held.
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(OSError):  # another user's file, or a read-only disk
            # The kernel's own timestamps are coarser.
            os.utime(path, ns=(time.time_ns(), time.time_ns()))
        return CacheEntry(path, lock)

    def _make_room(
        self, wanted_bytes: int, spare_bytes: int = 0
    ) -> Literal["limit", "disk"] | None:
        """Remove parts that no process is fetching and, as far as necessary, entries that no
        process uses.

        Args:
            wanted_bytes: room to make, within the limit and on the disk.
            spare_bytes: how much more of the disk to free, if possible.
        Returns: what still leaves no room, if anything.
        """
        entries, used_bytes, expected_bytes = dict[Path, int](), 0, 0
        for path in self._paths():
            size_bytes = _size_bytes(path)
            if path.name.endswith(_PART):
                if _remove_unused(path):
                    continue
                with suppress(OSError):
                    reserved_bytes = (path / _RESERVED).stat().st_size
                    # The reserved size is a hole in a sparse file, which takes no space itself.
                    written_bytes = size_bytes - reserved_bytes
                    size_bytes = max(written_bytes, reserved_bytes)
                    expected_bytes += size_bytes - written_bytes
            else:
                entries[path] = size_bytes
            used_bytes += size_bytes

        def lacking(more_bytes: int = 0) -> Literal["limit", "disk"] | None:
            if used_bytes + wanted_bytes > self.most_bytes:
                return "limit"
            free_bytes = shutil.disk_usage(self.folder).free - expected_bytes
            return "disk" if wanted_bytes and free_bytes < wanted_bytes + more_bytes else None

        if lacking(-sum(entries.values())) == "disk":
            return "disk"  # even if all entries were removed, so remove none
        for path in sorted(entries, key=_used_at):
            if lacking(spare_bytes) is None:
                break
            if _remove_unused(path):
                used_bytes -= entries[path]
        return lacking()

    def _paths(self) -> list[Path]:
        return [path for kind in (SHARDS, BUNDLES) for path in (self.folder / kind).iterdir()]


class _Part:
    """A folder that reserves room for an entry while it is fetched."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        folder.mkdir()
        self._folder, self._lock = folder, os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            with open(folder / _RESERVED, "wb") as file:
                file.truncate(size_bytes)
        except BaseException:
            self.discard()
            raise

    @property
    def content(self) -> Path:
        """Return the path to write the entry to."""
        return self._folder / _CONTENT

    def free_reserved(self) -> None:
        """Release the reserved room, because the entry itself now takes it."""
        (self._folder / _RESERVED).unlink()

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk caused the error; MLflow says so only in its message."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _lock_to_wait_for(part: Path) -> int | None:
    """Return a descriptor of a part that another process is fetching; None if there is none.

    A part that a killed process left is removed.
    """
    try:
        lock = os.open(part, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if _remove_unused(part):
        os.close(lock)
        return None
    return lock


def _remove_unused(path: Path) -> bool:
    """Remove a file or folder unless a process has locked it."""
    try:
        # NFS wants a file open for writing before it locks it exclusively.
        lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except OSError:  # in use
        return False
    finally:
        os.close(lock)
    return True


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    # Renamed first: a half-removed entry must not look complete.
    doomed = path.with_name(f"{uuid.uuid4().hex}{_PART}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _used_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _size_bytes(path: Path) -> int:
    if not path.is_dir():
        with suppress(FileNotFoundError):
            return path.stat().st_size
        return 0
    size_bytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # it is being fetched
                size_bytes += os.lstat(os.path.join(folder, name)).st_size
    return size_bytes
