"""Fetches bundles to this machine: once per content, verified, and kept in its cache while this
process uses them."""

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.cache import BUNDLES, Cache, CacheEntry
from bert_core.errors import ConfigError, FormatError
from bert_core.manifest import BUNDLE, folder_with
from tracking.cache import local_cache

if TYPE_CHECKING:
    from mlflow.store.artifact.artifact_repo import ArtifactRepository

CONFIG, RECORD = "config.json", "raybert.json"
_HELD: defaultdict[Path, list[CacheEntry]] = defaultdict(list)
"""Cache entries that this process uses, by path."""


def release(folder: Path) -> None:
    """Let the cache remove a folder that a reference's `fetch` returned: this process no longer
    needs it."""
    if entries := _HELD.get(folder):
        entries.pop().close()


def _held(entry: CacheEntry) -> Path:
    _HELD[entry.path].append(entry)
    return entry.path


def bundle_in(reference: object, folder: str) -> str:
    """Return the path of the bundle in the folder or URI that a reference means.
    Raises: ConfigError.
    """
    bundle = folder_with(folder, CONFIG, RECORD)
    if bundle is None:
        raise ConfigError(
            f"{reference}: wanted a bundle, there is neither {CONFIG} nor {BUNDLE}/{CONFIG} in it: "
            "give the folder of a bundle, or the output of a finished stage that makes one"
        )
    return bundle


def verify(folder: Path) -> str:
    """Return the digest of the bundle in a folder. Raises: FormatError if it is damaged."""
    # Imported late because it imports torch.
    from bert_core.bundle.format import bundle_digest

    return bundle_digest(folder)


def fetch_remote(source: str, cache: Cache) -> Path:
    """Return the cached folder of the bundle at a URI, fetched again if the cached copy is
    damaged."""
    if not files.exists(source):
        raise ConfigError(f"{source}: wanted a bundle, got nothing there: check the URI")
    source = bundle_in(source, source)
    record = files.join(source, RECORD)
    # The record has the sha256 of every file: equal records mean equal bundles.
    key = files.sha256_of(record) if files.exists(record) else None

    def size_bytes() -> int:
        return sum(files.size_bytes(path) for path in files.find_files(source))

    return cached(cache, key, size_bytes, lambda folder: files.fetch_folder(source, folder))


def downloaded(digest: str, *, cache: Cache | None = None) -> Path | None:
    """Return the folder of a registered bundle that was downloaded before; None if it was not."""
    entry = (cache or local_cache()).find(f"{BUNDLES}/{digest}")
    if entry is not None:
        with suppress(FormatError):
            if verify(entry.path) == digest:
                return _held(entry)
    return None


def download(source: str, uri: str, folder: Path) -> None:
    """Fetch a bundle that an MLflow server stores; a failed download leaves no files behind.

    Raises: whatever MLflow raises.
    """
    from mlflow.artifacts import download_artifacts

    # MLflow downloads into a subfolder of `dst_path`.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        fetched = download_artifacts(artifact_uri=source, dst_path=scratch, tracking_uri=uri)
        os.rename(fetched, folder)


def stored_bytes(source: str, uri: str) -> int:
    """Return the size of what an MLflow server stores, as far as it reports sizes."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return _size_bytes(get_artifact_repository(source, tracking_uri=uri))


def _size_bytes(stored: "ArtifactRepository", path: str | None = None) -> int:
    return sum(
        _size_bytes(stored, each.path) if each.is_dir else each.file_size or 0
        for each in stored.list_artifacts(path)
    )


def cached(
    cache: Cache,
    key: str | None,
    size_bytes: Callable[[], int],
    fetch: Callable[[Path], object],
    check: Callable[[Path], object] = verify,
) -> Path:
    """Return the folder of the bundle `key` in the cache, fetched if missing or damaged.

    Args:
        key: None fetches the bundle in any case.
        size_bytes: returns the size of what is to be fetched.
        fetch: writes the bundle to the folder that it is given.
        check: raises FormatError if a folder does not hold the bundle.
    Raises: as `Cache.open` does.
    """
    if key is None:
        return _held(cache.take_in(BUNDLES, size_bytes(), fetch, verify))
    name = f"{BUNDLES}/{key}"
    if (entry := cache.find(name)) is not None:
        try:
            check(entry.path)
            return _held(entry)
        except FormatError:
            cache.drop(entry)  # the original may be intact
    entry = cache.open(name, size_bytes(), fetch)
    check(entry.path)
    return _held(entry)
