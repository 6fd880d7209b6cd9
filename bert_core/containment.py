"""Checks that no name and no link in a folder leads out of it.

Folders may come from strangers: their records, indexes and manifests name files, and they may hold
symbolic links. Every file that is read, hashed, copied or uploaded from such a folder is first
looked up here.
"""

import os
import stat
from pathlib import Path, PurePosixPath

from bert_core.errors import FormatError

# The hub's cache has links `models--<name>/snapshots/<commit>/<name>` → `models--<name>/blobs/…`.
_MODELS, _SNAPSHOTS, _BLOBS = "models--", "snapshots", "blobs"


def check_name(name: str, where: str) -> str:
    """Return `name` if it is a relative path that stays inside a folder.

    Args:
        where: the folder or file that contains the name, for messages.
    Raises: FormatError if it leads out of the folder, or is not a plain relative path.
    """
    parts = PurePosixPath(name).parts
    plain = "/".join(parts) == name and not name.startswith("/")
    if not parts or not plain or ".." in parts or "\\" in name or "\0" in name:
        raise FormatError(
            f"{where}: wanted names of files in the folder, got {name!r}: copy the folder again "
            "from where you trust it, or write it again"
        )
    return name


def file_in(folder: Path, name: str) -> Path:
    """Return the path of a file in a local folder.

    Raises: FormatError if the name or a symbolic link leads out of the folder, other than from a
        snapshot of the hub's cache to its blobs, or if it is not a regular file; FileNotFoundError
        if it is missing.
    """
    path = folder / check_name(name, str(folder))
    try:
        kind = os.stat(path).st_mode
        real = path.resolve()
    # A path through a file, circular links, a name that is too long or not in Unicode.
    except (OSError, ValueError) as error:
        raise FileNotFoundError(path) from error
    if not any(real.is_relative_to(root) for root in _roots(folder)):
        raise FormatError(
            f"{path}: wanted a file in the folder, got a link to {real}, which is elsewhere: if "
            f"it belongs to the folder, copy it with what its links lead to (cp -rL), and give "
            "the copy"
        )
    if not stat.S_ISREG(kind):
        raise FormatError(
            f"{path}: wanted a regular file, got {_kind(kind)}: remove it, or copy the folder again"
        )
    return path


def has_file(folder: Path, name: str) -> bool:
    """Whether the folder has a file of this name. Raises: FormatError, as `file_in` does."""
    try:
        file_in(folder, name)
    except FileNotFoundError:
        return False
    return True


def _roots(folder: Path) -> list[Path]:
    """Return the folders that the files of `folder` may really be in, once links are resolved."""
    real = folder.resolve()
    models = (each.parent for each in folder.absolute().parents if each.name == _SNAPSHOTS)
    blobs = [each.resolve() / _BLOBS for each in models if each.name.startswith(_MODELS)]
    return [real, *blobs]


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a named pipe" if stat.S_ISFIFO(mode) else "a device or socket"
