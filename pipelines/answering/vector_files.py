"""The vectors that `raybert predict` has written: what made them, and their numbers in chunks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core import files
from bert_core.errors import ConfigError, FormatError
from bert_core.inference.vector_spaces import VectorSource, read_source
from bert_core.manifest import Manifest
from bert_core.typed import parse_json
from pipelines.answering.parts import ROWS
from pipelines.corpus.readers import parquet
from pipelines.runtime.progress import say

VECTOR = "vector"
"""Name of the column of vectors, after the prefix of a prediction."""
SOURCE = "vectors.json"
"""File of a prediction that says what made its vectors."""
METADATA = b"raybert.vectors"
"""The same in the metadata of each Parquet file's schema."""
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Vectors:
    """A finished prediction of vectors: its files, and the columns that it added."""

    folder: str
    paths: list[str]
    vector: str
    answer: str
    source: VectorSource | None
    """What made them; None for a prediction by a version that did not record it."""
    recorded: Mapping[str, Any]
    """What such a prediction's manifest says of its model."""

    @classmethod
    def of(cls, folder: str, manifest: Manifest) -> "Vectors":
        names = sorted(name for name in manifest.outputs if name.startswith(f"{ROWS}/"))
        config, source = manifest.config, None
        if SOURCE in manifest.outputs:
            path = files.join(folder, SOURCE)
            source = read_source(parse_json(files.read_bytes(path), path), path)
        return cls(
            folder=folder,
            paths=[files.join(folder, name) for name in names],
            vector=f"{config['prefix']}{VECTOR}",
            answer=config["answer_column"],
            source=source,
            recorded={"model": manifest.inputs["model"]}
            | {name: config[name] for name in ("task", "options")},
        )

    def check_comparable(self, queries: "Vectors") -> None:
        """Check that these vectors may be compared with those of `queries`: they are of one space
        (`bert_core.inference.vector_spaces`).

        If one prediction has no record of what made its vectors, its model, task and options are
        compared, and a line is printed.
        Raises: ConfigError, with what differs.
        """
        if self.source is not None and queries.source is not None:
            mine, its = self.source.space, queries.source.space
            if (found := mine.difference(its)) is not None:
                name, wanted, got = found
                raise ConfigError(
                    f"{queries.folder}: wanted vectors of the space {mine.digest[:12]}, as in "
                    f"{self.folder}, got those of {its.digest[:12]}: the {name} is {got} instead "
                    f"of {wanted}: predict one of them again as the other was made"
                )
            return
        old = self if self.source is None else queries
        say(
            f"{old.folder}: it was written before predictions said what made their vectors, so "
            "only its model, task and options are compared"
        )
        for name, mine_of in self.recorded.items():
            if mine_of != (of_queries := queries.recorded[name]):
                raise ConfigError(
                    f"{queries.folder}: wanted vectors by the {name} of {self.folder}, "
                    f"{_shown(mine_of)}, got those by {_shown(of_queries)}: predict one of them "
                    f"again with the {name} of the other"
                )

    def matrices(self, paths: Sequence[str]) -> Iterator[Float[np.ndarray, "rows size"]]:
        """Yield the vectors in these files, scaled to length 1, in chunks of rows.

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
        """Yield the rows of JSONL files as they were before the prediction, in chunks."""
        for path in paths:
            for rows in _lines(path):
                yield [{k: v for k, v in row.items() if k not in self.added} for row in rows]

    def tables(self, paths: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the rows of Parquet files as they were before the prediction, in chunks.

        The first chunk of a file is empty and has its columns.
        """
        for path in paths:
            with parquet.open_parquet(path) as opened:
                schema = opened.schema_arrow
                kept = [name for name in schema.names if name not in self.added]
                yield schema.empty_table().select(kept)
                for batch in opened.iter_batches(ROWS_AT_ONCE, columns=kept):
                    yield pa.Table.from_batches([batch]).select(kept)

    @property
    def are_tables(self) -> bool:
        """Whether the files are Parquet, with the same columns; if not, they are JSONL."""
        return self.paths[0].endswith(".parquet")

    @property
    def added(self) -> tuple[str, str]:
        """Return the columns that the prediction added."""
        return self.vector, self.answer


def _matrices(path: str, column: str) -> Iterator[Float[np.ndarray, "rows size"]]:
    """Yield the vectors in a file's column, in chunks. Raises: KeyError if the file has no such
    column."""
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


def _shown(value: Any) -> str:
    """Return the beginning of a digest, or a value of a config."""
    if isinstance(value, str):
        return value[:12]
    return "the model's own" if not value else json.dumps(value)
