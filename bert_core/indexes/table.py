"""Opens an index and searches it."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core.errors import FormatError, InputError, ResourceError
from bert_core.indexes.filters import Filter, expression
from bert_core.indexes.fusion import fused
from bert_core.indexes.record import ID, TABLE, VECTOR, Effort, IndexRecord, read_record
from bert_core.manifest import Output, read_manifest
from bert_core.metrics.vector_forms import unit

if TYPE_CHECKING:
    from lancedb.table import Table

FUSED_AT_LEAST = 50
"""Rows of each ranking that are fused, at least."""


@dataclass(frozen=True)
class Hit:
    """A row that was found."""

    number: int
    """Its id: the row's number among all rows."""
    score: float
    """The cosine, BM25's score, or the sum of reciprocal ranks."""
    cosine: float | None = None
    bm25: float | None = None
    """The scores of each step; None if it did not find the row."""


def lancedb() -> Any:
    """Return the package that holds indexes. Raises: ResourceError if it is not installed."""
    try:
        return import_module("lancedb")
    except ImportError as error:
        raise ResourceError(
            "lancedb: wanted this package, which holds indexes, got none: run `pip install "
            "--constraint constraints.txt '.[search]'`"
        ) from error


class Index:
    """An index in a folder of this machine. Safe to call from several threads."""

    def __init__(self, folder: str | Path, *, checked: bool = True) -> None:
        """Open the index.

        Args:
            checked: read every file and compare it with the manifest, since LanceDB does not notice
                a changed byte.
        Raises: FormatError if it is incomplete, damaged, or was made by newer code; ResourceError
            without LanceDB.
        """
        self.folder = str(folder)
        manifest = read_manifest(self.folder)
        if checked:
            for name, output in manifest.outputs.items():
                _check(Path(self.folder, name), output)
        self.digest = manifest.digest
        self.record: IndexRecord = read_record(self.folder)
        self._table: Table = lancedb().connect(self.folder).open_table(TABLE)
        self.schema: pa.Schema = self._table.schema

    @property
    def space(self) -> str:
        """Return the digest of the space of its vectors."""
        return self.record.vectors.space.digest

    def filter(self, conditions: Filter | None) -> str | None:
        """Return a filter as `nearest` and `by_words` take it. Raises: InputError."""
        return expression(conditions or {}, self.schema, self.record.columns)

    def nearest(
        self, vector: Float[np.ndarray, "size"], top_k: int, where: str | None = None,
        effort: Effort | None = None, *, exact: bool = False,
    ) -> list[Hit]:  # fmt: skip
        """Return the rows whose vectors have the highest cosines, highest first; of equal ones the
        first row.

        Args:
            effort: how much to read; None takes what was measured.
            exact: compare every vector.
        Raises: InputError for a vector of another length, or without a direction.
        """
        size = self.record.vectors.space.dimensions
        if vector.shape != (size,):
            raise InputError(f"wanted vectors of {size} numbers, got {vector.shape[-1]}")
        if not np.isfinite(vector).all() or not vector.any():
            raise InputError("wanted finite numbers that are not all 0, got a vector without them")
        # NOTE: "cosine" of an approximate index gives no cosine unless rows are refined (LanceDB
        # 0.40: about twice 1 - cosine), so that they always are.
        effort = effort or self.record.effort
        asked = unit(vector).astype(np.float32)
        search: Any = self._table.search(asked, vector_column_name=VECTOR)  # its type is too wide
        search = search.distance_type("cosine").limit(top_k).select([ID, "_distance"])
        if exact or self.record.kind == "exact":
            search = search.bypass_vector_index()
        else:
            search = search.nprobes(effort.nprobes).refine_factor(effort.refine_factor)
        if where is not None:
            search = search.where(where, prefilter=True)
        found = search.to_arrow()
        cosines = 1 - found["_distance"].to_numpy().astype(np.float64)
        hits = zip(found[ID].to_pylist(), cosines.tolist(), strict=True)
        return [Hit(number, cosine, cosine=cosine) for number, cosine in _sorted(hits)]

    def by_words(self, text: str, top_k: int, where: str | None = None) -> list[Hit]:
        """Return the rows with the highest BM25 scores for the words of a text.

        Raises: InputError if the index has no words.
        """
        if self.record.text is None:
            raise InputError(
                "wanted an index with words, this one has only vectors: make it again with "
                "text_column"
            )
        search = self._table.search(text, query_type="fts", fts_columns=self.record.text)
        search = search.limit(top_k).select([ID, "_score"])
        if where is not None:
            search = search.where(where, prefilter=True)
        found = search.to_arrow()
        hits = zip(found[ID].to_pylist(), found["_score"].to_pylist(), strict=True)
        return [Hit(number, score, bm25=score) for number, score in _sorted(hits)]

    def hybrid(
        self, vector: Float[np.ndarray, "size"], text: str, top_k: int, where: str | None = None
    ) -> list[Hit]:
        """Return the rows that both rankings have high, by reciprocal rank fusion."""
        depth = max(top_k, FUSED_AT_LEAST)
        dense, words = self.nearest(vector, depth, where), self.by_words(text, depth, where)
        cosines = {hit.number: hit.cosine for hit in dense}
        scores = {hit.number: hit.bm25 for hit in words}
        rankings = [[hit.number for hit in hits] for hits in (dense, words)]
        return [
            Hit(number, score, cosines.get(number), scores.get(number))
            for number, score in fused(rankings, top_k)
        ]

    def rows(self, numbers: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return rows by their ids, in this order, with these columns. Raises: InputError for a
        column that is not there."""
        if absent := [name for name in columns if name not in self.record.columns]:
            known = ", ".join(self.record.columns)
            raise InputError(f"columns: wanted some of {known}, got {absent[0]!r}")
        if not numbers:
            return []
        # An id is the row's place in the table, which is never changed.
        found = self._table.take_offsets(list(dict.fromkeys(numbers))).select(
            [ID, *dict.fromkeys(columns)]
        )
        by_id = {row.pop(ID): row for row in found.to_arrow().to_pylist()}
        return [by_id[number] for number in numbers]


def _sorted(hits: Any) -> list[tuple[int, float]]:
    return sorted(hits, key=lambda hit: (-hit[1], hit[0]))


def _check(path: Path, wanted: Output) -> None:
    if not path.exists() or Output.of(str(path)) != wanted:
        what = "other contents" if path.exists() else "no such file"
        raise FormatError(
            f"{path}: wanted the file that the index was written with, got {what}: copy it again, "
            "or run `raybert index` again with --force"
        )
