"""The errors that a user can cause, and fix.

Every message names the thing, what was wanted, what was got, and the way out. All of them take one
string, so that they survive pickling between Ray's processes.
"""


class RaybertError(Exception):
    """Something the user can fix: the command line prints its message without a traceback."""


class ConfigError(RaybertError, ValueError):
    """A setting that is unknown, out of range, or inconsistent with another one."""


class CorpusError(RaybertError):
    """A corpus or a labelled set that is missing, empty, or not what it claims to be."""


class FormatError(RaybertError):
    """A file of ours (shard, bundle, checkpoint, manifest) that is damaged, changed or foreign."""


class InputError(RaybertError, ValueError):
    """An input that the model cannot answer."""


class ResourceError(RaybertError):
    """The machine or cluster lacks what was requested: a port, a worker, a running server."""
