"""Where this machine keeps what it downloads, as the environment says."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """What `RAYBERT_CACHE` names; `~/.cache/raybert` by default."""
    folder = os.environ.get("RAYBERT_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "raybert"
