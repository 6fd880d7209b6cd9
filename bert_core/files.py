"""Files at a local path or a URI, through `bert_core.storage` (`s3://`, `gs://`, `az://`),
`pyarrow.fs` or `fsspec`.

One module, so that every stage reads and writes anywhere by the same rules: a file appears whole or
not at all, an error names the path, and compressed files are decompressed when read. The meaning of
the bytes is left to others.
"""

import errno
import glob as local_glob
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from bert_core import storage
from bert_core.compression import (
    HEAD_BYTES,
    PIECE_BYTES,
    SUFFIXES,
    compression_of,
    decompressing,
)
from bert_core.containment import check_name
from bert_core.errors import ConfigError, CorpusError, RaybertError, ResourceError
from bert_core.storage_schemes import SCHEMES
from bert_core.wording import closest, shortened

CHUNK_BYTES = 1 << 20
MOST_NAME_BYTES = 255
"""Longest name of a file or folder on Linux (NAME_MAX)."""
_WEB = re.compile(r"^https?://", re.IGNORECASE)
# Schemes that pyarrow opens itself; fsspec opens all others but those of object stores.
_OF_PYARROW = ("file", "hdfs", "viewfs")
_ABSENT = (404, 410)  # HTTP statuses of a missing file
_URI = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_SECRET = re.compile(r"//[^/@:]*:[^/@]*@")
_HIDDEN = re.compile(r"/[._]")
# What the wildcards of Python's glob mean: `**/` crosses folders, `*` does not.
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_WILDCARD = re.compile(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]")


def is_uri(path: str) -> bool:
    """Whether `path` begins with a scheme, such as `s3://` or `file://`."""
    return bool(_URI.match(path))


def join(base: str, *parts: str) -> str:
    """Return `base/part/…`, for a path and for a URI."""
    return "/".join([base.rstrip("/") if base != "/" else "", *parts])


def absolute(path: str) -> str:
    """Return the absolute path; a URI is returned unchanged."""
    return path if is_uri(path) else os.path.abspath(path)


