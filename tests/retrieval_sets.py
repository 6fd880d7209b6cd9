"""A retrieval set of a few texts, written in the layouts of the field."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENTS = [
    {"_id": "d1", "title": "the sea", "text": "the sea is blue"},
    {"_id": "d2", "title": "", "text": "a tree is a tree"},
    {"_id": "d3", "title": "a sea", "text": "a blue tree is the sea"},
    {"_id": "d10", "title": "", "text": "is is is"},
]
QUERIES = [
    {"_id": "q1", "text": "blue sea"},
    {"_id": "q2", "text": "a tree"},
    {"_id": "q3", "text": "is the"},
]
QRELS = {
    "test": [("q1", "d1", 2), ("q1", "d3", 1), ("q2", "d2", 1)],
    "train": [("q3", "d10", 1)],
}
READ = ["the sea the sea is blue", "a tree is a tree", "a sea a blue tree is the sea", "is is is"]
"""The documents as they are read, each after its title."""


def beir(folder: Path, qrels: Mapping[str, list[tuple[str, str, int]]] = QRELS) -> Path:
    """Write BEIR's layout."""
    (folder / "qrels").mkdir(parents=True)
    lines(folder / "corpus.jsonl", DOCUMENTS)
    lines(folder / "queries.jsonl", QUERIES)
    for split, rows in qrels.items():
        table = "".join(f"{q}\t{d}\t{score}\n" for q, d, score in rows)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{table}")
    return folder


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def judged(split: str, *, score: bool = True) -> list[dict[str, Any]]:
    """The judgements of a split as rows."""
    return [
        {"query-id": q, "corpus-id": d} | ({"score": value} if score else {})
        for q, d, value in QRELS[split]
    ]
