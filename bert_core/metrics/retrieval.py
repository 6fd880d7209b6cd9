"""Metrics of search: how high the relevant passages of a query rank, by vectors among all passages
of a set, or by scores among the query's own passages. Pure functions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

if TYPE_CHECKING:
    from scipy.sparse import csr_array

CUTS = (1, 5, 10)
QUERIES_AT_ONCE = 256
RANKED = 10
"""Passages of a ranking that count."""


def ranks_of(
    queries: Float[np.ndarray, "rows size"],
    passages: Float[np.ndarray, "passages size"],
    targets: Int[np.ndarray, "rows"],
) -> Float[np.ndarray, "rows"]:
    """Return the rank of each query's relevant passage among all passages by dot product; 1 is the
    best.

    Passages with equal products share the mean of their ranks, so identical vectors gain nothing.

    Args:
        targets: for each query, the index of its relevant passage.
    """
    ranks = np.empty(len(queries))
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        batch = slice(start, start + QUERIES_AT_ONCE)
        ranks[batch] = _shared_ranks(queries[batch] @ passages.T, targets[batch])
    return ranks


def sparse_ranks_of(
    queries: "csr_array", passages: "csr_array", targets: Int[np.ndarray, "rows"]
) -> Float[np.ndarray, "rows"]:
    """Return the ranks as `ranks_of` does, for sparse matrices with a vector per row: (rows, size)
    and (passages, size)."""
    ranks = np.empty(len(targets))
    for start in range(0, len(targets), QUERIES_AT_ONCE):
        batch = slice(start, start + QUERIES_AT_ONCE)
        ranks[batch] = _shared_ranks((queries[batch] @ passages.T).toarray(), targets[batch])
    return ranks


def _shared_ranks(
    products: Float[np.ndarray, "queries passages"], targets: Int[np.ndarray, "queries"]
) -> Float[np.ndarray, "queries"]:
    of_target = np.take_along_axis(products, targets[:, None], axis=1)
    better, equal = (products > of_target).sum(1), (products == of_target).sum(1)
    return better + (equal + 1) / 2


def retrieval_columns(
    ranks: Float[np.ndarray, "rows"], query: Int[np.ndarray, "rows"]
) -> dict[str, np.ndarray]:
    """Return the columns for `retrieval_metrics`; a row is a query with one of its relevant
    passages.

    Args:
        ranks: the rank of each row's passage.
        query: the same number for rows with the same query, which has several relevant passages.
    """
    _, places, counts = np.unique(query, return_inverse=True, return_counts=True)
    best = np.full(len(counts), np.inf)
    np.minimum.at(best, places, ranks)
    return {"rank": ranks, "best_rank": best[places], "weight": 1 / counts[places]}


def retrieval_metrics(columns: Mapping[str, Float[np.ndarray, "rows"]]) -> dict[str, float]:
    """Return `mrr` and `recall_at_…`, averaged over queries.

    The reciprocal rank is that of the best relevant passage (Voorhees 1999); recall at k is the
    share of a query's relevant passages that are among the first k (Manning et al. 2008, 8.3).
    """
    weight = columns["weight"] / columns["weight"].sum()
    return {
        "mrr": float((weight / columns["best_rank"]).sum()),
        **{f"recall_at_{k}": float(weight[columns["rank"] <= k].sum()) for k in CUTS},
    }


def ranking_columns(
    predicted: Float[np.ndarray, "rows"],
    relevance: Float[np.ndarray, "rows"],
    query: Int[np.ndarray, "rows"],
) -> dict[str, np.ndarray]:
    """Return the columns for `ranking_metrics`; a row is a query with one of its passages.

    `ndcg` and `reciprocal_rank` are those of the row's query. The weight is 1 in the first row of a
    query that has a relevant passage, and 0 in all other rows. So a bootstrap that draws rows in
    effect draws queries, whose rows are not independent.

    Args:
        predicted: the score of each row's passage.
        relevance: the relevance of each row's passage, at least 0; 0 is not relevant.
        query: the same number for rows with the same query.
    """
    ndcg, reciprocal, misplaced = (np.zeros(len(query)) for _ in range(3))
    weight = np.zeros(len(query))
    order = np.argsort(query, kind="stable")
    starts = np.flatnonzero(np.diff(query[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        scores, labels = predicted[rows], relevance[rows]
        misplaced[rows] = _misplaced(scores, labels)
        if not labels.any():
            continue
        ranks = _mean_ranks(scores)
        best = ranks[labels > 0].min()
        ndcg[rows] = _gain(scores, labels) / _gain(labels, labels)
        reciprocal[rows] = 1 / best if best <= RANKED else 0.0
        weight[rows[0]] = 1.0
    return {
        "predicted": predicted,
        "label": relevance,
        "ndcg": ndcg,
        "reciprocal_rank": reciprocal,
        "misplaced": misplaced,
        "weight": weight,
    }


def ranking_metrics(columns: Mapping[str, Float[np.ndarray, "rows"]]) -> dict[str, float]:
    """Return `ndcg_at_10` and `mrr_at_10`, averaged over the queries that have a relevant passage;
    0 if none has.

    The gain of a passage is its relevance (Järvelin and Kekäläinen 2002), not a power of it.
    """
    total = max(float(columns["weight"].sum()), 1.0)
    return {
        f"{name}_at_{RANKED}": float((columns["weight"] * columns[column]).sum() / total)
        for name, column in (("ndcg", "ndcg"), ("mrr", "reciprocal_rank"))
    }


def _mean_ranks(scores: Float[np.ndarray, "passages"]) -> Float[np.ndarray, "passages"]:
    """Return the ranks by score; passages with equal scores share the mean of their ranks."""
    better, equal = _counts(scores)
    return better + (equal + 1) / 2


def _gain(scores: Float[np.ndarray, "passages"], relevance: Float[np.ndarray, "passages"]) -> float:
    """Return the discounted cumulative gain of the first `RANKED` passages by score, averaged over
    all orders of passages with equal scores (McSherry and Najork 2008)."""
    discounts = 1 / np.log2(np.arange(2, len(scores) + 2))
    discounts[RANKED:] = 0.0
    before = np.concatenate([[0.0], discounts.cumsum()])
    better, equal = _counts(scores)
    return float((relevance * (before[better + equal] - before[better]) / equal).sum())


def _counts(
    scores: Float[np.ndarray, "passages"],
) -> tuple[Int[np.ndarray, "passages"], Int[np.ndarray, "passages"]]:
    """Return for each passage how many have a higher score, and how many an equal score, itself
    included."""
    descending = np.sort(-scores)
    better = np.searchsorted(descending, -scores, side="left")
    return better, np.searchsorted(descending, -scores, side="right") - better


def _misplaced(
    scores: Float[np.ndarray, "passages"], relevance: Float[np.ndarray, "passages"]
) -> Float[np.ndarray, "passages"]:
    """Return for each passage, of the passages with another relevance, the share that is ranked on
    the wrong side of it; passages with an equal score count half."""
    shares = np.empty(len(scores))
    for start in range(0, len(scores), QUERIES_AT_ONCE):
        batch = slice(start, start + QUERIES_AT_ONCE)
        apart = np.sign(relevance[batch, None] - relevance)
        counts = np.abs(apart)
        wrong = np.abs(apart - np.sign(scores[batch, None] - scores) * counts) / 2
        shares[batch] = wrong.sum(1) / np.maximum(1, counts.sum(1))
    return shares
