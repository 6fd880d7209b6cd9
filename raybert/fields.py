"""Values given from Python, as the command line takes them: one way to check them, and one wording
of errors, for both."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_type_hints

from bert_core.errors import ConfigError
from pipelines.configure import config_class, parse
from pipelines.runtime.config_errors import alternatives

SOURCE = "source"
"""The field of a table of fields that a single path stands for: `train="rows.csv"`."""


Path = str | os.PathLike[str]


def configured(word: str, config: Path | None, values: Mapping[str, Any]) -> Any:
    """Return the config of a command.

    Args:
        config: a TOML file, which `values` override; a shipped one is found from any folder.
        values: fields by name. A path may be a `Path`, or anything else with `__fspath__`; a field
            that is a table of further fields is a mapping, a config object, or its `source` alone.
    Raises: ConfigError as the command line does.
    """
    return parse(word, arguments_of(word, config, values))


def arguments_of(word: str, config: Path | None, values: Mapping[str, Any]) -> list[str]:
    """Return what the command line would be given instead of `config` and `values`."""
    arguments = [] if config is None else ["--config", os.fspath(config)]
    tables = _tables(config_class(word))
    for name, value in values.items():
        arguments += _arguments(name, value, tables.get(name))
    return arguments


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _tables(kind: type) -> dict[str, Any]:
    """Return the class of each field that is a table of further fields."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        for inside in filter(is_dataclass, alternatives(hint)):
            found[name] = inside
    return found


def _arguments(name: str, value: Any, table: Any) -> Iterator[str]:
    value = _plain(name, value)
    if isinstance(value, str) and SOURCE in ({} if table is None else _names(table)):
        value = {SOURCE: value}
    if table is not None and isinstance(value, Mapping):
        inner = _tables(table)
        for key, each in value.items():
            yield from _arguments(f"{name}.{key}", each, inner.get(key))
    else:
        yield f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def _plain(name: str, value: Any) -> Any:
    """Return the value as JSON has it. Raises: ConfigError if it cannot be."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {key: each for key, each in asdict(value).items() if each is not None}
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return value.tolist()
    raise ConfigError(
        f"{name}: wanted text, a number, a path, or a list or mapping of these, got "
        f"{type(value).__name__}"
    )
