"""Converts table rows with other column names, and requests, to the shape that a task expects.

A shape is a dataclass whose fields are text, numbers, or lists and objects of these. Its
`__pydantic_config__` states in JSON Schema what its `__post_init__` checks, for the server's
documentation.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from bert_core import files
from bert_core.data.tables import DIVIDERS, ClassLabel
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.tasks.label_columns import column_per_label, one_or_more, to_name
from bert_core.tasks.row_forms import check_forms, form_of, in_order, with_other_names
from bert_core.typed import KINDS, alternatives, check_of, fields_of
from bert_core.wording import as_json, nearest, shown

Row = Mapping[str, Any]
"""One example: the fields of a task's input and, if it is labelled, of its expected answer."""

_OF_CLASS = "of a class"
Label = Annotated[str, _OF_CLASS]
"""The name of a class, in a target: white space at its ends is no part of it."""

SHOWN_ROWS = SHOWN_KINDS = 10
_NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")


def unused_fields(
    records: Sequence[Row], shapes: tuple[type, type], columns: Mapping[str, str]
) -> set[str]:
    """Return the optional fields whose column is missing, or empty in every record: such a column
    is meant for other tasks. If a column is empty in only some records, an empty cell of an input
    is empty text, and an empty cell of a target is an unknown target."""
    column_of = own_columns(with_other_names(columns, shapes, records), shapes)
    return {
        name
        for name in _optional(*shapes)
        if all(record.get(column_of.get(name, name)) in (None, "") for record in records)
    }


@dataclass(frozen=True)
class BadRow:
    """A row that does not fit its task."""

    source: str
    number: int
    """In its file, from 1."""
    fault: str
    """The message: what was wanted, what came, and the way out."""
    place: str = ""
    """Where it is in its file, if that is known better."""

    @property
    def where(self) -> str:
        """The source and the place in it."""
        return f"{self.source}, {self.place or f'row {self.number}'}"

    @property
    def kind(self) -> str:
        """The fault without the given value and without numbers, so that similar faults are
        equal."""
        return re.sub("[0-9]+", "…", re.split(", got |; there are|, which are ", self.fault)[0])


@dataclass(frozen=True)
class LabelledRows:
    """Rows that were read from a file."""

    rows: list[dict[str, Any]]
    """The rows that fit the shapes."""
    numbers: list[int]
    """The number of each in its file, from 1."""
    bad: list[BadRow]
    """The others."""
    stripped: int
    """Labels with white space at their ends, which was removed."""
    types: str
    """The types of its labels, if they have several, and all are read as text."""


def labelled(
    records: Sequence[Row],
    shapes: tuple[type, type],
    columns: Mapping[str, str],
    source: str,
) -> list[dict[str, Any]]:
    """Return the rows of `read_records`. Raises: CorpusError as `read_records` does, and one that
    names all bad rows if there are any."""
    read = read_records(records, shapes, columns, source)
    if read.bad:
        raise CorpusError(told_of(read.bad, len(records)))
    return read.rows


