"""A bucket: reading objects in pieces, listing, writing whole or under a condition, and removing
them."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import quote
from xml.etree import ElementTree as ET

from bert_core.errors import ConfigError, RaybertError
from bert_core.storage.config import StorageConfig, environment
from bert_core.storage.failures import Failure
from bert_core.storage.location import Location
from bert_core.storage.retries import FIRST_CONTACT_S, Retries
from bert_core.storage.stores import PIECE_BYTES, store_of
from bert_core.wording import first_line

AT_ONCE = 4
SMALL_BYTES = 1 << 20
MOST_PARTS = 10_000  # of one upload
REMOVED_AT_ONCE = 1000
# Part of every signed address that lists or aborts uploads; servers ignore it.
_IGNORED = "x-id="

T = TypeVar("T")


def open_bucket(path: str) -> tuple["Bucket", str]:
    """Return the bucket that a URI names, and the key in it. Raises: ConfigError, ValueError."""
    location = Location.of(path)
    bucket = _bucket(replace(location, key=""), environment(), os.getpid())
    return bucket, location.key


@lru_cache(maxsize=32)
def _bucket(location: Location, variables: tuple[tuple[str, str], ...], pid: int) -> "Bucket":
    try:
        import obstore  # noqa: F401  # here: local files need none of it
    except ImportError as error:
        raise ConfigError(
            f"{location.scheme.name}://{location.bucket}: wanted the package obstore: install it "
            "with `pip install obstore`, or give a local path"
        ) from error
    return Bucket(location, dict(variables))


class Bucket:
    """One bucket. Every method raises a ResourceError that says what was attempted."""

    def __init__(self, location: Location, variables: Mapping[str, str]) -> None:
        self._location, self._variables = location, variables
        self._config = StorageConfig.of(variables, location.scheme)
        self._retries = Retries(location, self._config)
        self._store = self._open()
        self._pool: ThreadPoolExecutor | None = None

    def _open(self, **options: Any) -> Any:
        from obstore.exceptions import BaseError

        try:
            return store_of(self._location, self._config, self._variables, **options)
        except BaseError as error:
            raise ConfigError(
                f"{self.path('')}: {first_line(str(error))}: correct the variables that say "
                "how to reach it (docs/storage.md)"
            ) from None

    @cached_property
    def _sender(self) -> Any:
        return self._open(sends=True)

    @cached_property
    def _uploader(self) -> Any:
        return self._open(sends=True, retries=True)

    @property
    def name(self) -> str:
        return self._location.bucket

    def path(self, key: str) -> str:
        """Return the URI of an object."""
        return replace(self._location, key=key).uri

    def read_first(self, key: str, count: int) -> tuple[Any, bytes]:
        """Return an object's metadata (obstore's ObjectMeta), and up to `count` of its first bytes.

        Sends a GET, since the answer to a HEAD does not say why it is refused.
        Raises: FileNotFoundError.
        """
        from obstore.exceptions import BaseError

        def request() -> tuple[Any, bytes]:
            try:
                result = self._store.get(key, options={"range": (0, count)})
            except BaseError as error:
                if Failure.of(error).status != 416:  # the range is empty because the object is
                    raise
                return self._store.head(key), b""
            data = result.buffer().to_bytes()
            _require(len(data), min(count, result.meta["size"]))
            return result.meta, data

        return self._retries.run(key, "read", request)

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if it is missing."""
        from obstore.exceptions import BaseError

        def request() -> Any:
            try:
                return self._store.head(key)
            except BaseError as error:
                if not Failure.of(error).is_permanent:
                    raise
            # The answer to a HEAD does not say why it is refused.
            return self._store.get(key, options={"range": (0, 1)}).meta

        try:
            return int(self._retries.run(key, "read", request)["size"])
        except FileNotFoundError:
            return None

    def read(self, key: str, start: int, end: int, tag: str | None) -> bytes:
        """Return the bytes from `start` up to, not including, `end`, using several concurrent
        requests for a long range.

        Args:
            tag: the version that the object must have; None allows any.
        """
        cuts = [*range(start, end, PIECE_BYTES), end]
        pieces = list(pairwise(cuts))
        if len(pieces) == 1:
            return self._piece(key, *pieces[0], tag)
        futures = [self.later(self._piece, key, *piece, tag) for piece in pieces]
        try:
            return b"".join(future.result() for future in futures)
        finally:
            for future in futures:
                future.cancel()

    def later(self, task: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Run a task in a thread of this bucket."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="raybert-storage")
        return self._pool.submit(task, *arguments)

    def _piece(self, key: str, start: int, end: int, tag: str | None) -> bytes:
        options: Any = {"range": (start, end)}
        if tag:
            options["if_match"] = tag

        def request() -> bytes:
            data = self._store.get(key, options=options).buffer().to_bytes()
            _require(len(data), end - start)
            return data

        return self._retries.run(key, "read", request)

    def read_tagged(self, key: str) -> tuple[bytes, str]:
        """Return a small object and its version. Raises: FileNotFoundError."""

        def request() -> tuple[bytes, str]:
            result = self._store.get(key)
            data = result.buffer().to_bytes()
            _require(len(data), result.meta["size"])
            return data, self._tag_of(result.meta)

        return self._retries.run(key, "read", request)

    def _tag_of(self, meta: Any) -> str:
        return str(meta[self._location.scheme.version])

    def list_all(self, folder: str) -> list[Any]:
        """Return all objects in a folder, at any depth."""
        objects: list[Any] = []

        def request() -> None:
            last = objects[-1]["path"] if objects else None  # resume where the answer broke off
            for page in self._store.list(folder or None, offset=last, chunk_size=1000):
                objects.extend(page)

        self._retries.run(folder, "listed", request)
        return objects

    def list_folder(self, folder: str) -> tuple[list[str], list[Any]]:
        """Return the paths of the folders directly in a folder, and the objects directly in it."""

        def request() -> tuple[list[str], list[Any]]:
            result = self._store.list_with_delimiter(folder or None)
            return list(result["common_prefixes"]), list(result["objects"])

        return self._retries.run(folder, "listed", request)

    def holds(self, folder: str) -> bool:
        """Whether there is an object in a folder."""

        def request() -> bool:
            pages = self._store.list(folder or None)
            return any(self.is_object(folder, each) for page in pages for each in page)

        return self._retries.run(folder, "listed", request)

    def is_object(self, folder: str, listed: Any) -> bool:
        """Whether an entry listed in `folder` is an object, not the marker of a folder.

        Some programs create a folder as an empty object whose key ends in a slash; obstore cuts off
        the slash.
        """
        if listed["path"] == folder:
            return False
        return bool(listed["size"]) or self.size(listed["path"]) is not None

    def write(self, key: str, data: Any) -> None:
        """Write an object: it appears whole or not at all."""
        view = memoryview(data).cast("B")
        if view.nbytes <= PIECE_BYTES:
            store = self._store if view.nbytes <= SMALL_BYTES else self._sender
            self._retries.run(key, "written", lambda: store.put(key, view, use_multipart=False))
            return
        if not self._retries.was_reached:
            self.size(key)  # obstore would wait long for a server that is down
        part_bytes = max(PIECE_BYTES, -(-view.nbytes // MOST_PARTS))
        try:
            self._retries.run(
                key,
                "written",
                lambda: self._uploader.put(
                    key, view, chunk_size=part_bytes, max_concurrency=AT_ONCE
                ),
            )
        finally:
            self._abort_uploads(key, key)

    def create(self, key: str, data: bytes) -> str | None:
        """Write an object only if it does not exist; return its version, or None if it exists."""
        return self._write_if(key, data, "create")

    def replace_if(self, key: str, data: bytes, tag: str) -> str | None:
        """Replace an object only if its version is still `tag`; return the new version, or None if
        it is not."""
        return self._write_if(key, data, {self._location.scheme.version: tag})

    def _write_if(self, key: str, data: bytes, mode: Any) -> str | None:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        attempts = 0

        def request() -> str | None:
            nonlocal attempts
            attempts += 1
            try:
                return self._tag_of(self._store.put(key, data, mode=mode))
            except (AlreadyExistsError, PreconditionError) as error:
                if Failure.of(error).is_conflict:
                    raise
                return None

        tag = self._retries.run(key, "written", request)
        if tag is None and attempts > 1:
            # An earlier attempt may have succeeded, and its answer been lost.
            with suppress(FileNotFoundError):
                present, version = self.read_tagged(key)
                return version if present == data else None
        return tag

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; a missing one is no error."""
        for start in range(0, len(keys), REMOVED_AT_ONCE):
            some = list(keys[start : start + REMOVED_AT_ONCE])

            def request(some: list[str] = some) -> None:
                with suppress(FileNotFoundError):
                    self._store.delete(some)

            self._retries.run(some[0], "removed", request)

    def abort_uploads(self, folder: str) -> None:
        """Abort all multipart uploads in a folder, as far as possible. No other process may be
        writing there."""
        self._abort_uploads(f"{folder}/" if folder else "")

    def _abort_uploads(self, prefix: str, key: str | None = None) -> None:
        """Abort, as far as possible, the abandoned multipart uploads of `key`, or of all keys that
        begin with `prefix`.

        obstore itself aborts an upload that fails. This is for uploads whose id was lost with the
        answer, or which a killed process left behind. obstore has no method for it, but it can sign
        any address.
        """
        from obstore.exceptions import BaseError

        if not self._location.scheme.is_s3:
            return  # Azure drops them after a week; on Google a lifecycle rule does
        address = self._store.config["endpoint"]
        with suppress(RaybertError, BaseError, OSError, ET.ParseError):
            query = f"uploads=&prefix={quote(prefix, safe='')}&{_IGNORED}"
            uploads = self._open(address=f"{address}?{query}")
            answer = self._retries.run(
                prefix,
                "listed",
                lambda: uploads.get("l").buffer(),
                longest_s=FIRST_CONTACT_S,
            )
            for upload in ET.fromstring(answer.to_bytes()).iterfind("{*}Upload"):
                uploaded = upload.findtext("{*}Key") or ""
                if key not in (None, uploaded):
                    continue
                number = quote(upload.findtext("{*}UploadId") or "", safe="")
                query = f"uploadId={number}&{_IGNORED}"
                parts = self._open(address=f"{address}/{quote(uploaded)}?{query}")

                def abort(parts: Any = parts) -> None:
                    with suppress(FileNotFoundError):
                        parts.delete("d")

                self._retries.run(uploaded, "removed", abort, longest_s=FIRST_CONTACT_S)


def _require(received: int, expected: int) -> None:
    """Check that an answer is complete. Raises: OSError if it was cut short."""
    if received != expected:
        raise OSError(f"wanted {expected:,} bytes, the answer ended after {received:,}")
