"""A folder that a driver hands to its workers, which may be on other machines."""

from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

from bert_core.errors import FormatError


class FetchedFolder(PosixPath):
    """The path of a bundle in this machine's cache, which also knows how another machine fetches
    it."""

    fetch: Callable[[], Path]

    @classmethod
    def of(cls, folder: Path, fetch: Callable[[], Path]) -> "FetchedFolder":
        """Return the path of `folder` with the function that fetches its bundle.

        Args:
            fetch: returns the folder of the same bundle on the machine that calls it.
        """
        fetched = cls(folder)
        fetched.fetch = fetch
        return fetched

    def __reduce__(self) -> Any:
        if hasattr(self, "fetch"):
            return FetchedFolder.of, (Path(str(self)), self.fetch)
        return Path, (str(self),)  # a path inside the folder

    def here(self) -> Path:
        """Return the bundle's folder on this machine, fetched if missing.

        Raises: FormatError if the source has another bundle now; as `fetch` does.
        """
        if self.is_dir():
            return self
        folder = self.fetch()
        if folder.name != self.name:
            raise FormatError(
                f"wanted the bundle {self.name[:12]} that the run began with, its source has "
                f"{folder.name[:12]} now: start the run again"
            )
        return folder