def read_records(
    records: Sequence[Row],
    shapes: tuple[type, type],
    columns: Mapping[str, str],
    source: str,
    unused: Set[str] | None = None,
    setting: str = "columns",
) -> LabelledRows:
    """Read the fields of the shapes from each record.

    Tables may hold numbers as text, and labels as whole numbers: these are converted.

    Args:
        shapes: the shapes of a task's input and of its expected answer.
        columns: field → its column, for fields whose column has another name.
        source: where the records come from, for messages.
        unused: the `unused_fields` of all records, if `records` are only some of them.
        setting: the setting with which the user gives `columns`, for messages.
    Raises: CorpusError naming a column that is missing, or that holds labels of different types
        which read alike; ConfigError if two fields are mapped to the same column.
    """
    hints = _hints(*shapes)
    unknown = sorted(columns.keys() - hints.keys())
    if unknown:
        raise CorpusError(
            f"{setting}: wanted names of the fields {', '.join(hints)}, got {unknown[0]}: "
            'give field = "column"'
        )
    named = columns.keys()
    columns = with_other_names(columns, shapes, records)
    column_of = own_columns(columns, shapes)
    if not records:
        raise CorpusError(f"{source}: wanted labelled rows, the file holds none: give another file")
    optional, targets = _optional(*shapes), _hints(*shapes[1:])
    unused = unused_fields(records, shapes, columns) if unused is None else unused
    _check_columns(records, column_of, optional - columns.keys(), source, shapes, setting)
    forms = in_order(getattr(shapes[1], "forms", ()), named)
    check_forms(records, forms, column_of, source, setting)
    of_forms = {name for form in forms for name in form}
    labels, several = label_fields(shapes[1]), one_or_more(shapes[1])
    types = [
        _types([record.get(column_of[name]) for record in records], column_of[name], source)
        for name in sorted(labels & column_of.keys())
    ]
    rows, numbers, bad, stripped = [], [], [], 0
    for number, record in enumerate(records, 1):
        row, fault = {}, ""
        form = form_of(record, forms, column_of)
        for name, column in column_of.items():
            if name in of_forms and name not in form:
                continue
            hint = hints[name]
            cell = record.get(column)
            value = _converted(cell, hint, is_target=name in targets)
            if name in several and isinstance(value, str) and value.strip():
                value = [value]
            may_be_empty = _is_text(hint) and name not in unused and name not in targets
            nothing = value is None or (value == "" and not may_be_empty)
            may_be_missing = name in optional and name not in form
            if nothing and may_be_missing and (name not in columns or column in record):
                continue
            is_blank = name in targets and _has_blank(value)
            if value is None or is_blank or not _fits(value, hint):
                fault = _misfit(cell, hint, column, record, is_blank=is_blank)
                break
            if name in labels:
                value, removed = _stripped(value)
                stripped += removed
            row[name] = value
        try:
            if not fault:
                for name, value in row.items():
                    check_unicode(value, name)
                shapes[0](**{name: value for name, value in row.items() if name not in targets})
                shapes[1](**{name: value for name, value in row.items() if name in targets})
        except InputError as error:
            fault = str(error)
        if fault:
            bad.append(BadRow(source, number, fault))
        else:
            rows.append(row)
            numbers.append(number)
    return LabelledRows(rows, numbers, bad, stripped, "; ".join(filter(None, types)))


def told_of(bad: Sequence[BadRow], total: int) -> str:
    """Return one message about all bad rows: the first fault in full, the others by kind, with the
    numbers of their rows.

    Args:
        total: how many rows were read, good and bad.
    """
    first = bad[0]
    told = f"{first.where}: {first.fault}"
    if len(bad) == 1:
        return told
    by_kind: dict[str, list[BadRow]] = {}
    for row in bad[1:]:
        by_kind.setdefault(row.kind, []).append(row)
    for kind, rows in [*by_kind.items()][:SHOWN_KINDS]:
        what = "the same is wrong" if kind == first.kind else kind
        places = _numbers_of(rows, apart_from=first.source)
        told += f"; {what} in {len(rows):,} other row{'s' * (len(rows) > 1)} ({places})"
    return f"{told}{_more_kinds(by_kind)}; {len(bad):,} of {total:,} rows in all"


def kinds_of_bad(bad: Sequence[BadRow]) -> str:
    """Return the kinds of faults, and the numbers of the rows that have them, for a message."""
    by_kind: dict[str, list[BadRow]] = {}
    for row in bad:
        by_kind.setdefault(row.kind, []).append(row)
    told = [f"{kind} ({_numbers_of(rows)})" for kind, rows in by_kind.items()]
    return "; ".join(told[:SHOWN_KINDS]) + _more_kinds(by_kind)


def _more_kinds(by_kind: Mapping[str, Sequence[BadRow]]) -> str:
    more = len(by_kind) - SHOWN_KINDS
    return f"; {more:,} other things are wrong" if more > 0 else ""


def _numbers_of(rows: Sequence[BadRow], apart_from: str = "") -> str:
    """Return the numbers of rows, for a message, with their files if these are several.

    Args:
        apart_from: the file that the message has named already.
    """
    more = len(rows) - SHOWN_ROWS
    and_more = f" and {more:,} more" if more > 0 else ""
    if len({row.source for row in rows} | {apart_from or rows[0].source}) > 1:
        named = (f"{row.source.rpartition('/')[2]} row {row.number}" for row in rows[:SHOWN_ROWS])
        return f"{', '.join(named)}{and_more}"
    shown = ", ".join(f"{row.number}" for row in rows[:SHOWN_ROWS])
    return f"row{'s' * (len(rows) > 1)} {shown}{and_more}"


