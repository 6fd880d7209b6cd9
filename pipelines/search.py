"""Vectors of rows + vectors of queries → the nearest rows to every query, by cosine.

Both are folders written by `raybert predict`, which embeds any number of texts with any number of
workers. The search is exact: every query is compared with every row, in chunks of rows. A worker
holds one part of the queries and writes it to one file.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core import files
from bert_core.checks import PositiveInt
from bert_core.errors import ConfigError, CorpusError, FormatError
from bert_core.manifest import Manifest, Output, read_manifest
from pipelines.answering.parts import ROWS
from pipelines.corpus.readers import parquet
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import counted, meter, say
from pipelines.runtime.stage import INPUT, Result, StageConfig, input_digest, run_stage
from tracking.runs import DatasetInput

VECTOR = "vector"
"""Name of the column of vectors, after the prefix of a prediction."""
RESULTS = "results"
"""Name of the column of nearest rows."""
ROWS_AT_ONCE, QUERIES_AT_ONCE = 8192, 1024


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


@dataclass(frozen=True)
class Vectors:
    """A finished prediction of vectors: its files, and the columns that it added."""

    paths: list[str]
    vector: str
    answer: str

    @classmethod
    def of(cls, folder: str, manifest: Manifest) -> "Vectors":
        names = sorted(name for name in manifest.outputs if name.startswith(f"{ROWS}/"))
        config = manifest.config
        return cls(
            [files.join(folder, name) for name in names],
            f"{config['prefix']}{VECTOR}",
            config["answer_column"],
        )

    def matrices(self, paths: Sequence[str]) -> Iterator[Float[np.ndarray, "rows size"]]:
        """The vectors of files, scaled to length 1, in chunks of rows.

        Raises: FormatError if a file has none.
        """
        for path in paths:
            try:
                for matrix in _matrices(path, self.vector):
                    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
                    yield matrix / np.maximum(lengths, np.float32(1e-12))
            except KeyError as error:
                raise FormatError(
                    f"{path}: wanted vectors in a column {self.vector!r}, got no such column: "
                    "predict with --task feature-extraction"
                ) from error

    def rows(self, paths: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """The rows of files as they were before the prediction, in chunks."""
        for path in paths:
            if path.endswith(".parquet"):
                with parquet.open_parquet(path) as opened:
                    kept = [name for name in opened.schema_arrow.names if name not in self.added]
                    for batch in opened.iter_batches(ROWS_AT_ONCE, columns=kept):
                        yield batch.to_pylist()
            else:
                for rows in _lines(path):
                    yield [{k: v for k, v in row.items() if k not in self.added} for row in rows]

    @property
    def added(self) -> tuple[str, str]:
        """The columns that the prediction added."""
        return self.vector, self.answer


def _matrices(path: str, column: str) -> Iterator[Float[np.ndarray, "rows size"]]:
    """Raises: KeyError if the file has no such column."""
    if not path.endswith(".parquet"):
        for rows in _lines(path):
            yield np.array([row[column] for row in rows], dtype=np.float32)
        return
    with parquet.open_parquet(path) as opened:
        if column not in opened.schema_arrow.names:
            raise KeyError(column)
        for batch in opened.iter_batches(ROWS_AT_ONCE, columns=[column]):
            flat = batch.column(0).flatten().to_numpy(zero_copy_only=False)
            yield flat.reshape(len(batch), -1)


def _lines(path: str) -> Iterator[list[dict[str, Any]]]:
    with files.open_stream(path) as lines:
        while chunk := list(islice(lines, ROWS_AT_ONCE)):
            yield list(map(json.loads, chunk))


def run(config: SearchConfig) -> Manifest:
    """Write every query with its nearest rows, in the order of the queries."""
    inputs = [
        DatasetInput(name, input_digest(folder, "predict"), folder)
        for name, folder in (("corpus", config.corpus), ("queries", config.queries))
    ]
    corpus, queries = read_manifest(config.corpus), read_manifest(config.queries)
    for name, of_corpus, of_queries in (
        ("model", corpus.inputs["model"], queries.inputs["model"]),
        *((name, corpus.config[name], queries.config[name]) for name in ("task", "options")),
    ):
        if of_corpus != of_queries:
            raise ConfigError(
                f"{config.queries}: wanted vectors by the {name} of {config.corpus}, "
                f"{_shown(of_corpus)}, got those by {_shown(of_queries)}: predict one of them "
                f"again with the {name} of the other"
            )
    parts = Vectors.of(config.corpus, corpus), Vectors.of(config.queries, queries)
    return run_stage("search", config, inputs, lambda _: _search(config, *parts))


def _shown(value: Any) -> str:
    """The beginning of a digest, or a value of a config."""
    if isinstance(value, str):
        return value[:12]
    return "the model's own" if not value else json.dumps(value)


def _search(config: SearchConfig, corpus: Vectors, queries: Vectors) -> Result:
    names: list[str] = []
    query_count = searched = 0
    work = partial(_make_part, config, corpus, queries)
    with meter("searching", len(queries.paths), "parts") as progress:
        for _, part in run_tasks(work, list(enumerate(queries.paths)), config):
            names.append(part["name"])
            query_count, searched = query_count + part["queries"], part["rows"]
            progress.add()
    folder = files.join(config.output, ROWS)
    among = counted(searched, "row")
    say(f"search: {counted(query_count, 'query', 'queries')} among {among}, in {folder}")
    outputs = {name: Output.of(files.join(config.output, name)) for name in sorted(names)}
    return Result(outputs=outputs, counts={"queries": query_count, "rows": searched})


def _make_part(
    config: SearchConfig, corpus: Vectors, queries: Vectors, item: tuple[int, str]
) -> dict[str, Any]:
    number, path = item
    vectors = list(queries.matrices([path]))
    query_vectors = np.concatenate(vectors) if vectors else np.zeros((0, 1), np.float32)
    scores, places, searched = _nearest(config, corpus, query_vectors)
    rows_by_place = _rows_at(config, corpus, np.unique(places))
    results = [
        [{"score": score, "row": rows_by_place[place]} for score, place in zip(*pair, strict=True)]
        for pair in zip(scores.tolist(), places.tolist(), strict=True)
    ]
    is_table = path.endswith(".parquet")
    name = f"{ROWS}/part-{number:05d}.{'parquet' if is_table else 'jsonl'}"
    with files.writing(files.join(config.output, name)) as sink:
        if is_table:
            import pyarrow.parquet as pq

            with parquet.open_parquet(path) as opened:
                table = opened.read()
            added = [name for name in queries.added if name in table.column_names]
            table = table.drop_columns(added)
            _check_free(table.column_names, path)
            pq.write_table(table.append_column(RESULTS, _column(results, path)), sink)
        else:
            rows = (row for chunk in queries.rows([path]) for row in chunk)
            for row, result in zip(rows, results, strict=True):
                _check_free(row, path)
                line = json.dumps(row | {RESULTS: result}, ensure_ascii=False, default=str)
                sink.write(f"{line}\n".encode())
    return {"name": name, "queries": len(query_vectors), "rows": searched}


def _check_free(columns: Collection[str], path: str) -> None:
    if RESULTS in columns:
        raise CorpusError(
            f"{path}: wanted queries without a column {RESULTS!r}, where the nearest rows go: "
            "rename it before predicting"
        )


def _column(results: list[Any], path: str) -> pa.Array:
    """Raises: CorpusError if a column has values of different types in the rows found."""
    try:
        return pa.array(results)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise CorpusError(
            f"{path}: wanted one type per column, as a table needs, got corpus rows that differ "
            f"({error}): set columns, or predict the queries from JSONL"
        ) from error


def _nearest(
    config: SearchConfig, corpus: Vectors, queries: Float[np.ndarray, "queries size"]
) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"], int]:
    """Cosines and places of the nearest rows, nearest first, and the number of rows searched.

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
    """The `k` highest scores of each query with their places, highest first."""
    if scores.shape[1] > k:
        kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        scores, places = (np.take_along_axis(array, kept, 1) for array in (scores, places))
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)


def _rows_at(
    config: SearchConfig, corpus: Vectors, places: Int[np.ndarray, "places"]
) -> dict[int, dict[str, Any]]:
    """The corpus rows at these places, with the columns to return.

    Raises: ConfigError if a row has no such column.
    """
    rows_by_place: dict[int, dict[str, Any]] = {}
    start = 0
    for rows in corpus.rows(corpus.paths):
        for place in places[(places >= start) & (places < start + len(rows))].tolist():
            row = rows[place - start]
            if absent := [name for name in config.columns if name not in row]:
                raise ConfigError(
                    f"columns: wanted some of {', '.join(row)}, got {absent[0]!r}: name columns "
                    f"of the rows in {config.corpus}"
                )
            rows_by_place[place] = {name: row[name] for name in config.columns or row}
        start += len(rows)
    return rows_by_place
