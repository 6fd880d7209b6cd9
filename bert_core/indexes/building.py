"""Makes the table of an index, and measures how well it is searched."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bert_core.indexes.record import ID, TABLE, VECTOR, Effort, Kind, Language
from bert_core.indexes.table import lancedb

if TYPE_CHECKING:
    from lancedb.table import Table

AT = 10
"""Nearest rows by which recall is measured."""
NEAR = 1e-5
"""A row that is found counts if its cosine is no further than this below the last exact one's."""
REFINES = (10, 30, 100)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How an index is searched, and how much of the nearest rows that finds."""

    kind: Kind
    effort: Effort
    recall: float
    queries: int
    at: int = AT
    best: float = 1.0
    """The highest recall of compressed vectors."""

    @property
    def is_given_up(self) -> bool:
        """Whether compressed vectors were tried in vain."""
        return self.kind == "exact" and self.best < 1


def build_table(
    folder: str,
    schema: pa.Schema,
    rows: Iterator[pa.RecordBatch],
    text: str | None,
    language: Language | None,
) -> "Table":
    """Write the rows into a new table, with an index of the words of the column `text`."""
    reader = pa.RecordBatchReader.from_batches(schema, rows)
    table: Table = lancedb().connect(folder).create_table(TABLE, reader)
    if text is not None:
        from lancedb.index import FTS

        has_stems = language is not None
        of_stems = (language or "english").capitalize()
        words = FTS(language=of_stems, stem=has_stems, remove_stop_words=has_stems)
        table.create_index(text, config=words)
    return table


def measured(table: "Table", size: int, *, is_exact: bool, wanted: float, queries: int) -> Measured:
    """Compress the vectors, unless the search is exact, and return the least effort that finds the
    wanted share of the nearest rows.

    Args:
        size: numbers of a vector.
        queries: rows, evenly spread, whose vectors are searched for; a row itself does not count.
    """
    count = table.count_rows()
    exact = Measured(kind="exact", effort=Effort(), recall=1.0, queries=0)
    if is_exact or count <= AT + 1:
        return exact
    from lancedb.index import IvfPq

    cells = max(1, round(math.sqrt(count)))
    pieces = size // 4 if size % 4 == 0 else size
    table.create_index(
        VECTOR,
        config=IvfPq(distance_type="cosine", num_partitions=cells, num_sub_vectors=pieces),
    )
    places = np.unique(np.linspace(0, count - 1, min(queries, count)).astype(int)).tolist()
    sampled = table.take_offsets(places).select([ID, VECTOR]).to_arrow()
    flat = sampled[VECTOR].combine_chunks().flatten().to_numpy()
    asked = list(zip(sampled[ID].to_pylist(), flat.reshape(-1, size), strict=True))
    last = [_cosines(table, *each, None)[-1] for each in asked]
    best = 0.0
    for effort in _efforts(cells):
        found = [_cosines(table, *each, effort) for each in asked]
        hits = [(own >= least - NEAR).sum() for own, least in zip(found, last, strict=True)]
        recall = float(np.minimum(hits, AT).sum() / (AT * len(asked)))
        best = max(best, recall)
        if recall >= wanted:
            return Measured(kind="ivf_pq", effort=effort, recall=recall, queries=len(asked))
    return Measured(kind="exact", effort=Effort(), recall=1.0, queries=0, best=best)


def _efforts(cells: int) -> Iterator[Effort]:
    """Yield efforts, least first: twice as many cells, and more rows that are compared in full."""
    probes = max(1, cells // 64)
    while True:
        for refine in REFINES:
            yield Effort(nprobes=min(probes, cells), refine_factor=refine)
        if probes >= cells:
            return
        probes *= 2


def _cosines(table: "Table", row: int, vector: np.ndarray, effort: Effort | None) -> np.ndarray:
    """Return the cosines of the rows nearest to a row, without itself, highest first.

    Args:
        effort: None for an exact search.
    """
    search: Any = table.search(vector, vector_column_name=VECTOR)  # its type is too wide
    search = search.distance_type("cosine").limit(AT + 1).select([ID, "_distance"])
    if effort is None:
        search = search.bypass_vector_index()
    else:
        search = search.nprobes(effort.nprobes).refine_factor(effort.refine_factor)
    found = search.to_arrow()
    others = found[ID].to_numpy() != row
    return 1 - found["_distance"].to_numpy()[others][:AT]
