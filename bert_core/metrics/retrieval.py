"""How well vectors find a query's right passages among all passages of a set. Pure functions."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Int

CUTS = (1, 5, 10)
QUERIES_AT_ONCE = 256


def ranks_of(
    queries: Float[np.ndarray, "rows size"],
    passages: Float[np.ndarray, "passages size"],
    right: Int[np.ndarray, "rows"],
) -> Float[np.ndarray, "rows"]:
    """The rank of each query's right passage among all passages by dot product; 1 is the best.

    Passages with equal products share the mean of their ranks, so identical vectors gain nothing.
    """
    ranks = np.empty(len(queries))
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        batch = slice(start, start + QUERIES_AT_ONCE)
        products = queries[batch] @ passages.T
        wanted = np.take_along_axis(products, right[batch, None], axis=1)
        better, equal = (products > wanted).sum(1), (products == wanted).sum(1)
        ranks[batch] = better + (equal + 1) / 2
    return ranks


def retrieval_columns(
    ranks: Float[np.ndarray, "rows"], query: Int[np.ndarray, "rows"]
) -> dict[str, np.ndarray]:
    """What `retrieval_metrics` needs per row, which is a query with one of its right passages.

    Args:
        query: equal numbers for rows with the same query, which has several right passages.
    """
    _, places, counts = np.unique(query, return_inverse=True, return_counts=True)
    best = np.full(len(counts), np.inf)
    np.minimum.at(best, places, ranks)
    return {"rank": ranks, "best_rank": best[places], "weight": 1 / counts[places]}


def retrieval_metrics(columns: Mapping[str, Float[np.ndarray, "rows"]]) -> dict[str, float]:
    """`mrr` and `recall_at_…`, averaged over queries.

    The reciprocal rank is that of the best right passage (Voorhees 1999); recall at k is the share
    of a query's right passages that are among the first k (Manning et al. 2008, 8.3).
    """
    weight = columns["weight"] / columns["weight"].sum()
    return {
        "mrr": float((weight / columns["best_rank"]).sum()),
        **{f"recall_at_{k}": float(weight[columns["rank"] <= k].sum()) for k in CUTS},
    }
