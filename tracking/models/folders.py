"""A folder that a driver hands to its workers, which may be on other machines."""

from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

from bert_core.errors import FormatError


class FetchedFolder(PosixPath):
    """A bundle in the cache of this machine that knows how another machine gets it."""

    fetch: Callable[[], Path]

    @classmethod
    def of(cls, folder: Path, fetch: Callable[[], Path]) -> "FetchedFolder":
        """
        Args:
            fetch: gives the folder of the same bundle on the machine that it is called on.
        """
        fetched = cls(folder)
        fetched.fetch = fetch
        return fetched

    def __reduce__(self) -> Any:
        if hasattr(self, "fetch"):
            return FetchedFolder.of, (Path(str(self)), self.fetch)
        return Path, (str(self),)  # something in it

    def here(self) -> Path:
        """The folder on this machine.

        Raises: FormatError if there is another bundle now where this came from; as `fetch` does.
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
