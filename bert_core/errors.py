"""The errors that a user can cause, and fix.

Every message names the thing, what was wanted, what was got, and the way out. The errors are built
from strings only, so that they survive pickling between Ray's processes. Addresses in messages are
shown without their credentials, wherever they are printed, logged or recorded.
"""

from bert_core.wording import without_secrets


class RaybertError(Exception):
    """An error that the user can fix: the command line prints its message without a traceback."""

    def __init__(self, message: str = "", *details: object) -> None:
        super().__init__(without_secrets(message), *details)


class ConfigError(RaybertError, ValueError):
    """A setting that is unknown, out of range, or inconsistent with another one."""


class CorpusError(RaybertError):
    """A corpus or a labelled set that is missing, empty, or not what it claims to be."""


class FormatError(RaybertError):
    """A file of ours (shard, bundle, checkpoint, manifest) that is damaged, changed or foreign."""


class InputError(RaybertError, ValueError):
    """An input that the model cannot answer."""


class TooLongError(InputError):
    """An input with more tokens than the model reads.

    It takes two values: `got`, which says what was wanted and what came, and `cut_by`, the
    parameter that makes inputs be truncated, or None.
    """

    def __init__(self, got: str, cut_by: str | None) -> None:
        super().__init__(got, cut_by)
        self.cut_by = cut_by

    def __str__(self) -> str:
        return self.told("" if self.cut_by is None else f"set the parameter {self.cut_by}")

    def told(self, remedy: str) -> str:
        """Return the message with the way out.

        Args:
            remedy: what the caller does to have inputs truncated; empty if that is not possible.
        """
        got, _ = self.args
        way_out = f"{remedy} to have it cut, or split the text" if remedy else "split the text"
        return f"{got}: {way_out}"


class ResourceError(RaybertError):
    """The machine or cluster lacks what was requested: a port, a worker, a running server."""
