"""The files of an evaluation by search: each query with its ranks, the table of forms, the worst
queries."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_core import files
from bert_core.metrics.judged import PRIMARY
from pipelines.answering.searching import Searched, as_json

if TYPE_CHECKING:
    from pipelines.corpus.retrieval_sets import RetrievalSet

QUERIES, FORMS, WORST = "predictions.parquet", "forms.json", "worst.jsonl"
WORST_DOCUMENTS = 3
"""Documents that are shown of a query that is among the worst."""


def write_searched(
    folder: Path, retrieval_set: "RetrievalSet", found: Sequence[Searched], worst: int
) -> list[Path]:
    """Write the files of what a search found; return their paths.

    Args:
        found: the full vectors first.
        worst: most queries to list as the worst.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(queries_table(retrieval_set, found[0]), sink)
    files.write_bytes(str(folder / QUERIES), sink.getvalue())
    files.write_json(str(folder / FORMS), as_json(found))
    lines = [
        json.dumps(row, ensure_ascii=False) + "\n"
        for row in worst_queries(retrieval_set, found[0], worst)
    ]
    files.write_bytes(str(folder / WORST), "".join(lines).encode())
    return [folder / QUERIES, folder / FORMS, folder / WORST]


def queries_table(retrieval_set: "RetrievalSet", found: Searched) -> pa.Table:
    """Return a row per query: its text, its metrics, the rank of each relevant document, and the
    nearest documents."""
    ids = retrieval_set.document_ids
    relevant = [
        [
            {"id": ids[place], "relevance": float(relevance), "rank": int(rank)}
            for place, relevance, rank in zip(judged.places, judged.relevance, ranks, strict=True)
        ]
        for judged, ranks in zip(retrieval_set.judgements, found.ranks, strict=True)
    ]
    nearest = [
        [{"id": ids[hit.place], "score": hit.score} for hit in hits] for hits in found.nearest
    ]
    of_relevant = pa.struct({"id": pa.string(), "relevance": pa.float64(), "rank": pa.int64()})
    of_nearest = pa.struct({"id": pa.string(), "score": pa.float64()})
    return pa.table(
        {
            "id": pa.array(retrieval_set.query_ids, pa.string()),
            "text": pa.array(retrieval_set.queries, pa.string()),
            **found.columns,
            "relevant": pa.array(relevant, pa.list_(of_relevant)),
            "nearest": pa.array(nearest, pa.list_(of_nearest)),
        }
    )


def worst_queries(
    retrieval_set: "RetrievalSet", found: Searched, most: int
) -> list[dict[str, Any]]:
    """Return the queries whose main metric is lowest, with what should have been found and what
    was; those that are right are left out."""
    faults = 1 - found.columns[PRIMARY]
    order = [place for place in np.argsort(-faults, kind="stable") if faults[place] > 0]
    documents, ids = retrieval_set.documents, retrieval_set.document_ids
    rows = []
    for place in order[:most]:
        judged, hits = retrieval_set.judgements[place], found.nearest[place]
        rows.append(
            {
                "row": int(place) + 1,
                "fault": float(faults[place]),
                "input": {
                    "id": retrieval_set.query_ids[place],
                    "text": retrieval_set.queries[place],
                },
                "wanted": {
                    ids[document]: documents[document]
                    for document in judged.places[:WORST_DOCUMENTS]
                },
                "answer": {ids[hit.place]: documents[hit.place] for hit in hits[:WORST_DOCUMENTS]},
            }
        )
    return rows
