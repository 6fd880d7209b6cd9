"""How object stores are reached: configured by environment variables, with the same meaning in
every process.

The variables of the stores' own programs belong to each machine. Variables that begin with
RAYBERT_STORAGE_ take precedence, and are passed on with a run to all its workers (docs/storage.md).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from bert_core.errors import ConfigError
from bert_core.storage_schemes import SCHEMES, Scheme

PREFIX = "RAYBERT_STORAGE_"
# Variables that obstore and its sources of credentials read, besides ours.
_PREFIXES = (PREFIX, *{scheme.variables for scheme in SCHEMES.values()})
_YES, _NO = ("1", "true", "yes"), ("", "0", "false", "no")
_STYLES = ("path", "virtual")


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """The settings of all object stores."""

    endpoint: str | None = None
    """Address of the server; None for the one of Amazon, Google or Azure."""
    region: str | None = None
    """Region of S3 buckets; None asks Amazon for each bucket's."""
    path_style: bool | None = None
    """Whether an S3 address has the bucket in its path rather than in its host; None puts it in the
    path if there is an endpoint."""
    anonymous: bool = False
    """Whether requests are sent without credentials."""
    connect_timeout_s: float = 5.0
    """Longest wait for a connection."""
    timeout_s: float = 15.0
    """Longest wait for the next bytes of an answer."""
    retry_s: float = 120.0
    """How long a request that fails is repeated."""

    @classmethod
    def of(cls, environment: Mapping[str, str], scheme: Scheme = SCHEMES["s3"]) -> "StorageConfig":
        """Read the settings for stores of a scheme; the variables of Amazon's programs apply to S3
        only.

        Raises: ConfigError naming the variable that has a wrong value.
        """
        if not scheme.is_s3:
            environment = {k: v for k, v in environment.items() if not k.startswith("AWS_")}
        style = _get(environment, "STYLE")
        if style not in (None, *_STYLES):
            raise _wrong("STYLE", style, "path or virtual")
        return cls(
            endpoint=_get(environment, "ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            region=_get(environment, "REGION", "AWS_REGION", "AWS_DEFAULT_REGION"),
            path_style=None if style is None else style == "path",
            anonymous=_flag(environment, "ANONYMOUS", "AWS_SKIP_SIGNATURE"),
            connect_timeout_s=_seconds(environment, "CONNECT_TIMEOUT_S", cls.connect_timeout_s),
            timeout_s=_seconds(environment, "TIMEOUT_S", cls.timeout_s),
            retry_s=_seconds(environment, "RETRY_S", cls.retry_s),
        )


def environment() -> tuple[tuple[str, str], ...]:
    """Return the variables of this process that affect object stores, sorted."""
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(_PREFIXES)))


def _get(environment: Mapping[str, str], name: str, *usual: str) -> str | None:
    names = (PREFIX + name, *usual)
    return next((environment[each] for each in names if environment.get(each)), None)


def _flag(environment: Mapping[str, str], name: str, *usual: str) -> bool:
    value = (_get(environment, name, *usual) or "").lower()
    if value not in _YES + _NO:
        raise _wrong(name, value, "true or false")
    return value in _YES


def _seconds(environment: Mapping[str, str], name: str, default: float) -> float:
    value = _get(environment, name)
    try:
        seconds = default if value is None else float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise _wrong(name, value, "a number of seconds above 0")
    return seconds


def _wrong(name: str, value: str | None, wanted: str) -> ConfigError:
    return ConfigError(f"{PREFIX}{name} is {value}: wanted {wanted}; correct it, or unset it")
