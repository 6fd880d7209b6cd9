"""Writes the signatures of raybert's functions for type checkers and editors.

python -m site_builder.stubs    # after a config has changed
"""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import raybert
from pipelines.configure import STAGES, config_class

STUB = Path(raybert.__file__).with_name("stages.pyi")
_HEAD = '''"""Written by `python -m site_builder.stubs`, from the configs of the stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from bert_core.manifest import Manifest

Text = str | PathLike[str]
Table = Mapping[str, Any] | Text
"""The fields of a field by name, or its `source` alone."""

@dataclass(frozen=True, kw_only=True)
class Outcome:
    folder: str
    manifest: Manifest
    @property
    def metrics(self) -> dict[str, float]: ...
    def __fspath__(self) -> str: ...
'''


def stub() -> str:
    """Return the text of `stages.pyi`."""
    return "\n".join([_HEAD, *(line for word in STAGES for line in _function(word))])


def _function(word: str) -> Iterator[str]:
    kind = config_class(word)
    hints = get_type_hints(kind)
    yield f"def {word}("
    yield "    *,"
    yield "    config: Text | None = ...,"
    # Each may be in the config file instead, also those that a stage must have.
    yield from (f"    {field.name}: {_type(hints[field.name])} = ...," for field in fields(kind))
    yield ") -> Outcome: ..."


def _type(hint: Any) -> str:
    """Return the type that callers may give for a field, as Python source."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        # A set, since two kinds of numbers are one type to a caller.
        return " | ".join(dict.fromkeys(_type(each) for each in arguments))
    if origin is Literal:
        return re.sub("'", '"', f"Literal[{', '.join(map(repr, arguments))}]")
    if hint is NoneType:
        return "None"
    if is_dataclass(hint):
        return "Table"
    if hint is str:
        return "Text"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list[{_type(arguments[0])}] | tuple[{_type(arguments[0])}, ...]"
    if origin is not None:
        inner = ", ".join(map(_type, arguments))
        return f"{'Mapping' if origin is dict else origin.__name__}[{inner}]"
    return "Any" if hint is Any else hint.__name__


def main() -> None:
    """Write the stub."""
    STUB.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    main()
