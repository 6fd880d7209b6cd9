"""Makes one ranking of several."""

from collections import defaultdict
from collections.abc import Sequence

K = 60
"""Added to every rank; Cormack, Clarke and Buettcher 2009, section 3."""


def fused(rankings: Sequence[Sequence[int]], top_k: int) -> list[tuple[int, float]]:
    """Return the best rows of all rankings, best first, with their scores, by reciprocal rank
    fusion: the sum of 1 / (60 + rank). Rows with equal scores are in order of their numbers.

    Args:
        rankings: rows by number, best first.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, row in enumerate(ranking, 1):
            scores[row] += 1 / (K + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:top_k]
