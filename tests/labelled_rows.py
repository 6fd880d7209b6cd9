"""Labelled rows of every task and kind, as many as a test asks for, and the files that hold them.

A task that is added with its kinds is in every test that goes over `EVERY_KIND`, and in those that
train if labelled rows train it.
"""

import csv
import io
import json
from itertools import islice, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.tasks.base import Kind
from bert_core.tasks.catalog import TASKS

KINDS = {f"{task.name}-{kind.name}": (task, kind) for task in TASKS.values() for kind in task.kinds}
EVERY_KIND = [pytest.param(*both, id=name) for name, both in KINDS.items()]
TRAINED = {name: both for name, both in KINDS.items() if both[0].trainable}
EVERY_TRAINED_KIND = [pytest.param(*both, id=name) for name, both in TRAINED.items()]
EVERY_UNTRAINED_KIND = [
    pytest.param(*both, id=name) for name, both in KINDS.items() if name not in TRAINED
]
WORDS = ["a", "the", "file", "list", "name", "object", "line", "string", "value", "error"]


def rows_of(kind: Kind, count: int, start: int = 0) -> list[dict[str, Any]]:
    """`count` rows that all ask something else: those of the kind, with two words behind each.

    Args:
        start: how many come before them: other rows than those of a smaller start.
    """
    endings = islice(product(WORDS, WORDS), start, start + count)
    return [
        _with_ending(kind.rows[number % len(kind.rows)], list(words))
        for number, words in enumerate(endings, start)
    ]


def _with_ending(row: Any, words: list[str]) -> dict[str, Any]:
    """The row with words behind its input, where no answer's place or number depends on them."""
    changed = dict(row)
    if "tokens" in row:
        changed["tokens"] = [*row["tokens"], *words]
        tag = "O" if "O" in row["tags"] else row["tags"][-1]
        changed["tags"] = [*row["tags"], *[tag] * len(words)]
        return changed
    for name in (
        "context",
        "text",
        "text_pair",
        "source_sentence",
        "sentence_good",
        "sentence_bad",
    ):
        if name in row:
            changed[name] = f"{row[name]} {' '.join(words)}"
    if "id" in row:
        changed["id"] = f"{row['id']}-{'-'.join(words)}"
    assert changed != dict(row), "this kind has fields that are not known here: make them differ"
    return changed


def holds_lists(kind: Kind) -> bool:
    """Whether a field of its rows is a list, which no cell of a CSV file can hold."""
    return any(isinstance(value, list) for row in kind.rows for value in row.values())


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as the ending of `path` says, and give the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        text = io.StringIO()
        tab = path.suffix == ".tsv"
        writer = csv.DictWriter(text, names, dialect="excel-tab" if tab else "excel")
        writer.writeheader()
        writer.writerows(rows)
        path.write_text(text.getvalue(), newline="")
    return str(path)
