"""doccano's JSONL: spans as lists, or as objects where a project has relations; one or several
labels. Each annotator's rows are in a file with the annotator's name.

Source: doccano 1.8, `backend/data_export/pipeline`.
"""

from collections.abc import Mapping
from typing import Any

from bert_core.data.json_rows import Unread, json_rows
from bert_core.data.labelled.lines import Line, Unused, with_labels
from bert_core.wording import shown


def doccano(data: bytes, source: str) -> list[Line]:
    """Read a row per text, with its spans or labels."""
    annotator = source.rpartition("/")[2].partition(".")[0]
    lines: list[Line] = []
    for number, row in enumerate(json_rows(data, source, keep=True), 1):
        lines += [row] if isinstance(row, Unread) else _read(row, number, annotator)
    return lines


def _read(row: Mapping[str, Any], number: int, annotator: str) -> list[Line]:
    record = {**row, "item": row.get("id"), "annotator": annotator}
    given = next((row[name] for name in ("label", "labels", "entities") if name in row), None)
    unused: list[Line] = [
        Unused(what, len(row[name]))
        for name, what in (("relations", "relations"), ("Comments", "comments"))
        if isinstance(row.get(name), list)
    ]
    if isinstance(given, str | int):
        return [with_labels(record, [given]), *unused]
    if not isinstance(given, list):
        return [
            Unread(
                f"row {number}: wanted a list in label or entities, as doccano writes it, got "
                f"{shown(given)}: correct the row, or remove it"
            ),
            *unused,
        ]
    if given and all(isinstance(one, str) for one in given):
        return [with_labels(record, given), *unused]
    return [with_labels(record, []) | {"spans": [*map(_span, given)]}, *unused]


def _span(given: Any) -> Any:
    """Return a span with the names of our fields; `[start, end, label]` has none to change."""
    if not isinstance(given, Mapping):
        return given
    return {
        "start": given.get("start_offset"),
        "end": given.get("end_offset"),
        "label": given.get("label"),
    }
