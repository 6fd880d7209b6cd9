"""Which passages near a query are its negatives: those that are not too near. Pure functions, but
for the passages' files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int, UInt64

from bert_core.checks import NonNegativeFloat, PositiveInt, Range, Share, check_fields
from bert_core.errors import ConfigError
from pipelines.corpus.readers import parquet

TEXT, VECTOR, DIGEST = "text", "vector", "digest"
"""Columns of a file of passages."""
ROWS_AT_ONCE, QUERIES_AT_ONCE = 8192, 1024


@dataclass(frozen=True, kw_only=True)
class NearnessConfig:
    """Which passages are too near to a query, or too far from it, to be its negatives."""

    first_rank: PositiveInt = 1
    """Rank of the nearest passage that may be drawn, without those that belong to the query."""
    last_rank: PositiveInt = 100
    """Rank of the farthest one."""
    margin: NonNegativeFloat | None = None
    """How far the cosine of a negative must be below that of the row's own passage."""
    relative_margin: Share | None = None
    """The same as a share of the own passage's cosine: 0.05 draws none above 95 % of it (de Souza
    Moreira et al. 2024, NV-Retriever)."""
    most: Annotated[float, Range(least=-1)] | None = None
    """Highest cosine of a negative."""
    least: Annotated[float, Range(most=1)] | None = None
    """Lowest cosine of a negative."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="near.")
        if self.last_rank < self.first_rank:
            raise ConfigError(
                f"near.last_rank: wanted at least first_rank, {self.first_rank}, got "
                f"{self.last_rank}"
            )


@dataclass(frozen=True)
class Candidates:
    """The passages near a query that may be drawn, nearest first."""

    places: Int[np.ndarray, "candidates"]
    """Their indices among the passages that were found."""
    too_near: int
    """How many within the ranks are nearer than allowed."""


def candidates(
    scores: Float[np.ndarray, "found"],
    digests: UInt64[np.ndarray, "found"],
    own_score: float,
    excluded: UInt64[np.ndarray, "_"],
    near: NearnessConfig,
) -> Candidates:
    """Return which of the passages found for a query may be its negatives.

    Args:
        scores: cosines of the passages with the query, descending.
        digests: of the passages' texts.
        own_score: the cosine of the row's own passage.
        excluded: digests of the texts that belong to the query, and of the query itself.
    """
    others = np.flatnonzero(~np.isin(digests, excluded))
    ranked = others[near.first_rank - 1 : near.last_rank]
    limit = np.inf if near.most is None else near.most
    if near.margin is not None:
        limit = min(limit, own_score - near.margin)
    if near.relative_margin is not None:
        limit = min(limit, own_score - near.relative_margin * abs(own_score))
    fits = scores[ranked] <= limit
    too_near = int((~fits).sum())
    if near.least is not None:
        fits &= scores[ranked] >= near.least
    return Candidates(ranked[fits], too_near)


def belonging(query: int, relevant: UInt64[np.ndarray, "pairs 2"]) -> UInt64[np.ndarray, "_"]:
    """Return the digests of the passages that belong to a query, and its own.

    Args:
        query: the digest of its text.
        relevant: digests of all queries with those of their passages, sorted.
    """
    key = np.uint64(query)
    start, end = (np.searchsorted(relevant[:, 0], key, side) for side in ("left", "right"))
    return np.append(relevant[start:end, 1], key)


def first_places(
    digests: Sequence[UInt64[np.ndarray, "_"]],
) -> list[Bool[np.ndarray, "_"]]:
    """Return for each part which of its texts occur there first, so that a text is kept once."""
    flat = np.concatenate(list(digests))
    kept = np.zeros(len(flat), dtype=bool)
    kept[np.unique(flat, return_index=True)[1]] = True
    return np.split(kept, np.cumsum([len(part) for part in digests])[:-1])


def nearest(
    queries: Float[np.ndarray, "queries size"], paths: Sequence[str], count: int
) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"], UInt64[np.ndarray, "all"]]:
    """Return the cosines and places of the nearest passages of each query, nearest first, and the
    digests of all passages. Among equally near ones, any may be left out.

    Memory holds `ROWS_AT_ONCE` vectors at a time.
    """
    scores = np.zeros((len(queries), 0), dtype=np.float32)
    places = np.zeros((len(queries), 0), dtype=np.int64)
    digests: list[np.ndarray] = []
    seen = 0
    for batch in _batches(paths, [VECTOR, DIGEST]):
        rows = batch.column(VECTOR).flatten().to_numpy().reshape(len(batch), -1)
        digests.append(batch.column(DIGEST).to_numpy())
        here = np.arange(seen, seen + len(batch))
        seen += len(batch)
        best = []
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            chunk = slice(start, start + QUERIES_AT_ONCE)
            new = queries[chunk] @ rows.T
            all_scores = np.concatenate([scores[chunk], new], axis=1)
            all_places = np.concatenate([places[chunk], np.broadcast_to(here, new.shape)], axis=1)
            best.append(_best_of(all_scores, all_places, count))
        if best:
            scores, places = (np.concatenate(parts) for parts in zip(*best, strict=True))
    return scores, places, np.concatenate([np.zeros(0, np.uint64), *digests])


def _best_of(
    scores: Float[np.ndarray, "queries rows"], places: Int[np.ndarray, "queries rows"], k: int
) -> tuple[Float[np.ndarray, "queries k"], Int[np.ndarray, "queries k"]]:
    if scores.shape[1] > k:
        kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        scores, places = (np.take_along_axis(array, kept, 1) for array in (scores, places))
    order = np.lexsort((places, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)


def texts_at(paths: Sequence[str], places: Int[np.ndarray, "places"]) -> list[str]:
    """Return the texts of the passages at these places, which are ascending."""
    texts: list[str] = []
    seen = 0
    for batch in _batches(paths, [TEXT]):
        here = places[(places >= seen) & (places < seen + len(batch))] - seen
        texts += batch.column(TEXT).take(pa.array(here)).to_pylist()
        seen += len(batch)
    return texts


def _batches(paths: Sequence[str], columns: list[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        with parquet.open_parquet(path) as opened:
            yield from opened.iter_batches(ROWS_AT_ONCE, columns=columns)
