"""Keeps secrets out of what a cluster records about a job: its command line and its configs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from bert_core.errors import ConfigError

_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:(?:access|api|auth|private|secret)?(?:key|token)|sig|signature|pwd|credentials?)$"
    r"|(?:secret|password|passwd|passphrase)$",
    re.I,
)
# NOTE: a secret key may contain a slash, and so may what follows a port: http://mlflow:5000/a@b.
_PASSWORD = re.compile(r"://(?!\[)[^/\s:@]*:(?!\d{1,5}/)[^\s@\"',]+@")
_TOKEN = re.compile(r"https?://[^/\s:@\"',]+@", re.I)
"""Web services take a token in place of a user; a database's user alone is no secret."""
_PARAMETER = re.compile(r"[?&;]([^?&;=\s]+)=([^&;\s\"']*)")
_SWITCH = re.compile(r"true|false|null|", re.I)


def refuse_secrets(command: Sequence[str], config: Any) -> None:
    """Raise ConfigError, which does not show the value, if a command line or a config holds a
    secret."""
    for name, value in [*_options(command), *_values(config)]:
        named = [(name, value), *_PARAMETER.findall(value)]
        if (
            any(_SECRET_NAME.search(name) and not _SWITCH.fullmatch(text) for name, text in named)
            or _TOKEN.search(value)
            or _PASSWORD.search(value)
        ):
            raise ConfigError(
                f"{name or 'the command line'}: wanted no secret in a job, whose command line and "
                "configs everyone who reaches the cluster can read; set it in the environment that "
                "the cluster is started in, or mount a file there: MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, AWS_SECRET_ACCESS_KEY and HF_TOKEN are read there"
            )


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of every option, and of every `NAME=value`."""
    name = ""
    for word in command:
        before, equals, after = word.partition("=")
        if equals and re.fullmatch(r"-*[\w.-]+", before):
            yield before.lstrip("-"), after
            name = ""
        elif word.startswith("-"):
            name = word.lstrip("-")
        else:
            yield name, word
            name = ""


def _values(config: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and value of every text in a config."""
    if is_dataclass(config):
        for field in fields(config):
            yield from _values(getattr(config, field.name), f"{name}.{field.name}".lstrip("."))
    elif isinstance(config, Mapping):
        for key, value in config.items():
            yield from _values(value, f"{name}.{key}")
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _values(value, name)
    elif isinstance(config, str):
        yield name, config