def _misfit(cell: Any, hint: Any, column: str, record: Row, *, is_blank: bool) -> str:
    """Return the message about a cell that does not fit its field."""
    full = ", none of them empty," if is_blank and isinstance(cell, list) else ""
    wanted = f"wanted {_kind(hint)}{full} in the column {column!r}, got {shown(cell)}"
    if _is_without_label(cell):
        return (
            f"{wanted}, which marks rows without a label in Hugging Face's data sets: give a "
            "split with labels"
        )
    there_are = ", ".join(map(str, record))
    if isinstance(cell, str) and hint == list[str]:
        return (
            f"{wanted}; there are: {there_are}: correct the row, name the right column, or give "
            "the label_separator of labels in a cell"
        )
    return f"{wanted}; there are: {there_are}: correct the row, or name the right column"


def label_fields(target: type) -> Set[str]:
    """Return the fields of a target that hold the names of classes."""
    hints = get_type_hints(target, include_extras=True)
    return {name for name, hint in hints.items() if _OF_CLASS in _metadata(hint)}


def _metadata(hint: Any) -> tuple[Any, ...]:
    parts = get_args(hint)
    if is_typeddict(hint):
        parts = tuple(get_type_hints(hint, include_extras=True).values())
    inside = [each for part in parts for each in _metadata(part)]
    return (*getattr(hint, "__metadata__", ()), *inside)


def _types(cells: Sequence[Any], column: str, source: str) -> str:
    """Return the types of the labels in a column, with an example of each, for a message; empty if
    all have the same type.

    Raises: CorpusError if two labels of different types are read as the same text.
    """
    first: dict[str, tuple[int, Any]] = {}
    type_of: dict[str, tuple[str, int, Any]] = {}
    for number, cell in enumerate(cells, 1):
        for label in cell if isinstance(cell, list) else [cell]:
            if isinstance(label, ClassLabel) or not isinstance(label, str | bool | int | float):
                continue
            kind = "a number" if type(label) in (int, float) else KINDS.get(type(label), "text")
            first.setdefault(kind, (number, label))
            name = str(_converted(label, str, is_target=True)).strip().casefold()
            other, row, same = type_of.setdefault(name, (kind, number, label))
            if other != kind:
                raise CorpusError(
                    f"{source}: wanted labels of one type in the column {column!r}, got {other} "
                    f"(row {row}: {as_json(same)}) and {kind} (row {number}: {as_json(label)}) "
                    "that read alike: write all of them as text"
                )
    told = [f"{kind} (row {number}: {as_json(label)})" for kind, (number, label) in first.items()]
    return " and ".join(told) if len(told) > 1 else ""


def _stripped(value: Any) -> tuple[Any, int]:
    """Return a label, a list of labels, or a list of objects with a `label`, without white space at
    the ends, and how many had some."""
    if isinstance(value, str):
        return value.strip(), int(value != value.strip())
    if isinstance(value, dict) and isinstance(label := value.get("label"), str):
        return value | {"label": label.strip()}, int(label != label.strip())
    if not isinstance(value, list | tuple):
        return value, 0
    stripped = [_stripped(each) for each in value]
    return [each for each, _ in stripped], sum(removed for _, removed in stripped)


