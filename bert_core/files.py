"""Files at a local path or a URI (`s3://`, `gs://`, …), through `pyarrow.fs`.

One module, so that every stage reads and writes anywhere by the same rules: a file appears whole
or not at all, and an error names the path. What the files hold is for others.
"""

import glob as local_glob
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
from pyarrow import fs

from bert_core.errors import ConfigError, CorpusError

CHUNK_BYTES = 1 << 20
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
    try:
        return fs.FileSystem.from_uri(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"{path}: wanted a path, or a URI that pyarrow opens (file, s3, gs, abfs, hdfs) with "
            f"blanks written as %20, got one that it does not ({error}): correct it"
        ) from error


def local_path(path: str) -> Path | None:
    """The path on this machine, or None where `path` lies elsewhere."""
    filesystem, inner = _filesystem(path)
    return Path(inner) if isinstance(filesystem, fs.LocalFileSystem) else None


def exists(path: str) -> bool:
    """Whether a file or folder is there."""
    filesystem, inner = _filesystem(path)
    return filesystem.get_file_info(inner).type != fs.FileType.NotFound


def size_bytes(path: str) -> int:
    """Size of one file. Raises: FileNotFoundError."""
    filesystem, inner = _filesystem(path)
    info = filesystem.get_file_info(inner)
    if info.type != fs.FileType.File:
        raise FileNotFoundError(path)
    return info.size


def open_input(path: str) -> pa.NativeFile:
    """Open for reading with seeks. Raises: FileNotFoundError."""
    filesystem, inner = _filesystem(path)
    return filesystem.open_input_file(inner)


def read_bytes(path: str) -> bytes:
    """The whole file. Raises: FileNotFoundError."""
    with open_input(path) as file:
        return file.read()


def read_json(path: str) -> Any:
    """One JSON value. Raises: FileNotFoundError, json.JSONDecodeError."""
    return json.loads(read_bytes(path))


def write_bytes(path: str, data: bytes | memoryview | pa.Buffer) -> None:
    """Write `path` whole or not at all.

    On a local disk the bytes go to a neighbour, are forced to the disk and renamed; object stores
    make an object visible only when its upload is complete.
    """
    filesystem, inner = _filesystem(path)
    if not isinstance(filesystem, fs.LocalFileSystem):
        with filesystem.open_output_stream(inner) as stream:
            stream.write(data)
        return
    Path(inner).parent.mkdir(parents=True, exist_ok=True)
    neighbour = f"{inner}.{uuid.uuid4().hex[:8]}.part"
    try:
        with open(neighbour, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(neighbour, inner)
    except BaseException:
        Path(neighbour).unlink(missing_ok=True)
        raise


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
    return sorted(Path(info.path).name for info in filesystem.get_file_info(selector))


def find_files(pattern: str) -> list[str]:
    """The files that a path, a folder (searched deep) or a glob names, sorted.

    Files and folders whose name begins with `.` or `_` are passed over, as Spark does, unless the
    pattern spells the name out. Under a URI the files found are URIs too, with escapes.
    Raises: CorpusError if there are none.
    """
    found = sorted(_find(pattern))
    if not found:
        raise CorpusError(
            f"{pattern}: wanted a file, a folder or a glob with at least one file, found none: "
            "check the spelling, or give another path"
        )
    return found


def _find(pattern: str) -> Iterator[str]:
    spelled_out = re.split(r"[*?\[]", pattern)[0]
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
    kind = filesystem.get_file_info(inner).type
    if kind == fs.FileType.File:
        yield folder
    elif kind == fs.FileType.Directory:
        for entry in filesystem.get_file_info(fs.FileSelector(inner, recursive=True)):
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
    """Hexadecimal sha256 of a file's bytes. Raises: FileNotFoundError."""
    digest = hashlib.sha256()
    with open_input(path) as file:
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
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_input(path) as reader, open(target, "wb") as writer:
                shutil.copyfileobj(reader, writer, CHUNK_BYTES)
        os.replace(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination
