"""Manages API keys with limits, models and an expiry date, kept as hashes in a JSON file.

A key is `rb-<name>-<secret>`. The secret has 256 random bits, so nobody finds it by trying sha256,
and no slow hash is needed. Limits count per replica, by a bucket that refills steadily.

A revoked key stays revoked. The file decides which keys are valid. While it cannot be read, those
keys are valid that this process read last, or else any process of this machine. If no process has
read the file, all requests are refused. A missing file counts as a file without keys.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from bert_core import conditional, files
from bert_core.checks import PositiveInt, check_fields
from bert_core.errors import ConfigError, FormatError, RaybertError
from bert_core.wording import shortened
from serve.request.errors import ForbiddenError, NotReadyError, OverloadedError, UnauthorizedError
from tracking.cache import cache_folder

logger = logging.getLogger("ray.serve")

VERSION = 1
REREAD_S = 5.0
"""Interval at which a replica checks whether the file has changed."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*")
_KEY = re.compile(r"rb-([A-Za-z0-9_.]+)-([A-Za-z0-9_-]{43})")
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key as it is stored."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = {"extra": "forbid"}

    name: str
    """Name of its owner; the public part of the key."""
    sha256: str
    """Hash of the secret."""
    models: list[str] | None = None
    """The models that it may use; None means all."""
    expires: str | None = None
    """The last day on which it is valid, in UTC, as 2027-01-31; None means no end."""
    requests_per_minute: PositiveInt | None = None
    """None means no limit."""
    tokens_per_minute: PositiveInt | None = None
    """None means no limit."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                "name: wanted letters, digits, dots and underscores, beginning with a letter or "
                f"digit, got {self.name!r}"
            )
        if self.expires is not None:
            try:
                date.fromisoformat(self.expires)
            except ValueError as error:
                raise ConfigError(
                    f"expires: wanted a date such as 2027-01-31, got {self.expires!r}"
                ) from error

    @property
    def is_expired(self) -> bool:
        today = datetime.now(UTC).date()
        return self.expires is not None and date.fromisoformat(self.expires) < today

    def allows(self, model: str) -> bool:
        """Whether the key may be used for a model."""
        return self.models is None or model in self.models


_KEYS = pydantic.TypeAdapter(list[Key])


def create(name: str, **settings: Any) -> tuple[str, Key]:
    """Return a new key, which is shown only once, and its stored form. Raises: ConfigError."""
    secret = secrets.token_urlsafe(32)
    key = Key(name=name, sha256=hashlib.sha256(secret.encode()).hexdigest(), **settings)
    return f"rb-{name}-{secret}", key


def read_keys(path: str) -> list[Key]:
    """Return the keys in a file. Raises: FormatError if it is not a file of keys; ConfigError if it
    is missing."""
    if not files.exists(path):
        raise ConfigError(
            f"keys: wanted a file of keys, got nothing at {path}: make one with "
            f"`raybert serve keys create NAME --keys {path}`"
        )
    _check_is_file(path)
    keys = _parsed(path, files.read_bytes(path))
    _remember(path, keys)
    return keys


def last_read(path: str) -> list[Key] | None:
    """Return the keys of a file as a process of this machine read them last; None if none ever
    did."""
    place = _remembered(path)
    with suppress(OSError, RaybertError):
        return _parsed(str(place), place.read_bytes())
    return None


def _remember(path: str, keys: Sequence[Key]) -> None:
    """Store the keys on this machine, for processes that start while the file cannot be read."""
    if last_read(path) == keys:
        return
    place = _remembered(path)
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_bytes(str(place), _packed(keys))
    except (OSError, RaybertError) as error:
        logger.warning("%s: which keys are valid was not kept: %s", path, error)


def _remembered(path: str) -> Path:
    # A digest, since a URI may hold a password.
    name = hashlib.sha256(files.absolute(path).encode()).hexdigest()
    return cache_folder() / "keys" / f"{name}.json"


def change_keys(path: str, change: Callable[[list[Key]], list[Key]]) -> None:
    """Replace the keys in a file with those that `change` returns for them; a missing file has no
    keys.

    If another process writes the file meanwhile, `change` is called again on what it wrote.
    Raises: FormatError if it is not a file of keys; ConfigError if the storage has no conditional
        writes; what `change` raises.
    """
    if files.exists(path):
        _check_is_file(path)
    written = None
    while written is None:
        try:
            data, tag = conditional.read_tagged(path)
        except FileNotFoundError:
            written = conditional.create(path, _packed(change([])))
        else:
            written = conditional.replace_if(path, _packed(change(_parsed(path, data))), tag)


def _check_is_file(path: str) -> None:
    if not files.is_file(path):
        raise FormatError(f"{path}: wanted a file of keys, got something else (a folder)")


def _parsed(path: str, data: bytes) -> list[Key]:
    try:
        content = json.loads(data)
        if content["version"] != VERSION:
            raise FormatError(
                f"{path}: wanted keys of version {VERSION}, got {content['version']}: update "
                "raybert"
            )
        return _KEYS.validate_python(content["keys"])
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["keys", *map(str, first["loc"])])
        raise FormatError(
            f"{path}: wanted a file of keys, {where} is wrong ({first['msg']}): correct it"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{path}: wanted a file of keys, got something else ({error})") from error


def _packed(keys: Sequence[Key]) -> bytes:
    content = {"version": VERSION, "keys": [asdict(key) for key in keys]}
    return (json.dumps(content, indent=2) + "\n").encode()


@dataclass
class _Bucket:
    """What is left of a limit per minute."""

    per_minute: int
    left: float
    at_s: float

    def refill(self) -> float:
        now_s = time.monotonic()
        self.left = min(self.per_minute, self.left + (now_s - self.at_s) * self.per_minute / 60)
        self.at_s = now_s
        return self.left

    def wait_s(self, amount: float) -> int:
        """Return the seconds until `amount` is left again."""
        return max(1, math.ceil((amount - self.left) * 60 / self.per_minute))


def _full(per_minute: int | None) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, per_minute, time.monotonic())


@dataclass
class Caller:
    """A key in use, with what is left of its limits."""

    key: Key
    requests: _Bucket | None = field(init=False)
    tokens: _Bucket | None = field(init=False)

    def __post_init__(self) -> None:
        self.requests = _full(self.key.requests_per_minute)
        self.tokens = _full(self.key.tokens_per_minute)

    def begin(self) -> None:
        """Count a request. Raises: OverloadedError if a limit is used up."""
        if self.tokens is not None and self.tokens.refill() <= 0:
            raise self._exceeded("tokens", self.tokens, 1)
        if self.requests is not None:
            if self.requests.refill() < 1:
                raise self._exceeded("requests", self.requests, 1)
            self.requests.left -= 1

    def charge(self, tokens: int) -> None:
        """Count the tokens of an answer; if they exceed the limit, the next request has to wait."""
        if self.tokens is not None:
            self.tokens.refill()
            self.tokens.left -= tokens

    def forbidden(self, got: str) -> ForbiddenError:
        """Return the error for a model that the key may not use."""
        return ForbiddenError(
            f"the key of {self.key.name}: wanted a model that it may use "
            f"({', '.join(self.key.models or ())}), got {got}"
        )

    def _exceeded(self, what: str, bucket: _Bucket, amount: float) -> OverloadedError:
        wait_s = bucket.wait_s(amount)
        return OverloadedError(
            f"the key of {self.key.name}: wanted at most {bucket.per_minute} {what} per minute: "
            f"try again in {wait_s} s",
            wait_s,
        )


class Keys:
    """The keys of a server. Keys that are added to the file or removed from it count within
    seconds."""

    def __init__(self, keys: Sequence[Key] | None = None, path: str | None = None) -> None:
        """Take `keys`, or read them from the file at `path` now. The file is read again every
        `REREAD_S`; None never reads one."""
        self.path, self._due_s = path, time.monotonic() + REREAD_S
        self._callers: dict[str, Caller] = {}
        self._is_known = False
        self._reading = threading.Lock()
        """Held while the file is read, or a slow read would undo what a later one has found."""
        self._problem: str | None = None
        """Why the file cannot be read, as logged."""
        if keys is None:
            self.reread()
        else:
            self.take(keys)

    def admit(
        self, headers: Mapping[str, str], model: str | None = None, *, counts: bool = True
    ) -> Caller:
        """Return the caller whose key a request has.

        Args:
            model: the model that the request is for; None if it is about the server.
            counts: whether the request counts towards the key's limits.
        Raises: UnauthorizedError without a valid key; ForbiddenError for a model that the key may
            not use; OverloadedError beyond its limits; NotReadyError if it is not known which keys
            are valid.
        """
        self._look_again()
        if not self._is_known:
            raise NotReadyError("the server cannot read its API keys: try again, its log says why")
        caller = self._known(presented_key(headers))
        if model is None:
            return caller
        if not caller.key.allows(model):
            raise caller.forbidden(shortened(model))
        if counts:
            caller.begin()
        return caller

    def _known(self, presented: str | None) -> Caller:
        if presented is None:
            raise UnauthorizedError(
                "wanted an API key, got none: send the header Authorization: Bearer <key>"
            )
        parts = _KEY.fullmatch(presented)
        name, secret = parts.groups() if parts else ("", presented)
        caller = self._callers.get(name)
        # Unknown names take as much work as known ones, so that timing reveals no names.
        stored = _NOBODY if caller is None else caller.key.sha256
        is_right = hmac.compare_digest(hashlib.sha256(secret.encode()).hexdigest(), stored)
        if caller is None or not is_right:
            raise UnauthorizedError("the API key is not known here: check it, or ask for another")
        if caller.key.is_expired:
            raise UnauthorizedError(
                f"the API key of {name} expired on {caller.key.expires}: ask for another"
            )
        return caller

    def take(self, keys: Sequence[Key]) -> None:
        """Use these keys from now on; unchanged keys keep their use of the limits."""
        known = self._callers
        self._callers = {
            key.name: known[key.name]
            if key.name in known and known[key.name].key == key
            else Caller(key)
            for key in keys
        }
        self._is_known = True  # only now: requests on another thread may look at the keys meanwhile

    def reread(self) -> None:
        """Read the file again; while it cannot be read, the keys that are known stay valid."""
        if self.path is None:
            return
        with self._reading:
            try:
                self._read(self.path)
            finally:
                self._due_s = time.monotonic() + REREAD_S

    def _read(self, path: str) -> None:
        try:
            is_there = files.exists(path)
            self.take(read_keys(path) if is_there else [])
            problem = None if is_there else "there is no such file here: no key is valid"
        except (OSError, RaybertError) as error:
            problem = str(error)
            if not self._is_known and (known := last_read(path)) is not None:
                self.take(known)
        if problem is not None and problem != self._problem:
            logger.error("API keys, %s: %s", path, problem)
        self._problem = problem

    def _look_again(self) -> None:
        late_s = time.monotonic() - self._due_s
        if self.path is None or late_s < 0:
            return
        if self._reading.locked():  # storage is slow: no other thread shall wait for it too
            return
        if late_s > REREAD_S:  # no request came for long: the known keys are too old
            self.reread()
            return
        self._due_s = time.monotonic() + REREAD_S
        asyncio.get_running_loop().run_in_executor(None, self.reread)


def presented_key(headers: Mapping[str, str]) -> str | None:
    """Return the key that a request carries, in any of the headers that clients use; None if
    missing."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or headers.get("api-key")


def without(keys: Sequence[Key], name: str) -> list[Key]:
    """Return the keys except the key of this name. Raises: ConfigError if there is no such key."""
    if name not in {key.name for key in keys}:
        there_are = ", ".join(key.name for key in keys) or "none"
        raise ConfigError(f"name: there is no key of {name!r}, there are: {there_are}")
    return [key for key in keys if key.name != name]


def added(keys: Sequence[Key], key: Key) -> list[Key]:
    """Return the keys and one more. Raises: ConfigError if there is a key of this name already."""
    if key.name in {other.name for other in keys}:
        raise ConfigError(
            f"name: there is a key of {key.name!r} already: revoke it first, or take another name"
        )
    return [*keys, key]
