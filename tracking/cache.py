"""Locates the folder of this machine that holds copies of remote files."""

import os
from pathlib import Path

from bert_core.cache import FOLDER, LIMIT, Cache
from bert_core.errors import ConfigError


def cache_folder() -> Path:
    """Return the folder in `RAYBERT_CACHE`, by default `~/.cache/raybert`; it may not exist yet.

    The path is absolute, since processes work in other folders.
    """
    named = os.environ.get(FOLDER)
    return Path(named).absolute() if named else Path.home() / ".cache" / "raybert"


def local_cache() -> Cache:
    """Return the cache of shards and bundles in `cache_folder`, whose total size may be limited.

    Raises: ConfigError if `RAYBERT_CACHE_GB` is not a size.
    """
    limit_gb = os.environ.get(LIMIT)
    if not limit_gb:
        return Cache(cache_folder())
    try:
        most_bytes = int(float(limit_gb) * 1e9)
    except (ValueError, OverflowError):
        most_bytes = 0
    if most_bytes <= 0:
        raise ConfigError(f"{LIMIT}: wanted a number of GB above 0, such as 50, got {limit_gb!r}")
    return Cache(cache_folder(), most_bytes)
