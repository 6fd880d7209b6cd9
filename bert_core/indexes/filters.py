"""What a search may ask of the columns of rows: `{"kind": "guide", "year": {"at_least": 2020}}`.

All conditions must hold. A condition is a value, a list of which the column must have one, or an
object of comparisons. It becomes an expression of LanceDB in which only names of columns and
quoted values stand, so that no text of a request is read as an expression.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from bert_core.errors import InputError
from bert_core.wording import nearest, shown

Filter = Mapping[str, Any]
COMPARISONS = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<", "not": "<>"}
MOST_VALUES = 1000
"""Values of a condition."""
MOST_WHOLE = 2**63 - 1
"""The largest whole number that LanceDB reads, and with a minus the least."""
_Kind = tuple[str, Callable[[Any], bool]]


def expression(conditions: Filter, schema: pa.Schema, known: list[str]) -> str | None:
    """Return the filter as LanceDB reads it; None for one without conditions.

    Args:
        known: columns that may be asked for.
    Raises: InputError for a column that is not there or cannot be compared, a value of another
        type, or a comparison that is unknown.
    """
    parts = []
    for name, condition in conditions.items():
        if name not in known:
            raise InputError(
                f"filter.{name}: wanted one of the columns {', '.join(known)}, got {name!r}"
                f"{nearest(name, known)}"
            )
        kind = _kind_of(schema.field(name).type, name)
        column = "`" + name + "`"
        if isinstance(condition, Mapping):
            parts += _compared(name, column, condition, kind)
        elif isinstance(condition, list):
            if not 1 <= len(condition) <= MOST_VALUES:
                raise InputError(
                    f"filter.{name}: wanted 1 to {MOST_VALUES} values, got {len(condition)}"
                )
            values = [_literal(f"{name}[{n}]", each, kind) for n, each in enumerate(condition)]
            parts.append(f"{column} IN ({', '.join(values)})")
        elif condition is None:
            parts.append(f"{column} IS NULL")
        else:
            parts.append(f"{column} = {_literal(name, condition, kind)}")
    return " AND ".join(parts) or None


def _compared(name: str, column: str, condition: Mapping[str, Any], kind: _Kind) -> list[str]:
    parts = []
    for word, value in condition.items():
        if word not in COMPARISONS:
            raise InputError(
                f"filter.{name}: wanted some of {', '.join(COMPARISONS)}, got {word!r}"
                f"{nearest(word, COMPARISONS)}"
            )
        if word == "not" and value is None:
            parts.append(f"{column} IS NOT NULL")
        else:
            literal = _literal(f"{name}.{word}", value, kind)
            parts.append(f"{column} {COMPARISONS[word]} {literal}")
    return parts


def _whole(kind: pa.DataType) -> _Kind:
    """Return what `_kind_of` does for a column of whole numbers. LanceDB reads a literal as one of
    the column's type, and fails if it does not fit."""
    bounds = np.iinfo(kind.to_pandas_dtype())
    least, most = max(bounds.min, -MOST_WHOLE), min(bounds.max, MOST_WHOLE)
    return (
        f"a whole number from {least} to {most}",
        lambda value: _is_whole(value) and least <= value <= most,
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_finite = isinstance(value, float) and abs(value) < float("inf")
    return is_finite or (_is_whole(value) and abs(value) <= MOST_WHOLE)


def _kind_of(kind: pa.DataType, name: str) -> _Kind:
    """Return what a value of a column is called, and whether a value is one.
    Raises: InputError for a column that cannot be compared."""
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "a text", lambda value: isinstance(value, str)
    if types.is_boolean(kind):
        return "true or false", lambda value: isinstance(value, bool)
    if types.is_integer(kind):
        return _whole(kind)
    if types.is_floating(kind):
        return "a number", _is_number
    raise InputError(
        f"filter.{name}: wanted a column of texts, numbers or booleans, got one of {kind}: filter "
        "by another"
    )


def _literal(where: str, value: Any, kind: _Kind) -> str:
    named, fits = kind
    if not fits(value):
        raise InputError(f"filter.{where}: wanted {named}, got {shown(value)}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value)
