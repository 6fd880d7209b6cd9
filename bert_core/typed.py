"""Checks values against a declared type: a dataclass, or lists, objects and scalars.

`as_type` reads every JSON file that a person or a stranger may have written, so that a value of the
wrong kind is rejected with its file and key; `bert_core.tasks.shapes` applies the same checks to
rows and requests. What the values mean is left to others.
"""

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from bert_core.checks import Range
from bert_core.errors import FormatError
from bert_core.wording import one_of, shown

KINDS = {str: "text", float: "a number", int: "a whole number", bool: "true or false"}
KINDS |= {types.NoneType: "null", list: "a list", tuple: "a list", dict: "an object"}
"""Type → the name of its values in messages."""

MOST_BYTES = 128 << 20
"""Largest JSON file or vocabulary; the tokenizer.json of XLM-V, with 900,000 tokens, has half."""


def check_size(size_bytes: int, where: str) -> None:
    """Check the size of a file before it is read. Raises: FormatError above `MOST_BYTES`."""
    if size_bytes > MOST_BYTES:
        raise FormatError(
            f"{where}: wanted at most {MOST_BYTES:,} bytes, got {size_bytes:,}: copy it again, or "
            "use another model"
        )


def parse_json(data: bytes, where: str) -> Any:
    """Parse one JSON value. Raises: FormatError naming `where`, the file."""
    try:
        return json.loads(data)
    # Nested too deeply, not JSON, not in UTF-8, or a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: wanted JSON, it cannot be read ({error}): copy it again"
        ) from error


def as_type(hint: Any, value: Any, where: str, *, key: str = "", closed: bool = False) -> Any:
    """Return the value as an instance of the type that a hint declares.

    Objects become dataclasses, and lists tuples, if the hint says so; whole numbers become floats.
    Entries of an object that its dataclass lacks are ignored.

    Args:
        where: the file, for messages.
        key: where in the file the value is.
        closed: reject entries that a dataclass lacks, rather than ignore them.
    Raises: FormatError naming the file, the key, what was wanted and what came.
    """
    kind = next((kind for kind in alternatives(hint) if check_of(kind)(value)), None)
    if kind is None:
        raise _refused(where, key, _wanted(hint), shown(value))
    if kind is Any:
        return value
    if get_origin(kind) is Annotated:
        base, *notes = get_args(kind)
        ours = as_type(base, value, where, key=key)
        for allowed in notes:
            if isinstance(allowed, Range) and ours not in allowed:
                raise _refused(where, key, str(allowed), shown(value))
        return ours
    if kind is float:
        try:
            return float(value)
        except OverflowError:
            raise _refused(where, key, "a number", "one that is too large") from None
    if isinstance(value, list):
        item = (*get_args(kind), Any)[0]
        items = (as_type(item, each, where, key=f"{key}[{n}]") for n, each in enumerate(value))
        return (get_origin(kind) or list)(items)
    if not isinstance(value, dict):
        return value
    inside = f"{key}." if key else ""
    if is_dataclass(kind):
        return _object(kind, value, where, key, closed=closed)
    item = (*get_args(kind), Any, Any)[1]
    return {name: as_type(item, each, where, key=inside + name) for name, each in value.items()}


def _object(kind: Any, value: Mapping[str, Any], where: str, key: str, *, closed: bool) -> Any:
    hints, optional = fields_of(kind)
    inside = f"{key}." if key else ""
    for name in hints:
        if name not in value and name not in optional:
            raise _refused(where, inside + name, _wanted(hints[name]), "none")
    for name in value.keys() - hints.keys() if closed else ():
        raise _refused(where, key, f"some of {', '.join(hints)}", shown(name))
    values = {
        name: as_type(hint, value[name], where, key=inside + name)
        for name, hint in hints.items()
        if name in value
    }
    try:
        return kind(**values)
    except ValueError as error:  # from the class's own checks
        raise FormatError(f"{where}: {inside}{error}") from error


def _refused(where: str, key: str, wanted: str, got: str) -> FormatError:
    place = f"{key}: " if key else ""
    return FormatError(f"{where}: {place}wanted {wanted}, got {got}: correct it, or copy it again")


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a hint allows: the members of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


@cache  # called for every input of a request
def fields_of(kind: Any, *, plain: bool = False) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and the names of those with a default.

    Args:
        plain: whether to strip annotations from the types.
    """
    hints = get_type_hints(kind, include_extras=not plain)
    optional = [
        field.name
        for field in fields(kind)
        if field.default is not MISSING or field.default_factory is not MISSING
    ]
    return {field.name: hints[field.name] for field in fields(kind)}, frozenset(optional)


@cache  # called for every value of a request
def check_of(kind: Any) -> Callable[[Any], bool]:
    """Return a test of whether a value has a type, regardless of what is inside it."""
    origin = get_origin(kind)
    if kind is Any:
        return lambda value: True
    if origin is Annotated:
        checks = [check_of(each) for each in alternatives(get_args(kind)[0])]
        return lambda value: any(check(value) for check in checks)
    if origin is Literal:
        choices = get_args(kind)
        return lambda value: isinstance(value, str | int | None) and value in choices
    if is_dataclass(kind) or is_typeddict(kind) or (origin or kind) in (dict, Mapping):
        return lambda value: isinstance(value, dict)
    if (origin or kind) in (list, tuple):
        return lambda value: isinstance(value, list)
    if kind is float:
        return lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    return lambda value: isinstance(value, kind)


def _wanted(hint: Any) -> str:
    return " or ".join(dict.fromkeys(map(_named, alternatives(hint))))


def _named(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        return _wanted(get_args(kind)[0])
    if origin is Literal:
        return str(one_of(get_args(kind)))
    if is_dataclass(kind):
        return KINDS[dict]
    return KINDS.get(origin or kind, "a value")
