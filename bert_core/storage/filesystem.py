"""A bucket as a pyarrow filesystem, so that pyarrow's readers can open its objects."""

import io
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
from pyarrow import fs

from bert_core.storage.bucket import Bucket, open_bucket
from bert_core.storage.stores import PIECE_BYTES

FIRST_BYTES = 1 << 20


def filesystem(path: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a bucket, and the path of a URI in it, which begins with the bucket.

    Raises: ConfigError; ValueError if it is not a URI of a bucket.
    """
    bucket, key = open_bucket(path)
    inner = f"{bucket.name}/{key}" if key else bucket.name
    return fs.PyFileSystem(_Handler(bucket)), inner


class _Handler(fs.FileSystemHandler):
    """Makes a bucket look like a filesystem. Folders are parts of keys: none is created, and a
    folder without objects does not exist."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._name = bucket, bucket.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._bucket.path(""),)  # with the settings of that process

    def _key(self, path: str) -> str:
        return path.strip("/").partition("/")[2]  # the part after the bucket

    def get_type_name(self) -> str:
        return "object-store"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Handler) and self._bucket is other._bucket

    def __hash__(self) -> int:
        return hash(self._name)

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        key = self._key(path)
        if key and (size := self._bucket.size(key)) is not None:
            return fs.FileInfo(path, fs.FileType.File, size=size)
        is_folder = self._bucket.holds(key)
        return fs.FileInfo(path, fs.FileType.Directory if is_folder else fs.FileType.NotFound)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        folder = self._key(selector.base_dir)
        if selector.recursive:
            objects = self._objects(folder, self._bucket.list_all(folder))
            folders = sorted({above for item in objects for above in _above(item["path"], folder)})
        else:
            folders, listed = self._bucket.list_folder(folder)
            objects = self._objects(folder, listed)
        infos = [
            fs.FileInfo(f"{self._name}/{item['path']}", fs.FileType.File, size=item["size"])
            for item in objects
        ]
        infos += [fs.FileInfo(f"{self._name}/{path}", fs.FileType.Directory) for path in folders]
        if not infos and not selector.allow_not_found:
            raise FileNotFoundError(self._bucket.path(folder))
        return infos

    def _objects(self, folder: str, listed: list[Any]) -> list[Any]:
        return [item for item in listed if self._bucket.is_object(folder, item)]

    def delete_dir(self, path: str) -> None:
        self.delete_dir_contents(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        keys = [each["path"] for each in self._bucket.list_all(self._key(path))]
        self._bucket.remove(keys)

    def delete_root_dir_contents(self) -> None:
        self.delete_dir_contents(self._name)

    def delete_file(self, path: str) -> None:
        self._bucket.remove([self._key(path)])

    def open_input_file(self, path: str) -> pa.PythonFile:
        key = self._key(path)
        if not key:
            raise FileNotFoundError(self._bucket.path(key))
        return pa.PythonFile(_Reader(self._bucket, key), mode="r")

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return self.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> pa.PythonFile:
        return pa.PythonFile(_Writer(self._bucket, self._key(path)), mode="w")

    def create_dir(self, path: str, recursive: bool) -> None:
        pass

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError("objects are not moved")

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError("objects are not copied")

    def open_append_stream(self, path: str, metadata: Any) -> pa.PythonFile:
        raise NotImplementedError("objects are written whole")


def _above(key: str, folder: str) -> Iterator[str]:
    """Yield the folders between a folder and an object in it."""
    while (key := key.rpartition("/")[0]) and key != folder:
        yield key


def _reopened(path: str) -> _Handler:
    return _Handler(open_bucket(path)[0])


class _Writer(io.BytesIO):
    """A small object, which is uploaded when it is closed."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket, self._key = bucket, key

    def close(self) -> None:
        if not self.closed:
            self._bucket.write(self._key, self.getvalue())
        super().close()


class _Reader(io.RawIOBase):
    """An object, read in pieces. The pieces grow while reads are sequential; at full size, the next
    piece is fetched ahead. All pieces are of the same version."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._ahead: tuple[int, Future[bytes]] | None = None  # first: `close` reads it
        meta, self._buffer = bucket.read_first(key, FIRST_BYTES)
        self._bucket, self._key = bucket, key
        self._size, self._tag = int(meta["size"]), meta["e_tag"]
        self._start = self._position = 0  # positions of the buffer and of the reader
        self._piece_bytes = FIRST_BYTES
        self._lock = threading.RLock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(view.nbytes)
        view[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        with self._lock:
            remaining = max(0, self._size - self._position)
            if size is not None and size >= 0:
                remaining = min(size, remaining)
            parts = []
            while remaining:
                part = self._buffered(remaining)
                if not part:
                    self._fetch(remaining)
                    continue
                parts.append(part)
                self._position += len(part)
                remaining -= len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def _buffered(self, count: int) -> bytes:
        offset = self._position - self._start
        if not 0 <= offset < len(self._buffer):
            return b""
        if offset == 0 and count >= len(self._buffer):
            return self._buffer
        return self._buffer[offset : offset + count]

    def _fetch(self, count: int) -> None:
        """Fill the buffer with the bytes at the current position.

        Args:
            count: bytes wanted.
        """
        follows = self._position == self._start + len(self._buffer)
        self._piece_bytes = min(2 * self._piece_bytes, PIECE_BYTES) if follows else FIRST_BYTES
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == self._position:
            self._buffer = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].cancel()
            end = min(self._size, self._position + max(count, self._piece_bytes))
            self._buffer = self._bucket.read(self._key, self._position, end, self._tag)
        self._start = self._position
        end = self._start + len(self._buffer)
        if self._piece_bytes == PIECE_BYTES and end < self._size:
            piece = (end, min(self._size, end + PIECE_BYTES), self._tag)
            self._ahead = (end, self._bucket.later(self._bucket.read, self._key, *piece))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None
        self._buffer = b""
        super().close()
