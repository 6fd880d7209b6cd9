"""How well vectors find what is right for a query among all passages of a set. Pure functions."""

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
    """The rank of a query's right passage among all by their product, 1 the best.

    Passages of equal products share the mean of their ranks, so nothing is won by vectors that are
    all alike.
    """
    ranks = np.empty(len(queries))
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        products = queries[some] @ passages.T
        wanted = np.take_along_axis(products, right[some, None], axis=1)
        better, equal = (products > wanted).sum(1), (products == wanted).sum(1)
        ranks[some] = better + (equal + 1) / 2
    return ranks


def retrieval_columns(
    ranks: Float[np.ndarray, "rows"], query: Int[np.ndarray, "rows"]
) -> dict[str, np.ndarray]:
    """What `retrieval_metrics` needs of each row, a query with one passage that is right for it.

    Args:
        query: equal numbers where rows have one query, for which several passages are right.
    """
    _, places, counts = np.unique(query, return_inverse=True, return_counts=True)
    best = np.full(len(counts), np.inf)
    np.minimum.at(best, places, ranks)
    return {"rank": ranks, "best_rank": best[places], "weight": 1 / counts[places]}


def retrieval_metrics(columns: Mapping[str, Float[np.ndarray, "rows"]]) -> dict[str, float]:
    """`mrr` and `recall_at_…`, means over queries.

    The reciprocal rank is that of the best passage that is right (Voorhees 1999); recall at k is
    the share of a query's right passages that are among the first k (Manning et al. 2008, 8.3).
    """
    weight = columns["weight"] / columns["weight"].sum()
    return {
        "mrr": float((weight / columns["best_rank"]).sum()),
        **{f"recall_at_{k}": float(weight[columns["rank"] <= k].sum()) for k in CUTS},
    }
