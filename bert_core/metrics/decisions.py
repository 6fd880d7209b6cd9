"""Thresholds that turn scores into decisions, chosen on labelled rows. Pure."""

import numpy as np
from jaxtyping import Bool, Float


def best_threshold(
    scores: Float[np.ndarray, "rows"], present: Bool[np.ndarray, "rows"]
) -> float | None:
    """Return the score from which a label is to be assigned, for the best F1 on these rows.

    It lies halfway between the lowest score that is assigned and the next one below (or 0). Of
    equally good thresholds, the highest is returned. None if no row has the label.

    Args:
        scores: of the label, from 0 to 1.
        present: whether each row has it.
    """
    if not present.any():
        return None
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    hits = np.cumsum(present[order])
    f1 = 2 * hits / (np.arange(1, len(scores) + 1) + present.sum())
    below = np.append(falling[1:], 0.0)
    f1[falling == below] = -1.0  # rows of equal score are assigned together
    best = int(f1.argmax())
    return float((falling[best] + below[best]) / 2)


def threshold_of_precision(
    scores: Float[np.ndarray, "rows"], is_right: Bool[np.ndarray, "rows"], precision: float
) -> float | None:
    """Return the lowest score from which answers are right as often as wanted; None if there is
    none.

    Args:
        scores: of each row's answer.
        is_right: whether each answer is right.
        precision: the share of the answers with at least this score that is to be right.
    """
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    shares = np.cumsum(is_right[order]) / np.arange(1, len(scores) + 1)
    ends = np.append(falling[1:] != falling[:-1], True)  # rows of equal score go together
    enough = np.flatnonzero(ends & (shares >= precision))
    return float(falling[enough[-1]]) if len(enough) else None
