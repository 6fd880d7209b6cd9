"""Files at a local path or a URI, through `pyarrow.fs` (`s3://`, `gs://`, …) or `fsspec`.

One module, so that every stage reads and writes anywhere by the same rules: a file appears whole
or not at all, an error names the path, and compressed files are read as what they hold. What the
bytes mean is for others.
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

from bert_core.errors import ConfigError, CorpusError, RaybertError, ResourceError

CHUNK_BYTES = 1 << 20
PIECE_BYTES = 1 << 16
# Suffixes of compressed files, with Arrow's names for what is in them.
COMPRESSIONS = {"gz": "gzip", "bz2": "bz2", "zst": "zstd"}
_WEB = re.compile(r"^https?://", re.IGNORECASE)
# What pyarrow opens by itself; all else is for fsspec.
_OF_PYARROW = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_WITH_BUCKETS = ("s3", "gs", "gcs")
_ABSENT = (404, 410)  # what a web server answers where there is no such file
_URI = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")
_HIDDEN = re.compile(r"/[._]")
_IN_A_URI = "/!$&'()*+,;=:@"  # what a path may hold without an escape (RFC 3986)
# What the wildcards of Python's glob mean: `**/` crosses folders, `*` does not.
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_WILDCARD = re.compile(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]")


def is_uri(path: str) -> bool:
    """Whether `path` names a scheme; `file://` counts as one."""
    return bool(_URI.match(path))


def join(base: str, *parts: str) -> str:
    """`base/part/…`, for a path and for a URI."""
    return "/".join([base.rstrip("/") if base != "/" else "", *parts])


def absolute(path: str) -> str:
    """The path from the root; a URI is as it is."""
    return path if is_uri(path) else os.path.abspath(path)


def _filesystem(path: str) -> tuple[fs.FileSystem, str]:
    if not is_uri(path):
        return fs.LocalFileSystem(), os.path.abspath(path)
    with reading(path):  # some connect already here
        try:
            if path.partition("://")[0].lower() in _OF_PYARROW:
                return fs.FileSystem.from_uri(path)
            return _of_fsspec(path)
        # What pyarrow says of a URI is a ValueError, or this.
        except (ValueError, ImportError, pa.ArrowNotImplementedError) as error:
            raise ConfigError(
                f"{path}: wanted a path, or a URI that pyarrow opens (file, s3, gs, abfs, hdfs) "
                "or fsspec (http, https, hf, ftp, sftp, …), with blanks written as %20, got one "
                f"that neither does ({error}): correct it, install what it needs, or copy the "
                "files to where they can be opened"
            ) from error


def _of_fsspec(path: str) -> tuple[fs.FileSystem, str]:
    import fsspec  # here: few runs need it

    # A cluster may reach the web only by way of the proxy that its environment names.
    options = {"client_kwargs": {"trust_env": True}} if _WEB.match(path) else {}
    filesystem, inner = fsspec.url_to_fs(path, **options)
    return fs.PyFileSystem(_Fsspec(filesystem)), inner if _WEB.match(path) else unquote(inner)


class _Fsspec(fs.FSSpecHandler):
    """Where a file cannot be asked for, this raises; pyarrow and fsspec would say it is absent."""

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        try:
            info = self.fs.info(path)
        except FileNotFoundError as error:
            # NOTE: fsspec says so of a web server that refuses or does not answer, too.
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
    """Around nothing but reads of `path`: what fails elsewhere than on this machine is told here.

    An absent file stays a FileNotFoundError, an error of a local disk an OSError.
    Raises: ResourceError naming `path`.
    """
    try:
        yield
    except (FileNotFoundError, RaybertError):
        raise
    except Exception as error:  # every library below fsspec has its own
        if not is_uri(path) or path.lower().startswith("file:"):
            raise
        raise ResourceError(
            f"{path}: could not be read ({type(error).__name__}: {error}): check the address, the "
            "network and your rights there, and give the same command again"
        ) from error


def local_path(path: str) -> Path | None:
    """The path on this machine, or None where `path` lies elsewhere."""
    filesystem, inner = _filesystem(path)
    return Path(inner) if isinstance(filesystem, fs.LocalFileSystem) else None


def exists(path: str) -> bool:
    """Whether a file or folder is there."""
    filesystem, inner = _filesystem(path)
    with reading(path):
        return filesystem.get_file_info(inner).type != fs.FileType.NotFound


def is_file(path: str) -> bool:
    """Whether a file is there, and no folder."""
    filesystem, inner = _filesystem(path)
    with reading(path):
        return filesystem.get_file_info(inner).type == fs.FileType.File


def is_within(path: str, folder: str) -> bool:
    """Whether `path` is `folder`, or lies in it, by their names and the links on this machine."""
    inner, outer = (_canonical(each) for each in (path, folder))
    return inner == outer or inner.startswith(f"{outer.rstrip('/')}/")


def _canonical(path: str) -> str:
    local = None if is_uri(path) and not path.lower().startswith("file:") else local_path(path)
    return path.rstrip("/") if local is None else os.path.realpath(local)


def size_bytes(path: str) -> int:
    """Size of one file. Raises: FileNotFoundError; ResourceError if a server does not tell it."""
    filesystem, inner = _filesystem(path)
    with reading(path):
        info = filesystem.get_file_info(inner)
    if info.type != fs.FileType.File:
        raise FileNotFoundError(path)
    if info.size is None:
        raise ResourceError(
            f"{path}: wanted a server that tells how long the file is, this one does not: "
            "download the file, and give its path here"
        )
    return info.size


def open_input(path: str) -> pa.NativeFile:
    """Open for reading with seeks, the bytes as they are. Raises: FileNotFoundError, ResourceError.

    Reads of a file that lies elsewhere may fail later, too: `reading` is for them.
    """
    filesystem, inner = _filesystem(path)
    with reading(path):
        return filesystem.open_input_file(inner)


def open_stream(path: str) -> io.BufferedReader:
    """Open for reading in order what the file holds: decompressed if it is .gz, .bz2 or .zst.

    Members, streams or frames in a row are read as one. Where the file was cut off just between
    two of them nothing shows it, nor does damage within a zstd frame without a checksum.
    Raises: FileNotFoundError, ResourceError; when it is read also CorpusError, where compressed
        data is damaged or breaks off.
    """
    return io.BufferedReader(_Contents(path), CHUNK_BYTES)


class _Contents(io.RawIOBase):
    """What a file holds, decompressed."""

    def __init__(self, path: str) -> None:
        self._path, self._read_bytes = path, 0
        self._compression = suffixes(path)[1]
        self._file = open_input(path)
        if self._compression:
            self._file = pa.CompressedInputStream(self._file, COMPRESSIONS[self._compression])

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            with reading(self._path):
                # NOTE: what Arrow read before an error in the same call is lost: small pieces.
                count = self._file.readinto(memoryview(buffer)[:PIECE_BYTES])
        except OSError as error:
            if self._compression:
                raise self._damaged(str(error)) from error
            raise
        if self._compression and count == self._read_bytes == 0:
            raise self._damaged("it is empty")
        self._read_bytes += count
        return count

    def _damaged(self, error: str) -> CorpusError:
        return CorpusError(
            f"{self._path}: wanted whole .{self._compression} data, after {self._read_bytes:,} "
            f"decompressed bytes it cannot be read on ({error}): copy or download it again"
        )

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def suffixes(path: str) -> tuple[str, str | None]:
    """`("jsonl", "gz")` of `a.JSONL.gz`, `("txt", None)` of `a.txt`, `("", None)` of `a`."""
    name = (urlsplit(path).path if _WEB.match(path) else path).rpartition("/")[2].lower()
    stem, _, last = name.rpartition(".")
    if last in COMPRESSIONS:
        return stem.rpartition(".")[2] if "." in stem else "", last
    return last if "." in name else "", None


def read_bytes(path: str) -> bytes:
    """The whole file. Raises: FileNotFoundError, ResourceError."""
    with open_input(path) as file, reading(path):
        return file.read()


def read_contents(path: str) -> bytes:
    """What a whole file holds. Raises: as `open_stream` does."""
    with open_stream(path) as stream:
        return stream.read()


def read_json(path: str) -> Any:
    """One JSON value. Raises: FileNotFoundError, ResourceError, json.JSONDecodeError."""
    return json.loads(read_bytes(path))


@contextmanager
def writing(path: str) -> Iterator[BinaryIO]:
    """A stream to write `path` piece by piece; the file appears when the block ends, whole.

    On this machine the bytes go to a neighbour, are forced to the disk and renamed. Elsewhere they
    go to a temporary file (TMPDIR) and are copied up at the end, since an object store completes
    what is closed. A block that raises leaves what was there before, and nothing else.
    Raises: ResourceError if a disk is full, or the place does not take the file.
    """
    filesystem, inner = _filesystem(path)
    here = isinstance(filesystem, fs.LocalFileSystem)
    whole = inner if here else os.path.join(tempfile.gettempdir(), "raybert")
    part = f"{whole}.{uuid.uuid4().hex[:8]}.part"
    try:
        with _to_disk(path, part):
            os.makedirs(os.path.dirname(part), exist_ok=True)
            raw = _Part(path, part, mode=0o666 if here else 0o600)
        with io.BufferedWriter(raw, CHUNK_BYTES) as file:
            yield file
            file.flush()
            if here:
                with _to_disk(path, part, file.tell()):
                    os.fsync(file.fileno())
        if here:
            with _to_disk(path, part):
                os.replace(part, inner)
        else:
            with pa.memory_map(part) as copy:
                _send(path, copy.read_buffer())
    finally:
        with suppress(OSError):  # it never came to be
            os.unlink(part)


class _Part(io.FileIO):
    """What there is of `path` so far, in the file `part`."""

    def __init__(self, path: str, part: str, *, mode: int) -> None:
        super().__init__(part, "x", opener=lambda name, flags: os.open(name, flags, mode))
        self._path, self._part = path, part

    def write(self, data: Any) -> int:
        with _to_disk(self._path, self._part, self.tell() + memoryview(data).nbytes):
            return super().write(data)


@contextmanager
def _to_disk(path: str, part: str, wanted_bytes: int = 0) -> Iterator[None]:
    """Around a step of writing `path` that makes `part` `wanted_bytes` long.

    Raises: ResourceError.
    """
    try:
        yield
    except OSError as error:
        said, way_out = str(error.strerror or error), "mend that or give another output"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = next(folder for folder in Path(part).parents if folder.exists())
            free_bytes = shutil.disk_usage(folder).free
            free_bytes += os.stat(part).st_blocks * 512 if os.path.exists(part) else 0
            said += f": wanted {wanted_bytes:,} bytes or more, {free_bytes:,} are free in {folder}"
            way_out = "free some space or give another output"
            if local_path(path) is None:
                way_out = "free some space there or name another folder in TMPDIR"
        raise _not_written(path, said, way_out) from error


def _not_written(path: str, said: str, way_out: str) -> ResourceError:
    return ResourceError(
        f"{path}: could not be written: {said}: {way_out}; what is finished stays: the same "
        "command goes on from there"
    )


def _send(path: str, data: bytes | memoryview | pa.Buffer) -> None:
    """Write a file that lies elsewhere. Raises: ResourceError."""
    filesystem, inner = _filesystem(path)
    try:
        # NOTE: left to itself pyarrow compresses what is named .gz once more.
        with filesystem.open_output_stream(inner, compression=None) as stream:
            # NOTE: one call, which nothing in Python interrupts: what is closed is complete.
            stream.write(data)
    except Exception as error:  # every library below fsspec has its own
        way_out = "check the address, the network and your rights there, or give another output"
        raise _not_written(path, f"{type(error).__name__}: {error}", way_out) from error


def write_bytes(path: str, data: bytes | memoryview | pa.Buffer) -> None:
    """Write `path` whole or not at all, as `writing` does. Raises: ResourceError."""
    if local_path(path) is None:
        _send(path, data)  # without a copy on a disk
        return
    with writing(path) as file:
        file.write(data)


def write_json(path: str, value: Any) -> None:
    """Write one JSON value, indented, keys as given."""
    write_bytes(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def remove(path: str) -> None:
    """Remove a file or a whole folder; nothing there is no error."""
    filesystem, inner = _filesystem(path)
    kind = filesystem.get_file_info(inner).type
    if kind == fs.FileType.Directory:
        filesystem.delete_dir(inner)
    elif kind == fs.FileType.File:
        filesystem.delete_file(inner)


def list_names(folder: str) -> list[str]:
    """Names of what lies directly in `folder`, sorted; an absent folder has none."""
    filesystem, inner = _filesystem(folder)
    selector = fs.FileSelector(inner, recursive=False, allow_not_found=True)
    with reading(folder):
        return sorted(Path(info.path).name for info in filesystem.get_file_info(selector))


def find_files(pattern: str) -> list[str]:
    """The files that a path, a folder (searched deep) or a glob names, sorted.

    Files and folders whose name begins with `.` or `_` are passed over, as Spark does, unless the
    pattern spells the name out. Under a URI the files found are URIs too, with escapes. An address
    in the web (http, https) is that of one file, whatever signs are in it.
    Raises: CorpusError if there are none; ResourceError if the place cannot be asked.
    """
    found = sorted(_find(pattern))
    if not found:
        check_bucket(pattern)
        raise CorpusError(
            f"{pattern}: wanted a file, a folder or a glob with at least one file, found none: "
            "check the spelling, or give another path"
        )
    return found


def check_bucket(path: str) -> None:
    """Raises: CorpusError if `path` is in a bucket (`s3://`, `gs://`) that is not there."""
    if path.partition("://")[0].lower() not in _WITH_BUCKETS:
        return
    filesystem, inner = _filesystem(path)
    bucket = inner.partition("/")[0]
    with reading(path):
        kind = filesystem.get_file_info(bucket).type
    if kind == fs.FileType.NotFound:
        raise CorpusError(
            f"{path}: wanted a bucket {bucket!r}, there is none, or these credentials do not show "
            "it: check its name, the credentials and, where it is not Amazon's, AWS_ENDPOINT_URL"
        )


def _find(pattern: str) -> Iterator[str]:
    spelled_out = pattern if _WEB.match(pattern) else re.split(r"[*?\[]", pattern)[0]
    if spelled_out == pattern:
        found = _files_in(pattern)
    elif is_uri(pattern):
        wanted = re.compile(_regex_of(unquote(pattern)))
        every = _files_in(spelled_out.rpartition("/")[0])
        found = (path for path in every if wanted.fullmatch(unquote(path)))
    else:
        every = local_glob.iglob(pattern, recursive=True)
        found = (path for path in every if Path(path).is_file())
    yield from (path for path in found if not _HIDDEN.search(f"/{path}", len(spelled_out)))


def _files_in(folder: str) -> Iterator[str]:
    """The files in `folder` and below; itself where it is a file."""
    filesystem, inner = _filesystem(folder)
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
                yield join(folder, quote(name, safe=_IN_A_URI) if is_uri(folder) else name)


def _regex_of(glob: str) -> str:
    parts, end = [], 0
    for match in _WILDCARD.finditer(glob):
        parts += [re.escape(glob[end : match.start()])]
        parts += [_WILDCARDS.get(match[0]) or match[0].replace("[!", "[^", 1)]
        end = match.end()
    return "".join([*parts, re.escape(glob[end:])])


def sha256_of(path: str) -> str:
    """Hexadecimal sha256 of a file's bytes. Raises: FileNotFoundError, ResourceError."""
    digest = hashlib.sha256()
    with open_input(path) as file, reading(path):
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fetch_folder(source: str, destination: Path) -> Path:
    """Copy every file of `source` into the local folder `destination`, which appears whole."""
    partial = destination.with_name(f"{destination.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        for path in find_files(source):
            name = path[len(source.rstrip("/")) + 1 :]
            target = partial / (unquote(name) if is_uri(source) else name)
            with writing(str(target)) as writer, open_input(path) as reader, reading(path):
                shutil.copyfileobj(reader, writer, CHUNK_BYTES)
        os.replace(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination
