"""Vectors of rows + vectors of queries → the nearest rows to every query, by cosine.

Both are folders written by `raybert predict`, which embeds any number of texts with any number of
workers. The search is exact: every query is compared with every row, in chunks of rows. A worker
holds one part of the queries and writes it to one file.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core import files
from bert_core.checks import PositiveInt
from bert_core.errors import ConfigError, CorpusError, FormatError
from bert_core.manifest import Manifest, Output, read_manifest
from pipelines.answering.parts import ROWS
from pipelines.answering.vector_files import Vectors
from pipelines.corpus.readers import parquet
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.inputs import input_digest
from pipelines.runtime.progress import counted, meter
from pipelines.runtime.result import Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, StageConfig
from tracking.runs.recorder import DatasetInput

RESULTS = "results"
"""Name of the column of nearest rows."""
QUERIES_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class SearchConfig(StageConfig):
    """Which queries to search for in which rows."""

    corpus: str = field(metadata=INPUT)
    """Folder of `raybert predict` with the vectors of the rows to search."""
    queries: str = field(metadata=INPUT)
    """Folder of `raybert predict` with the vectors of the queries, by the same model."""
    top_k: PositiveInt = 10
    """Number of rows to return per query, nearest first."""
    columns: tuple[str, ...] = ()
    """Columns of a row to return; by default all but its vector."""


@dataclass(frozen=True, kw_only=True)
class SearchCounts(Counts):
    queries: int
    rows: int
    """Rows of the corpus."""

    @property
    def line(self) -> str:
        return f"{self._queries}, {counted(self.rows, 'row')}"

    @property
    def sentence(self) -> str:
        were = "was" if self.queries == 1 else "were"
        return f"{self._queries} {were} compared with {counted(self.rows, 'row')}."

    @property
    def _queries(self) -> str:
        return counted(self.queries, "query", "queries")


def run(config: SearchConfig) -> Manifest:
    """Write every query with its nearest rows, in the order of the queries."""
    inputs = [
        DatasetInput(name, input_digest(folder, "predict"), folder)
        for name, folder in (("corpus", config.corpus), ("queries", config.queries))
    ]
    corpus, queries = (
        Vectors.of(folder, read_manifest(folder)) for folder in (config.corpus, config.queries)
    )
    corpus.check_comparable(queries)
    return run_stage("search", config, inputs, lambda _: _search(config, corpus, queries))


def _search(config: SearchConfig, corpus: Vectors, queries: Vectors) -> Result:
    names: list[str] = []
    query_count = searched = 0
    schema = _schema_of(config, corpus) if queries.are_tables and not corpus.are_tables else None
    work = partial(_make_part, config, corpus, queries, schema)
    with meter("searching", len(queries.paths), "parts") as progress:
        for _, part in run_tasks(work, list(enumerate(queries.paths)), config):
            names.append(part["name"])
            query_count, searched = query_count + part["queries"], part["rows"]
            progress.add()
    outputs = {name: Output.of(files.join(config.output, name)) for name in sorted(names)}
    return Result(outputs=outputs, counts=SearchCounts(queries=query_count, rows=searched))


def _make_part(
    config: SearchConfig,
    corpus: Vectors,
    queries: Vectors,
    schema: pa.Schema | None,
    item: tuple[int, str],
) -> dict[str, Any]:
    """Write the results of a part of the queries.

    Args:
        schema: of the rows to return, if they come from JSONL and go into a table.
    """
    number, path = item
    vectors = list(queries.matrices([path]))
    query_vectors = np.concatenate(vectors) if vectors else np.zeros((0, 1), np.float32)
    scores, places, searched = _nearest(config, corpus, query_vectors)
    kept, flat = np.unique(places, return_inverse=True)
    indices: Int[np.ndarray, "queries k"] = flat.reshape(places.shape)
    name = f"{ROWS}/part-{number:05d}.{'parquet' if queries.are_tables else 'jsonl'}"
    with files.writing(files.join(config.output, name)) as sink:
        if queries.are_tables:
            import pyarrow.parquet as pq

            with parquet.open_parquet(path) as opened:
                table = opened.read()
            added = [name for name in queries.added if name in table.column_names]
            table = table.drop_columns(added)
            _check_free(table.column_names, path)
            if schema is None:
                found = _table_at(config, corpus, kept)
            else:
                found = _table_of(config, _rows_at(config, corpus, kept), schema)
            results = _column(config, scores, found, indices)
            pq.write_table(table.append_column(RESULTS, results), sink)
        else:
            if corpus.are_tables:
                nearest = _table_at(config, corpus, kept).to_pylist()
            else:
                nearest = _rows_at(config, corpus, kept)
            rows = (row for chunk in queries.rows([path]) for row in chunk)
            pairs = zip(scores.tolist(), indices.tolist(), strict=True)
            for row, pair in zip(rows, pairs, strict=True):
                _check_free(row, path)
                result = [
                    {"score": score, "row": nearest[place]}
                    for score, place in zip(*pair, strict=True)
                ]
                line = json.dumps(row | {RESULTS: result}, ensure_ascii=False, default=str)
                sink.write(f"{line}\n".encode())
    return {"name": name, "queries": len(query_vectors), "rows": searched}


def _check_free(columns: Collection[str], path: str) -> None:
    if RESULTS in columns:
        raise CorpusError(
            f"{path}: wanted queries without a column {RESULTS!r}, where the nearest rows go: "
            "rename it before predicting"
        )


def _schema_of(config: SearchConfig, corpus: Vectors) -> pa.Schema:
    """Return the columns to return from a JSONL corpus, each with a type that fits all its rows, so
    that all parts of the results have the same columns.

    Raises: CorpusError if no type fits a column; ConfigError if there is no such column.
    """
    import pyarrow.parquet as pq

    schema = pa.schema([])
    for rows in corpus.rows(corpus.paths):
        for name in dict.fromkeys(name for row in rows for name in row):
            if not config.columns or name in config.columns:
                with _fitting(config, name):
                    column = pa.schema([(name, pa.array([row.get(name) for row in rows]).type)])
                    schema = pa.unify_schemas([schema, column], promote_options="permissive")
    _check_columns(config, schema.names)
    schema = pa.schema([schema.field(name) for name in config.columns or schema.names])
    for column in schema:
        with _fitting(config, column.name):  # an object that is always empty has no type in Parquet
            pq.write_metadata(pa.schema([column]), BytesIO())
    return schema


def _table_of(config: SearchConfig, rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table. Raises: CorpusError if a value does not fit its column."""
    columns = []
    for column in schema:
        with _fitting(config, column.name):
            columns.append(pa.array([row.get(column.name) for row in rows], column.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _taken(config: SearchConfig, rows: pa.Table, indices: Int[np.ndarray, "picked"]) -> pa.Table:
    """Return the rows at these indices. Raises: CorpusError if Arrow cannot copy the rows of a
    column."""
    columns = []
    for name in rows.column_names:
        with _fitting(config, name):
            columns.append(rows.column(name).take(pa.array(indices)))
    return pa.Table.from_arrays(columns, schema=rows.schema)


@contextmanager
def _fitting(config: SearchConfig, column: str) -> Iterator[None]:
    """Turn Arrow's errors in the block into a CorpusError: the column does not fit into a table."""
    try:
        yield
    except (pa.ArrowException, OverflowError) as error:
        raise CorpusError(
            f"{config.corpus}: wanted one type per column, as a table needs, that fits all its "
            f"values, got a column {column!r} without ({error}): name others with columns, or "
            "predict the queries from JSONL"
        ) from error


def _column(
    config: SearchConfig,
    scores: Float[np.ndarray, "queries k"],
    rows: pa.Table,
    indices: Int[np.ndarray, "queries k"],
) -> pa.ChunkedArray:
    """Return the nearest rows of each query as a column, with the types that they have in
    `rows`."""
    count, k = indices.shape
    chunks = []
    for start in range(0, max(count, 1), QUERIES_AT_ONCE):
        here = slice(start, start + QUERIES_AT_ONCE)
        nearest = _taken(config, rows, indices[here].ravel()).to_struct_array().combine_chunks()
        cosines = pa.array(scores[here].ravel().astype(np.float64))
        pairs = pa.StructArray.from_arrays([cosines, nearest], names=["score", "row"])
        ends = k * np.arange(len(indices[here]) + 1, dtype=np.int32)
        chunks.append(pa.ListArray.from_arrays(pa.array(ends), pairs))
    return pa.chunked_array(chunks)


def _nearest(
    config: SearchConfig, corpus: Vectors, queries: Float[np.ndarray, "queries size"]
) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"], int]:
    """Return the cosines and positions of the nearest rows, nearest first, and the number of rows
    searched.

    Among equally near rows, any may be left out.
    """
    scores = np.zeros((len(queries), 0), dtype=np.float32)
    places = np.zeros((len(queries), 0), dtype=np.int64)
    seen = 0
    for rows in corpus.matrices(corpus.paths):
        here = np.arange(seen, seen + len(rows))
        seen += len(rows)
        if len(queries) and rows.shape[1] != queries.shape[1]:
            raise FormatError(
                f"{config.corpus}: wanted vectors of {queries.shape[1]} numbers, as the queries "
                f"have, got {rows.shape[1]}: predict both again"
            )
        chunks = range(0, len(queries), QUERIES_AT_ONCE)
        best = []
        for chunk in (slice(start, start + QUERIES_AT_ONCE) for start in chunks):
            new_scores = queries[chunk] @ rows.T
            new_places = np.broadcast_to(here, new_scores.shape)
            all_scores = np.concatenate([scores[chunk], new_scores], 1)
            all_places = np.concatenate([places[chunk], new_places], 1)
            best.append(best_of(all_scores, all_places, config.top_k))
        if best:
            scores, places = (np.concatenate(parts) for parts in zip(*best, strict=True))
    return scores, places, seen


def best_of(
    scores: Float[np.ndarray, "queries rows"], places: Int[np.ndarray, "queries rows"], k: int
) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
    """Return the `k` highest scores of each query with their positions, highest first."""
    if scores.shape[1] > k:
        kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        scores, places = (np.take_along_axis(array, kept, 1) for array in (scores, places))
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)


def _rows_at(
    config: SearchConfig, corpus: Vectors, places: Int[np.ndarray, "places"]
) -> list[dict[str, Any]]:
    """Return the rows of a JSONL corpus at these positions, with only the columns to return.

    Args:
        places: positions in the corpus, ascending.
    Raises: ConfigError if a row has no such column.
    """
    picked: list[dict[str, Any]] = []
    start = 0
    for rows in corpus.rows(corpus.paths):
        for place in places[(places >= start) & (places < start + len(rows))].tolist():
            row = rows[place - start]
            _check_columns(config, row)
            picked.append({name: row[name] for name in config.columns or row})
        start += len(rows)
    return picked


def _table_at(config: SearchConfig, corpus: Vectors, places: Int[np.ndarray, "places"]) -> pa.Table:
    """Do the same as `_rows_at`, for a corpus in Parquet."""
    picked: list[pa.Table] = []
    start = 0
    for rows in corpus.tables(corpus.paths):
        _check_columns(config, rows.column_names)
        here = places[(places >= start) & (places < start + len(rows))] - start
        picked.append(_taken(config, rows.select(config.columns or rows.column_names), here))
        start += len(rows)
    return pa.concat_tables(picked).combine_chunks()


def _check_columns(config: SearchConfig, present: Collection[str]) -> None:
    """Raise ConfigError if a column to return is missing."""
    if absent := [name for name in config.columns if name not in present]:
        raise ConfigError(
            f"columns: wanted some of {', '.join(present)}, got {absent[0]!r}: name columns "
            f"of the rows in {config.corpus}"
        )
