"""Fields that are given in several columns: labels as 0 and 1, in a column per label or in a list,
and lists of texts, in a column per text.

Jigsaw's and GoEmotions' CSV files, and data sets for transformers' multi-label models, are
published that way.
"""

import json
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from bert_core.data.json_rows import Unread
from bert_core.data.labelled_formats import LabelledFile
from bert_core.errors import ConfigError, CorpusError
from bert_core.wording import nearest, shown

Row = Mapping[str, Any]
_TICKS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
_LOOKED_AT = 100
"""Rows, to find columns that hold only 0 and 1."""


def with_names(
    of_file: LabelledFile, source: str, target: type, field: str, names: Sequence[str], setting: str
) -> LabelledFile:
    """Return the file with the names of each record's labels in the column `field`. Records with
    anything but 0 and 1 are moved to `unread`.

    Args:
        source: the file's name, for messages.
        target: shape of the expected answer.
        field: the field of the target that holds the labels.
        names: names of all labels: columns of the records, or the labels for the places of a list
            in `field`.
        setting: the setting with which the user names columns, for messages.
    Raises: ConfigError if the field cannot be given that way; CorpusError naming a column that is
        missing.
    """
    if field in one_or_more(target):
        return _with_texts(of_file, source, field, names)
    if field != column_per_label(target):
        raise ConfigError(
            f"{setting}.{field}: wanted the name of a column, got a list: only the labels of texts "
            "with any number of them may have a column each (options.multi_label)"
        )
    if not names or len({*names}) < len(names):
        raise ConfigError(
            f"{setting}.{field}: wanted the name of each label once, got {shown([*names])}"
        )
    in_list = holds_ticks(of_file.records, field, names)
    if of_file.records and not in_list:
        way_out = (
            "give the names of columns that hold 0 or 1, or of the places of a list of "
            f"{len(names)} of these in the column {field!r}"
        )
        _check_present(of_file.records, source, names, way_out)
    records: list[Row] = []
    numbers: list[int] = []
    unread = dict(of_file.unread)
    for number, record in zip(of_file.numbers, of_file.records, strict=True):
        cells = record.get(field) if in_list else [record.get(name) for name in names]
        labels = _labels(cells, names, field if in_list else None)
        if isinstance(labels, Unread):
            unread[number] = Unread(f"row {number}: {labels}")
        else:
            # Not a copy: a column of Parquet is read only if it is used.
            records.append(ChainMap({field: labels}, cast("dict[str, Any]", record)))
            numbers.append(number)
    return replace(of_file, records=records, numbers=numbers, unread=unread)


def _with_texts(
    of_file: LabelledFile, source: str, field: str, names: Sequence[str]
) -> LabelledFile:
    """Return the file with each record's texts in these columns as a list in the column `field`;
    empty cells are left out.

    Raises: CorpusError naming a column that is missing.
    """
    if of_file.records:
        way_out = f"give the names of the columns that hold the {field}"
        _check_present(of_file.records, source, names, way_out)
    records: list[Row] = []
    for record in of_file.records:
        cells = [record.get(name) for name in names]
        texts = [cell for cell in cells if cell is not None and str(cell).strip()]
        # Not a copy: a column of Parquet is read only if it is used.
        records.append(ChainMap({field: texts or None}, cast("dict[str, Any]", record)))
    return replace(of_file, records=records)


def one_or_more(target: type) -> frozenset[str]:
    """Return the lists of texts in a target that may be given as a single text, or as several
    columns with a text each."""
    return getattr(target, "one_or_more", frozenset())


def _check_present(records: Sequence[Row], source: str, names: Sequence[str], way_out: str) -> None:
    """Check that each of `names` is a column of some record. Raises: CorpusError with the way
    out."""
    for name in names:
        if not any(name in record for record in records):
            present = [*map(str, records[0])]
            raise CorpusError(
                f"{source}: wanted a column {name!r}, there are: {', '.join(present)}"
                f"{nearest(name, present)}: {way_out}"
            )


def with_lists(of_file: LabelledFile, column: str, separator: str) -> LabelledFile:
    """Return the file with a list in place of each text in a column: its parts between separators,
    without white space at their ends; none for an empty text."""
    records: list[Row] = []
    for record in of_file.records:
        cell = record.get(column)
        if isinstance(cell, str):
            parts = [part.strip() for part in cell.split(separator)] if cell.strip() else []
            records.append(ChainMap({column: parts}, cast("dict[str, Any]", record)))
        else:
            records.append(record)
    return replace(of_file, records=records)


def column_per_label(target: type) -> str | None:
    """Return the field of a target that may be given as a column per label; None if it has
    none."""
    return getattr(target, "column_per_label", None)


def holds_ticks(records: Sequence[Row], field: str, names: Sequence[str]) -> bool:
    """Whether some row has a list of 0 and 1, as long as `names`, in the column `field`."""
    return any(
        isinstance(cell := record.get(field), list)
        and len(cell) == len(names)
        and all(_tick(each) is not None for each in cell)
        for record in records[:_LOOKED_AT]
    )


def to_name(records: Sequence[Row], setting: str, field: str) -> str | None:
    """Return how to name the columns that hold only 0 and 1, for a message; None if there are fewer
    than two."""
    looked_at = records[:_LOOKED_AT]
    ticked = [
        str(name)
        for name in looked_at[0]
        if all(_tick(record.get(name)) is not None for record in looked_at)
    ]
    if len(ticked) < 2:
        return None
    listed = json.dumps(ticked, ensure_ascii=False)
    return f"with a column per label, name those of labels: {setting}.{field} '{listed}'"


def _labels(cells: Any, names: Sequence[str], column: str | None) -> list[str] | Unread:
    """Return the names of the cells that are 1; `Unread` if a cell is neither 0 nor 1.

    Args:
        column: the column that holds all cells as a list; None if each cell has its own column.
    """
    if not isinstance(cells, list) or len(cells) != len(names):
        return Unread(
            f"wanted a list of {len(names)} times 0 or 1 in the column {column!r}, got "
            f"{shown(cells)}: correct the row, or remove it"
        )
    ticks = [_tick(cell) for cell in cells]
    if None in ticks:
        place = ticks.index(None)
        return Unread(
            f"wanted 0 or 1 in the column {column or names[place]!r}, got {shown(cells[place])}: "
            "correct the row, or remove it"
        )
    return [name for name, tick in zip(names, ticks, strict=True) if tick]


def _tick(cell: Any) -> bool | None:
    """Whether a cell says that a label applies; None if it is neither 0 nor 1."""
    if isinstance(cell, str):
        return _TICKS.get(cell.strip().casefold())
    if isinstance(cell, bool | int | float) and cell in (0, 1):
        return bool(cell)
    return None
