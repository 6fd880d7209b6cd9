"""Remembers on this machine which version of an alias last answered, for processes that start while
the registry is unavailable."""

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bert_core import files
from tracking.cache import cache_folder
from tracking.models.references import Reference


@dataclass(frozen=True)
class Served:
    """A version of the registry that has answered requests."""

    version: str
    digest: str


def remember_served(
    version: Served, reference: Reference, deployed: str | None, *, uri: str
) -> None:
    """Store on this machine which version of a reference has answered.

    Args:
        deployed: digest of what the reference meant when the server was deployed. A version that
            another deployment served is not returned for this deployment.
    Raises: OSError.
    """
    path = _served_path(reference, deployed, uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(str(path), asdict(version))


def last_served(reference: Reference, deployed: str | None, *, uri: str) -> Served | None:
    """Return the version that was remembered last for the same arguments; None if none was."""
    with suppress(OSError, ValueError, TypeError):
        return Served(**files.read_json(str(_served_path(reference, deployed, uri))))
    return None


def _served_path(reference: Reference, deployed: str | None, uri: str) -> Path:
    # A digest, since the URI may hold a password.
    key = "\n".join([uri, str(reference), deployed or ""])
    name = f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    return cache_folder() / "served" / name