def rows_of(shape: type, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a table that is given by its columns.

    A list is a column, unless the shape's field itself takes such a list. Any other value is a
    column of a single row.
    Raises: InputError if columns have different numbers of rows.
    """
    hints = _hints(shape)
    columns = {
        name: value
        if isinstance(value, list)
        and not (value and name in hints and _check_of(hints[name])(value))
        else [value]
        for name, value in table.items()
    }
    sizes = {name: len(column) for name, column in columns.items()}
    if len({*sizes.values()}) > 1:
        raise InputError(f"inputs: wanted columns of the same length, got {as_json(sizes)}")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _check_columns(
    records: Sequence[Row],
    column_of: Mapping[str, str],
    unneeded: Set[str],
    source: str,
    shapes: tuple[type, type],
    setting: str,
) -> None:
    """Check that every column that is needed is in some record.

    Args:
        unneeded: fields that may be missing.
    Raises: CorpusError naming a missing column. A shape may have in `instead`: another column →
        what to do if the rows have that.
    """
    has_header = files.suffixes(source)[0] in DIVIDERS
    instead = {name: way for shape in shapes for name, way in getattr(shape, "instead", {}).items()}
    for name, column in column_of.items():
        if name in unneeded or any(column in record for record in records):
            continue
        present = [*map(str, records[0])]
        known = next((instead[other] for other in present if other in instead), None)
        if known is None and name == column_per_label(shapes[-1]):
            known = to_name(records, setting, name)
        hint = nearest(column, present) if known is None else ""
        way_out = (
            f"say with {setting}.{name} which holds the {name}"
            f"{', or add a first line with the names of the columns' if has_header else ''}"
        )
        raise CorpusError(
            f"{source}: wanted a column {column!r}, there are: {', '.join(present)}{hint}: "
            f"{known or way_out}"
        )


def own_columns(columns: Mapping[str, str], shapes: Sequence[type]) -> dict[str, str]:
    """Return field of the shapes → the column to read it from.

    An optional field that is not in `columns` gets no column if another field is read from the
    column with its name. Raises: ConfigError if two other fields share a column, such as text and
    label.
    """
    optional = _optional(*shapes)
    field_of: dict[str, str] = {}
    hints = _hints(*shapes)
    unnamed = [name for name in hints if name in optional and name not in columns]
    for name in [name for name in hints if name not in unnamed]:
        column = columns.get(name, name)
        if column in field_of:
            raise ConfigError(
                f"columns: wanted a column for each field, got {column!r} for "
                f"{field_of[column]} and {name}: name the right one for {name}"
            )
        field_of[column] = name
    read = {name: column for column, name in field_of.items()}
    read |= {name: name for name in unnamed if name not in field_of}
    return {name: read[name] for name in hints if name in read}


def has_empty_text(shape: type, row: Row) -> bool:
    """Whether a text field of an input is only white space, or every text of a list field is."""
    values = [row[field.name] for field in fields(shape) if field.name in row]
    texts = [[value] if isinstance(value, str) else value for value in values]
    return any(isinstance(group, list) and not any(map(str.strip, group)) for group in texts)


def as_row(shape: type, value: Any, where: str) -> dict[str, Any]:
    """Return an input of the inference schema as a row. The input is an object, or the bare value
    of the only required field.

    Raises: InputError naming `where`, what was wanted and what was given.
    """
    hints, optional = _hints(shape), _optional(shape)
    needed = [name for name in hints if name not in optional]
    if not isinstance(value, dict):
        if len(needed) > 1:
            raise InputError(f"{where}: wanted an object with {_listed(hints)}, got {shown(value)}")
        only = needed[0] if needed else next(iter(hints))
        value = {only: value}
        where_of = {only: where}
    else:
        where_of = {name: f"{where}.{name}" for name in hints}
        for name in value:
            if name not in hints:
                hint = nearest(str(name), hints)
                raise InputError(f"{where}: wanted {_listed(hints)}, got {as_json(name)}{hint}")
    row = {}
    for name, hint in hints.items():
        item = value.get(name)
        if item is None and name in optional:
            continue
        if name not in value:
            raise InputError(f"{where}: wanted {_listed(hints)}, {name} is missing")
        if not _fits(item, hint):
            raise InputError(f"{where_of[name]}: wanted {_kind(hint)}, got {shown(item)}")
        check_unicode(item, where_of[name])
        row[name] = item
    try:
        shape(**row)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return row


@cache  # called for every input of a request
def _hints(*shapes: type) -> Mapping[str, Any]:
    each = (fields_of(shape, plain=True) for shape in shapes)
    return {name: hint for hints, _ in each for name, hint in hints.items()}


@cache
def _optional(*shapes: type) -> Set[str]:
    return {name for shape in shapes for name in fields_of(shape, plain=True)[1]}


@cache  # called for every value of a request
def _check_of(hint: Any) -> Callable[[Any], bool]:
    """Return a function that tells whether a value is of a type, including the items of lists and
    the values of objects; floats must be finite."""
    if len(kinds := alternatives(hint)) > 1:
        checks = [_check_of(kind) for kind in kinds]
        return lambda value: any(check(value) for check in checks)
    is_of_kind = check_of(hint)
    if hint is float:
        return lambda value: is_of_kind(value) and _is_finite(value)
    if get_origin(hint) is list:
        check = _check_of(get_args(hint)[0])
        return lambda value: isinstance(value, list | tuple) and all(map(check, value))
    if get_origin(hint) is dict:
        check = _check_of(get_args(hint)[1])
        return lambda value: is_of_kind(value) and all(map(check, value.values()))
    return is_of_kind


def _fits(value: Any, hint: Any) -> bool:
    return _check_of(hint)(value)


def _converted(value: Any, hint: Any, *, is_target: bool) -> Any:
    kinds = alternatives(hint)
    if float in kinds and isinstance(value, str):
        # Python would also take 1_000 and digits of other scripts.
        return float(value) if _NUMBER.fullmatch(value) else value
    if int in kinds and isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):
        return int(value)
    if not is_target:
        return value
    if isinstance(value, ClassLabel) and not {int, float} & {*kinds}:
        return value.name
    if str in kinds and isinstance(value, bool | int | float) and _is_finite(value):
        whole = isinstance(value, float) and value.is_integer()
        return str(int(value)) if whole else str(value)
    if list[str] in kinds and isinstance(value, list):
        return [_converted(each, str, is_target=True) for each in value]
    item = next((get_args(kind)[0] for kind in kinds if get_origin(kind) is list), None)
    return _objects(value, item) if is_typeddict(item) else value


def _objects(value: Any, kind: Any) -> Any:
    """Return a list of objects with only the fields of a typed dict, from a list of objects, from
    an object of lists (the form of Hugging Face's data sets), or, for objects with a label, from
    lists of their fields in order (`[0, 3, "place"]`). Anything else is returned unchanged."""
    hints = get_type_hints(kind, include_extras=True)
    labels = {name for name, hint in hints.items() if _OF_CLASS in _metadata(hint)}
    needed = [name for name in hints if name in kind.__required_keys__]
    items = value
    if isinstance(value, dict) and all(name in value for name in needed):
        names = [name for name in hints if name in value]
        columns = [value[name] for name in names]
        if not all(isinstance(column, list) for column in columns):
            return value
        if len({*map(len, columns)}) > 1:
            return value
        items = [dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True)]
    if labels and isinstance(items, list):
        is_listed = [isinstance(item, list) and len(item) == len(needed) for item in items]
        if all(is_listed):
            items = [dict(zip(needed, item, strict=True)) for item in items]
    if not (isinstance(items, list) and all(isinstance(item, dict) for item in items)):
        return value
    return [
        {
            name: _converted(item[name], str, is_target=True) if name in labels else item[name]
            for name in hints
            if name in item
        }
        for item in items
    ]


def _is_without_label(cell: Any) -> bool:
    """Whether a cell is the negative class number that means "no label", or a list that contains
    one."""
    cells = cell if isinstance(cell, list) else [cell]
    return any(isinstance(each, ClassLabel) and each < 0 for each in cells)


def _has_blank(value: Any) -> bool:
    """Whether a value is a blank text, or a list that contains one."""
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(each, str) and not each.strip() for each in texts)


def _is_text(hint: Any) -> bool:
    return str in alternatives(hint)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def _kind(hint: Any) -> str:
    first = next(kind for kind in alternatives(hint) if kind is not type(None))
    if get_origin(first) is list:
        (item,) = get_args(first)
        return f"a list of {_several(_kind(item))}"
    if get_origin(first) is Literal:
        return f"one of {', '.join(map(str, get_args(first)))}"
    if is_typeddict(first) or dict in (first, get_origin(first)):
        numbers = get_origin(first) is dict and get_args(first)[1] is float
        return "an object of numbers" if numbers else "an object"
    return KINDS.get(first, "a value")


def _several(kind: str) -> str:
    """Return the plural of what `_kind` returns: `a number` → `numbers`."""
    first, _, rest = kind.partition(" ")
    if kind == "text":
        return "texts"
    if first not in ("a", "an"):
        return kind
    return f"lists{rest.removeprefix('list')}" if rest.startswith("list ") else f"{rest}s"


def _listed(hints: Mapping[str, Any]) -> str:
    return " and ".join(f"{name} ({_kind(hint)})" for name, hint in hints.items()) or "none"


def check_unicode(value: Any, where: str) -> None:
    """Check every text in a value, also within lists and objects.

    Raises: InputError for a text with half a surrogate pair.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_unicode(key, where)
            check_unicode(item, f"{where}, {key!r}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_unicode(item, f"{where}[{index}]")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where}: wanted Unicode text, got half a surrogate pair at character "
                f"{error.start}: send whole characters"
            ) from error