def filesystem_of(path: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of `path`, and the path in it; used directly by Ray, which does its own
    reading and writing."""
    if not is_uri(path):
        _check_is_path(path)
        return fs.LocalFileSystem(), os.path.abspath(path)
    with reading(path), _openable(path):  # some filesystems connect to their server here
        if storage.opens(path):
            return storage.filesystem(path)
        if path.partition("://")[0].lower() in _OF_PYARROW:
            return fs.FileSystem.from_uri(path)
        return _of_fsspec(path)


def _check_is_path(path: str) -> None:
    """Check that a file of this machine may have this path. Raises: ConfigError for a text that was
    given in place of a path."""
    longest = max(len(name.encode(errors="replace")) for name in path.split("/"))
    if longest > MOST_NAME_BYTES:
        raise ConfigError(
            f"{shortened(path)}: wanted a path, whose names have at most {MOST_NAME_BYTES} bytes, "
            f"got one of {longest:,}: if it is a text, write it to a file, and give its path"
        )
    if "\0" in path:
        raise ConfigError(f"{path!r}: wanted a path, got NUL characters in it: remove them")


@contextmanager
def _openable(path: str) -> Iterator[None]:
    """Wrap the opening of a URI. Raises: ConfigError if nothing can open it."""
    try:
        yield
    # pyarrow rejects a URI with a ValueError, or with ArrowNotImplementedError.
    except (ValueError, ImportError, pa.ArrowNotImplementedError) as error:
        if isinstance(error, RaybertError):
            raise
        shown = _SECRET.sub("//…@", path)
        raise ConfigError(
            f"{shown}: wanted a path, or a URI that obstore opens "
            f"({', '.join(SCHEMES)}), pyarrow (file, hdfs) or fsspec (http, https, hf, ftp, sftp, "
            f"…), with spaces written as %20, got one that none can open ({error}): correct it, "
            "install the package that it needs, or copy the files to a place that can be opened"
        ) from error


def bucket_and_key(path: str) -> tuple[storage.Bucket, str]:
    """Return the bucket and the key of a file. Raises: ConfigError."""
    with _openable(path):
        bucket, key = storage.open_bucket(path)
    if not key:
        raise ConfigError(f"{path}: wanted a file in a bucket, got the bucket: give a path in it")
    return bucket, key


def _of_fsspec(path: str) -> tuple[fs.FileSystem, str]:
    import fsspec  # imported here: few runs need it

    # A cluster may reach the web only through the proxy that its environment names.
    options = {"client_kwargs": {"trust_env": True}} if _WEB.match(path) else {}
    filesystem, inner = fsspec.url_to_fs(path, **options)
    return fs.PyFileSystem(_Fsspec(filesystem)), inner if _WEB.match(path) else unquote(inner)


class _Fsspec(fs.FSSpecHandler):
    """An fsspec handler that raises if a file's status cannot be read; pyarrow and fsspec would
    report the file as absent."""

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        try:
            info = self.fs.info(path)
        except FileNotFoundError as error:
            # NOTE: fsspec also raises this if a web server refuses or does not answer.
            cause = error.__cause__
            if _WEB.match(path) and cause and getattr(cause, "status", None) not in _ABSENT:
                raise cause from None
            return fs.FileInfo(path, fs.FileType.NotFound)
        if info["type"] == "directory":
            return fs.FileInfo(path, fs.FileType.Directory)
        return fs.FileInfo(path, fs.FileType.File, size=info["size"])

    def open_input_file(self, path: str) -> pa.PythonFile:
        if self._info(path).type != fs.FileType.File:
            raise FileNotFoundError(path)
        return pa.PythonFile(self.fs.open(path, mode="rb"), mode="r")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Wrap reads of `path`, and nothing else: failures of remote storage become ResourceError.

    A missing file stays a FileNotFoundError, an error of a local disk an OSError.
    Raises: ResourceError naming `path`.
    """
    with _reached(path, "read"):
        yield


@contextmanager
def _reached(path: str, done: str) -> Iterator[None]:
    """Do as `reading` does, for any operation on `path`.

    Args:
        done: the operation, as a participle for the message, such as `removed`.
    """
    try:
        yield
    except (FileNotFoundError, RaybertError):
        raise
    except Exception as error:  # every library below fsspec has its own classes
        if not is_uri(path) or path.lower().startswith("file:"):
            raise
        raise ResourceError(
            f"{path}: could not be {done} ({type(error).__name__}: {error}): check the address, "
            "the network and your permissions, then run the same command again"
        ) from error


def local_path(path: str) -> Path | None:
    """Return the path on this machine, or None if `path` is remote."""
    if storage.opens(path):
        return None
    filesystem, inner = filesystem_of(path)
    return Path(inner) if isinstance(filesystem, fs.LocalFileSystem) else None


def exists(path: str) -> bool:
    """Whether a file or folder exists."""
    filesystem, inner = filesystem_of(path)
    with reading(path):
        return filesystem.get_file_info(inner).type != fs.FileType.NotFound


def is_file(path: str) -> bool:
    """Whether `path` is an existing file, not a folder."""
    filesystem, inner = filesystem_of(path)
    with reading(path):
        return filesystem.get_file_info(inner).type == fs.FileType.File


def is_within(path: str, folder: str) -> bool:
    """Whether `path` is `folder` or inside it, by their names and local symbolic links."""
    inner, outer = (_canonical(each) for each in (path, folder))
    return inner == outer or inner.startswith(f"{outer.rstrip('/')}/")


def _canonical(path: str) -> str:
    local = None if is_uri(path) and not path.lower().startswith("file:") else local_path(path)
    return path.rstrip("/") if local is None else os.path.realpath(local)


def size_bytes(path: str) -> int:
    """Return the size of one file. Raises: FileNotFoundError; ResourceError if a server does not
    report it."""
    filesystem, inner = filesystem_of(path)
    with reading(path):
        info = filesystem.get_file_info(inner)
    if info.type != fs.FileType.File:
        raise FileNotFoundError(path)
    if info.size is None:
        raise ResourceError(
            f"{path}: wanted a server that reports the size of the file, this one does not: "
            "download the file, and give its local path"
        )
    return info.size


def open_input(path: str) -> pa.NativeFile:
    """Open a file for reading raw bytes, with seeking. Raises: FileNotFoundError, ResourceError.

    Later reads of a remote file may fail too: wrap them in `reading`.
    """
    filesystem, inner = filesystem_of(path)
    with reading(path):
        return filesystem.open_input_file(inner)


def open_stream(path: str) -> io.BufferedReader:
    """Open a file's contents for sequential reading: decompressed if its first bytes are those of
    gzip, bz2, zstd or xz, whatever its name is.

    Consecutive members, streams or frames are read as one. A file that was cut off exactly between
    two of them goes unnoticed, as does damage within a zstd frame without a checksum.
    Raises: FileNotFoundError, ResourceError; later, while reading, also CorpusError, if compressed
        data is damaged or truncated, or the name says that the data is compressed and it is not.
    """
    return io.BufferedReader(_Contents(path), CHUNK_BYTES)


class _Contents(io.RawIOBase):
    """A file's contents, decompressed."""

    def __init__(self, path: str) -> None:
        self._path, self._read_bytes = path, 0
        self._file = self._stored = open_input(path)
        with reading(path):
            head = self._stored.read(HEAD_BYTES)
            self._stored.seek(0)
        self.compression = compression_of(head)
        self._odd: str | None = None
        if not self.compression and (said := suffixes(path)[1]):
            short = "Truncated compressed stream" if head else "it is empty"
            self._odd = short if len(head) < HEAD_BYTES else f"it does not begin as .{said} does"
        if self.compression:
            self._file = decompressing(self._stored, self.compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._odd:  # even empty data takes some bytes once compressed
            raise self._damaged(self._odd)
        try:
            with reading(self._path):
                # NOTE: an error loses what Arrow read before it in the same call, so read little.
                count = self._file.readinto(memoryview(buffer)[:PIECE_BYTES])
        except RaybertError:
            raise
        except Exception as error:  # every compression library has its own exceptions
            if self.compression:
                raise self._damaged(str(error)) from error
            raise
        self._read_bytes += count
        return count

    def _damaged(self, error: str) -> CorpusError:
        kind = self.compression or suffixes(self._path)[1]
        way_out = "copy or download it again"
        if self._odd:
            way_out += f", or, if it is not compressed, remove .{kind} from its name"
        return CorpusError(
            f"{self._path}: wanted whole .{kind} data, it cannot be read beyond "
            f"{self._read_bytes:,} decompressed bytes ({error}): {way_out}"
        )

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def look_into(path: str, count: int) -> tuple[bytes, str | None]:
    """Return the first `count` bytes of a file's contents, decompressed, and its compression.

    Raises: as `open_stream` does, also while reading.
    """
    raw = _Contents(path)
    with io.BufferedReader(raw, count) as stream:
        return stream.read(count), raw.compression


def suffixes(path: str) -> tuple[str, str | None]:
    """Return the format and the compression that a file's name ends in.

    `("jsonl", "gz")` for `a.JSONL.gz`, `("txt", None)` for `a.txt`, `("", None)` for `a`. Only the
    name is used; `look_into` checks the contents.
    """
    name = (urlsplit(path).path if _WEB.match(path) else path).rpartition("/")[2].lower()
    stem, _, last = name.rpartition(".")
    if last in SUFFIXES:
        return stem.rpartition(".")[2] if "." in stem else "", SUFFIXES[last]
    return last if "." in name else "", None


def read_bytes(path: str) -> bytes:
    """Return the whole file. Raises: FileNotFoundError, ResourceError."""
    with open_input(path) as file, reading(path):
        return file.read()


def read_contents(path: str) -> bytes:
    """Return the whole file, decompressed. Raises: as `open_stream` does."""
    with open_stream(path) as stream:
        return stream.read()


def read_json(path: str) -> Any:
    """Read one JSON value. Raises: FileNotFoundError, ResourceError, json.JSONDecodeError."""
    return json.loads(read_bytes(path))


@contextmanager
def writing(path: str) -> Iterator[BinaryIO]:
    """Yield a stream to write `path` piece by piece; the file appears, complete, when the block
    ends.

    On this machine the bytes go to a temporary file next to it, are flushed to disk and renamed.
    For a remote path they go to a local temporary file (TMPDIR), which is uploaded at the end,
    since an object store completes every upload that is closed. A block that raises leaves
    everything as it was before.
    Raises: ResourceError if a disk is full, or the destination rejects the file.
    """
    filesystem, inner = filesystem_of(path)
    is_local = isinstance(filesystem, fs.LocalFileSystem)
    whole = inner if is_local else os.path.join(tempfile.gettempdir(), "raybert")
    part = f"{whole}.{uuid.uuid4().hex[:8]}.part"
    try:
        with writing_to_disk(path, part):
            os.makedirs(os.path.dirname(part), exist_ok=True)
            raw = _Part(path, part, mode=0o666 if is_local else 0o600)
        with io.BufferedWriter(raw, CHUNK_BYTES) as file:
            yield file
            file.flush()
            if is_local:
                with writing_to_disk(path, part, file.tell()):
                    os.fsync(file.fileno())
        if is_local:
            with writing_to_disk(path, part):
                os.replace(part, inner)
        else:
            with pa.memory_map(part) as copy:
                _send(path, copy.read_buffer())
    finally:
        with suppress(OSError):  # renamed, or never created
            os.unlink(part)


class _Part(io.FileIO):
    """The temporary file `part`, which holds the bytes of `path` written so far."""

    def __init__(self, path: str, part: str, *, mode: int) -> None:
        super().__init__(part, "x", opener=lambda name, flags: os.open(name, flags, mode))
        self._path, self._part = path, part

    def write(self, data: Any) -> int:
        with writing_to_disk(self._path, self._part, self.tell() + memoryview(data).nbytes):
            return super().write(data)


@contextmanager
def writing_to_disk(path: str, part: str, wanted_bytes: int = 0) -> Iterator[None]:
    """Wrap a step of writing `path`, after which the temporary file `part` is `wanted_bytes` long.

    Raises: ResourceError.
    """
    try:
        yield
    except OSError as error:
        reason, way_out = str(error.strerror or error), "fix that, or give another output"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = next(folder for folder in Path(part).parents if folder.exists())
            free_bytes = shutil.disk_usage(folder).free
            free_bytes += os.stat(part).st_blocks * 512 if os.path.exists(part) else 0
            reason += (
                f": wanted {wanted_bytes:,} bytes or more, {free_bytes:,} are free in {folder}"
            )
            way_out = "free some space or give another output"
            if local_path(path) is None:
                way_out = "free some space there or set TMPDIR to another folder"
        raise _not_written(path, reason, way_out) from error


def _not_written(path: str, reason: str, way_out: str) -> ResourceError:
    return ResourceError(
        f"{path}: could not be written: {reason}: {way_out}; finished work is kept: the same "
        "command continues from there"
    )


def _send(path: str, data: bytes | memoryview | pa.Buffer) -> None:
    """Write a remote file. Raises: ResourceError."""
    if storage.opens(path):
        bucket, key = bucket_and_key(path)
        bucket.write(key, data)
        return
    filesystem, inner = filesystem_of(path)
    try:
        # NOTE: by default pyarrow would compress a file named .gz a second time.
        with filesystem.open_output_stream(inner, compression=None) as stream:
            # NOTE: one call, which nothing in Python can interrupt: what gets closed is complete.
            stream.write(data)
    except Exception as error:  # every library below fsspec has its own classes
        way_out = "check the address, the network and your permissions, or give another output"
        raise _not_written(path, f"{type(error).__name__}: {error}", way_out) from error


def write_bytes(path: str, data: bytes | memoryview | pa.Buffer) -> None:
    """Write `path` completely or not at all, as `writing` does. Raises: ResourceError."""
    if local_path(path) is None:
        _send(path, data)  # without a temporary file
        return
    with writing(path) as file:
        file.write(data)


def write_json(path: str, value: Any) -> None:
    """Write one JSON value, indented, keys in the given order."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def remove(path: str) -> None:
    """Remove a file or a whole folder; a missing one is no error.

    Raises: ResourceError naming `path` if it is remote and cannot be reached or removed.
    """
    filesystem, inner = filesystem_of(path)
    with _reached(path, "removed"):
        kind = filesystem.get_file_info(inner).type
        if kind == fs.FileType.Directory:
            filesystem.delete_dir(inner)
        elif kind == fs.FileType.File:
            filesystem.delete_file(inner)


def abort_uploads(folder: str) -> None:
    """Abort unfinished uploads to a folder that killed processes left behind, as far as possible.

    Only for the single writer of the folder.
    """
    if storage.opens(folder):
        bucket, key = storage.open_bucket(folder)
        bucket.abort_uploads(key)


def list_names(folder: str) -> list[str]:
    """Return the names of the entries directly in `folder`, sorted; empty if the folder does not
    exist."""
    filesystem, inner = filesystem_of(folder)
    selector = fs.FileSelector(inner, recursive=False, allow_not_found=True)
    with reading(folder):
        return sorted(Path(info.path).name for info in filesystem.get_file_info(selector))


def sizes_in(folder: str) -> dict[str, int]:
    """Return the size in bytes of every file in `folder`, recursively, by its path inside it."""
    filesystem, inner = filesystem_of(folder)
    selector = fs.FileSelector(inner, recursive=True, allow_not_found=True)
    with reading(folder):
        entries = filesystem.get_file_info(selector)
    start = len(inner.rstrip("/")) + 1
    return {entry.path[start:]: entry.size for entry in entries if entry.type == fs.FileType.File}


def find_files(pattern: str) -> list[str]:
    """Return the files that a path, a folder (searched recursively) or a glob names, sorted.

    Files and folders whose name begins with `.` or `_` are skipped, as in Spark, unless the pattern
    spells the name out. Under a URI the results are URIs too, with escapes. A web address (http,
    https) always names a single file, whatever characters it contains, and a local path that exists
    is taken literally, not as a glob.
    Raises: CorpusError if there are none; ResourceError if the storage cannot be queried.
    """
    paths, _ = find_all(pattern)
    if not paths:
        raise CorpusError(
            f"{pattern}: wanted a file, a folder or a glob with at least one file, found none"
            f"{similar(pattern)}: check the spelling, or give another path"
        )
    return paths


def find_all(pattern: str) -> tuple[list[str], list[str]]:
    """Return the files that `find_files` finds, possibly none, and those that it skips, both
    sorted.

    Raises: CorpusError for a name that is not UTF-8; ResourceError.
    """
    found: tuple[list[str], list[str]] = ([], [])
    try:
        for path, is_hidden in _find(pattern):
            path.encode()
            found[is_hidden].append(path)
    except (UnicodeDecodeError, UnicodeEncodeError) as error:  # by pyarrow, or by Python's glob
        name = error.object if isinstance(error.object, bytes) else os.fsencode(error.object)
        raise CorpusError(
            f"{pattern}: wanted names of files in UTF-8, got {name!r}: rename the file"
        ) from error
    return sorted(found[False]), sorted(found[True])


def similar(path: str) -> str:
    """Return ` (did you mean …?)` with an existing path like a missing local path; empty if there
    is none."""
    missing = Path(path)
    if is_uri(path) or missing.exists():
        return ""
    while not missing.parent.exists():
        missing = missing.parent
    with suppress(OSError):
        if close := closest(missing.name, os.listdir(missing.parent)):
            return f" (did you mean {missing.parent / close}?)"
    return ""


def _find(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield every file, and whether it is hidden by its name or that of a folder."""
    is_literal = _WEB.match(pattern) or (not is_uri(pattern) and os.path.exists(pattern))
    spelled_out = pattern if is_literal else re.split(r"[*?\[]", pattern)[0]
    if spelled_out == pattern:
        paths = _files_in(pattern)
    elif is_uri(pattern):
        matching = re.compile(_regex_of(unquote(pattern)))
        every = _files_in(spelled_out.rpartition("/")[0])
        paths = (path for path in every if matching.fullmatch(unquote(path)))
    else:
        every = local_glob.iglob(pattern, recursive=True)
        paths = (path for path in every if Path(path).is_file())
    for path in paths:
        yield path, _HIDDEN.search(f"/{path}", len(spelled_out)) is not None


def _files_in(folder: str) -> Iterator[str]:
    """Yield the files in `folder`, recursively; `folder` itself if it is a file."""
    filesystem, inner = filesystem_of(folder)
    with reading(folder):
        kind = filesystem.get_file_info(inner).type
    if kind == fs.FileType.File:
        yield folder
    elif kind == fs.FileType.Directory:
        with reading(folder):
            entries = filesystem.get_file_info(fs.FileSelector(inner, recursive=True))
        for entry in entries:
            if entry.type == fs.FileType.File:
                name = entry.path[len(inner.rstrip("/")) + 1 :]
                yield join(folder, quote(name, safe=storage.IN_A_URI) if is_uri(folder) else name)


def _regex_of(glob: str) -> str:
    parts, end = [], 0
    for match in _WILDCARD.finditer(glob):
        parts += [re.escape(glob[end : match.start()])]
        part = _WILDCARDS.get(match[0]) or match[0].replace("[!", "[^", 1)
        try:
            re.compile(part)
        except re.error as error:
            raise CorpusError(
                f"{glob}: wanted a glob, got {match[0]} in it, which is no set of characters "
                f"({error.msg}): correct it"
            ) from error
        parts.append(part)
        end = match.end()
    return "".join([*parts, re.escape(glob[end:])])


def sha256_of(path: str) -> str:
    """Return the hexadecimal sha256 of a file's bytes. Raises: FileNotFoundError, ResourceError."""
    digest = hashlib.sha256()
    with open_input(path) as file, reading(path):
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fetch_folder(source: str, destination: Path) -> Path:
    """Copy every file of `source` into the local folder `destination`, which appears complete."""
    partial = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        for path in find_files(source):
            name = path[len(source.rstrip("/")) + 1 :]
            target = partial / check_name(unquote(name) if is_uri(source) else name, source)
            with writing(str(target)) as writer, open_input(path) as reader, reading(path):
                shutil.copyfileobj(reader, writer, CHUNK_BYTES)
        os.replace(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination
