"""Vectors of rows → an index, to be searched by meaning, by words or by both, and served.

Workers write the parts of the rows with their vectors; this process then puts them into one table,
in the order of the rows, and measures how well a search finds the nearest ones.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bert_core import files
from bert_core.checks import NonNegativeInt, PositiveInt, PositiveShare
from bert_core.errors import ConfigError, CorpusError
from bert_core.indexes.building import build_table, measured
from bert_core.indexes.record import (
    ID,
    OWN_COLUMNS,
    TABLE,
    VECTOR,
    IndexRecord,
    Language,
    write_record,
)
from bert_core.indexes.table import lancedb
from bert_core.manifest import Headline, Manifest, read_manifest
from bert_core.metrics.vector_forms import unit
from pipelines.answering.vector_files import Vectors
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.inputs import input_digest
from pipelines.runtime.outputs import local_outputs
from pipelines.runtime.progress import counted, meter, say
from pipelines.runtime.result import Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, StageConfig
from tracking.runs.recorder import DatasetInput

PARTS = "parts"


@dataclass(frozen=True, kw_only=True)
class IndexConfig(StageConfig):
    """Which rows to make an index of, and how well it must find them."""

    vectors: str = field(metadata=INPUT)
    """Folder of `raybert predict` with the vectors of the rows."""
    text_column: str | None = None
    """Column whose words can be searched too (BM25); by default only vectors can."""
    language: Language | None = "english"
    """Language of that column: words are compared by their stems, and its most frequent ones left
    out; null compares words as they are."""
    columns: tuple[str, ...] = ()
    """Columns of the rows to keep, which a search returns and filters by; by default all but the
    vectors."""
    exact_below: NonNegativeInt = 20_000
    """Below this many rows a search compares every vector. Above, it reads the nearest cells of
    compressed vectors, and compares the best in full (IVF-PQ)."""
    recall: PositiveShare = 0.95
    """Share of the 10 nearest rows that a search must find: it reads as much as that takes, which
    is measured; an index that cannot reach it compares every vector."""
    recall_queries: PositiveInt = 200
    """Rows whose own vectors are searched for to measure that."""


@dataclass(frozen=True, kw_only=True)
class IndexCounts(Counts):
    rows: int
    dimensions: int
    recall: float
    """Share of the 10 nearest rows that are found."""
    kind: str
    words: bool
    """Whether words can be searched."""

    @property
    def line(self) -> str:
        return f"{counted(self.rows, 'row')}, recall {self.recall:.3f}"

    @property
    def sentence(self) -> str:
        how = "exactly" if self.kind == "exact" else f"with a recall of {self.recall:.3f} at 10"
        return f"{counted(self.rows, 'row')} can be searched {how}."

    @property
    def headline(self) -> Headline:
        return Headline(label="recall at 10", value=f"{self.recall:.3f}")


def run(config: IndexConfig) -> Manifest:
    """Write the index of all rows, in their order."""
    lancedb()
    digest = input_digest(config.vectors, "predict")
    vectors = Vectors.of(config.vectors, read_manifest(config.vectors))
    if vectors.source is None:
        raise ConfigError(
            f"vectors: wanted vectors that name what made them, got those of {config.vectors}, "
            "which holds no vectors, or was written by an older version: predict with --task "
            "feature-extraction"
        )
    if vectors.source.space.task == "sparse-embedding":
        raise ConfigError(
            f"vectors: wanted dense ones, got sparse ones in {config.vectors}: predict with "
            "--task feature-extraction"
        )
    if vectors.source.space.how.get("pooling") == "per_token":
        raise ConfigError(
            f"vectors: wanted a vector per text, got the vectors of tokens in {config.vectors}: "
            "predict again without per_token"
        )
    inputs = [DatasetInput("vectors", digest, config.vectors)]
    return run_stage("index", config, inputs, lambda _: _index(config, vectors))


def _index(config: IndexConfig, vectors: Vectors) -> Result:
    assert vectors.source is not None
    if vectors.are_tables:
        _check_columns(config, next(vectors.tables(vectors.paths[:1])).column_names)
    schemas = _write_parts(config, vectors)
    schema = _one_schema(config, schemas)
    folder, size = config.local_folder, vectors.source.space.dimensions
    shutil.rmtree(folder / f"{TABLE}.lance", ignore_errors=True)
    rows = _rows(config, len(vectors.paths), schema)
    table = build_table(str(folder), schema, rows, config.text_column, config.language)
    if not (count := table.count_rows()):
        raise CorpusError(f"{config.vectors}: wanted at least one row, got none: predict others")
    found = measured(
        table,
        size,
        is_exact=count < config.exact_below,
        wanted=config.recall,
        queries=config.recall_queries,
    )
    if found.is_given_up:
        say(
            f"index: compressed vectors find {found.best:.3f} of the nearest rows, fewer than "
            f"{config.recall:g}: a search compares every vector instead"
        )
    record = IndexRecord(
        rows=count,
        kind=found.kind,
        effort=found.effort,
        recall=found.recall,
        recall_at=found.at,
        recall_queries=found.queries,
        columns=[name for name in schema.names if name not in OWN_COLUMNS],
        text=config.text_column,
        language=config.language if config.text_column is not None else None,
        vectors=vectors.source,
    )
    paths = [Path(write_record(str(folder), record))]
    paths += sorted(path for path in (folder / f"{TABLE}.lance").rglob("*") if path.is_file())
    shutil.rmtree(folder / PARTS)
    counts = IndexCounts(
        rows=count,
        dimensions=size,
        recall=found.recall,
        kind=found.kind,
        words=config.text_column is not None,
    )
    return Result(outputs=local_outputs(config, paths), counts=counts)


def _part(config: IndexConfig, number: int) -> str:
    return str(config.local_folder / PARTS / f"part-{number:05d}.arrow")


def _write_parts(config: IndexConfig, vectors: Vectors) -> list[pa.Schema]:
    """Write each file of vectors as a part; those of an earlier run are kept."""
    missing = [
        (number, path)
        for number, path in enumerate(vectors.paths)
        if not files.exists(_part(config, number))
    ]
    work = partial(write_part, config, vectors)
    with meter("reading vectors", len(vectors.paths), "parts") as progress:
        progress.set(len(vectors.paths) - len(missing))
        for _ in run_tasks(work, missing, config):
            progress.add()
    schemas = []
    for number in range(len(vectors.paths)):
        with pa.OSFile(_part(config, number)) as source, pa.ipc.open_file(source) as opened:
            schemas.append(opened.schema)
    return schemas


def write_part(config: IndexConfig, vectors: Vectors, item: tuple[int, str]) -> int:
    """Write the rows of one file, with vectors of length 1. Returns: their number."""
    number, path = item
    matrices = list(vectors.matrices([path]))
    if vectors.are_tables:
        rows = pa.concat_tables(list(vectors.tables([path])))
    else:
        listed = [row for chunk in vectors.rows([path]) for row in chunk]
        rows = _table_of(config, listed, path)
    size = vectors.source.space.dimensions if vectors.source is not None else 0
    matrix = np.concatenate([np.zeros((0, size), np.float32), *matrices])
    for place in np.flatnonzero(~matrix.any(axis=1) | ~np.isfinite(matrix).all(axis=1)).tolist():
        raise CorpusError(
            f"{path}, row {place + 1:,}: wanted a vector with a direction, got zeros or no "
            "numbers: leave the row out"
        )
    flat = pa.array(unit(matrix).astype(np.float32).ravel())
    table = pa.table({VECTOR: pa.FixedSizeListArray.from_arrays(flat, size)})
    for name in config.columns or rows.column_names:
        if name in rows.column_names:
            table = table.append_column(name, _plain(rows[name]))
    with files.writing(_part(config, number)) as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    return len(table)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column with its values in place of a dictionary's numbers, so that they can be
    compared."""
    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def _table_of(config: IndexConfig, rows: list[dict[str, Any]], path: str) -> pa.Table:
    """Return rows as a table with every column to keep that any of them has. Raises: CorpusError if
    a column has values of several types."""
    columns = {}
    names = dict.fromkeys(name for row in rows for name in row)
    for name in (name for name in names if not config.columns or name in config.columns):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise CorpusError(
                f"{path}: wanted one type per column, that fits all its values, got a column "
                f"{name!r} without ({error}): name the columns to keep with columns"
            ) from error
    return pa.table(columns)


def _check_columns(config: IndexConfig, names: list[str]) -> None:
    """Raise ConfigError or CorpusError for a column that is missing, or that an index cannot
    have."""
    wanted = [*config.columns, *([config.text_column] if config.text_column else [])]
    for name in wanted:
        if name not in names:
            raise ConfigError(
                f"{'columns' if name in config.columns else 'text_column'}: wanted one of "
                f"{', '.join(names)}, as in {config.vectors}, got {name!r}"
            )
    if config.columns and config.text_column not in (None, *config.columns):
        raise ConfigError(
            f"columns: wanted {config.text_column!r} among them, the text_column, got "
            f"{', '.join(config.columns)}: add it"
        )
    for name in config.columns or names:
        if not name or name in OWN_COLUMNS or "." in name or "`" in name:
            raise CorpusError(
                f"{config.vectors}: wanted no column {name!r}, since an index adds "
                f"{', '.join(OWN_COLUMNS)} and allows neither empty names nor dots or back-quotes "
                "in them: rename it before predicting, or name others with columns"
            )


def _one_schema(config: IndexConfig, schemas: list[pa.Schema]) -> pa.Schema:
    """Return the columns of all parts, with the id first. Raises: CorpusError if a column has types
    that no one type holds, or the words are no texts."""
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise CorpusError(
            f"{config.vectors}: wanted one type per column, that fits all its values, got others "
            f"({error}): name the columns to keep with columns"
        ) from error
    _check_columns(config, [name for name in schema.names if name != VECTOR])
    if config.text_column is not None:
        kind = schema.field(config.text_column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ConfigError(
                f"text_column: wanted a column of texts, got {config.text_column!r} of {kind}"
            )
    return pa.schema([pa.field(ID, pa.int64(), nullable=False), *schema])


def _rows(config: IndexConfig, parts: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all parts with their ids, which count them."""
    seen = 0
    for number in range(parts):
        with pa.memory_map(_part(config, number)) as source, pa.ipc.open_file(source) as opened:
            for index in range(opened.num_record_batches):
                batch: Any = opened.get_batch(index)
                table = pa.Table.from_batches([batch])
                for name in schema.names[1:]:
                    if name not in table.column_names:
                        table = table.append_column(name, pa.nulls(len(table)))
                ids = pa.array(range(seen, seen + len(table)), pa.int64())
                seen += len(table)
                table = table.select(schema.names[1:]).add_column(0, schema.field(0), ids)
                yield from table.cast(schema).to_batches()
