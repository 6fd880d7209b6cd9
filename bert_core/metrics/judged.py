"""Metrics of a search among judged documents, as trec_eval defines them. Pure functions.

A metric at k needs only the rank of each relevant document among all documents, so no list of
results is cut off anywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

CUTS = (1, 5, 10, 100)
"""The k of every metric at k."""
METRICS = ("ndcg", "map", "mrr", "recall", "precision")
NAMES = tuple(f"{name}_at_{k}" for k in CUTS for name in METRICS)
PRIMARY = "ndcg_at_10"
SHOWN = (PRIMARY, "map_at_100", "mrr_at_10", "recall_at_100", "precision_at_10")
"""The metrics that a table shows, each at the k at which the field quotes it."""
SCORES_AT_ONCE = 1 << 24
"""Most scores, of queries with documents, in memory at once: 64 MB."""


@dataclass(frozen=True)
class Judgements:
    """The documents that are relevant to a query."""

    places: Int[np.ndarray, "relevant"]
    """Their indices among all documents."""
    relevance: Float[np.ndarray, "relevant"]
    """How relevant each is, above 0."""


def id_order(ids: Sequence[str]) -> Int[np.ndarray, "documents"]:
    """Return the place of each document when their ids are sorted as bytes, which decides between
    documents with equal scores."""
    order = np.empty(len(ids), dtype=np.int64)
    order[sorted(range(len(ids)), key=lambda place: ids[place].encode())] = np.arange(len(ids))
    return order


def ranks_of_judged(
    scores: Float[np.ndarray, "documents"],
    places: Int[np.ndarray, "judged"],
    order: Int[np.ndarray, "documents"],
) -> Int[np.ndarray, "judged"]:
    """Return the rank of each judged document among all documents, from 1.

    Scores are compared in fp32; among equal ones the largest id comes first, as in trec_eval.

    Args:
        places: indices of the judged documents.
        order: `id_order` of all documents.
    """
    scores = scores.astype(np.float32, copy=False)
    ranks = np.empty(len(places), dtype=np.int64)
    for judged, place in enumerate(places):
        equal = np.flatnonzero(scores == scores[place])
        before = np.count_nonzero(order[equal] > order[place])
        ranks[judged] = 1 + np.count_nonzero(scores > scores[place]) + before
    return ranks


def first_of(
    scores: Float[np.ndarray, "documents"], order: Int[np.ndarray, "documents"], count: int
) -> Int[np.ndarray, "first"]:
    """Return the indices of the first `count` documents, ranked as in `ranks_of_judged`."""
    scores = scores.astype(np.float32, copy=False)
    kept = np.arange(len(scores))
    if len(scores) > count:  # with all that tie for the last place
        kept = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return kept[np.lexsort((-order[kept], -scores[kept]))][:count]


def metrics_at(
    ranks: Int[np.ndarray, "relevant"], relevance: Float[np.ndarray, "relevant"], k: int
) -> dict[str, float]:
    """Return the metrics of one query at `k`; all are 0 if it has no relevant document.

    The gain of a document is its relevance (Järvelin and Kekäläinen 2002), not a power of it; the
    precision is averaged over all relevant documents, and is 0 for those after the first k; the
    reciprocal rank is that of the first relevant document.
    """
    if not len(ranks):
        return {f"{name}_at_{k}": 0.0 for name in METRICS}
    best = np.sort(relevance)[::-1][:k]
    ideal = (best / np.log2(np.arange(2, len(best) + 2))).sum()
    found = np.sort(ranks[ranks <= k])
    gain = (relevance[ranks <= k] / np.log2(ranks[ranks <= k] + 1)).sum()
    values = (
        gain / ideal,
        (np.arange(1, len(found) + 1) / found).sum() / len(ranks),
        1 / found[0] if len(found) else 0.0,
        len(found) / len(ranks),
        len(found) / k,
    )
    return {f"{name}_at_{k}": float(value) for name, value in zip(METRICS, values, strict=True)}


def judged_columns(
    ranks: Sequence[Int[np.ndarray, "_"]], judgements: Sequence[Judgements]
) -> dict[str, np.ndarray]:
    """Return a column per metric, with an entry per query."""
    rows: list[dict[str, float]] = []
    for own, judged in zip(ranks, judgements, strict=True):
        rows.append({})
        for k in CUTS:
            rows[-1] |= metrics_at(own, judged.relevance, k)
    return {name: np.array([row[name] for row in rows]) for name in NAMES}


def judged_metrics(columns: Mapping[str, Float[np.ndarray, "queries"]]) -> dict[str, float]:
    """Return the mean of each metric over the queries."""
    return {name: float(column.mean()) for name, column in columns.items()}


def batches_of(queries: int, documents: int) -> Iterator[slice]:
    """Yield slices of the queries, each with at most `SCORES_AT_ONCE` scores, or of one query."""
    size = max(1, SCORES_AT_ONCE // max(1, documents))
    for start in range(0, queries, size):
        yield slice(start, min(start + size, queries))
