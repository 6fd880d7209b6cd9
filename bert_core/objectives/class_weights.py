"""Weights of classes by how many items each has. Does not import torch."""

from typing import Literal

import numpy as np
from jaxtyping import Float, Int

Weighting = Literal["equal", "balanced", "effective_number"]
"""How classes are weighted by their numbers of items."""


def class_weights(
    kind: Weighting, counts: Int[np.ndarray, "classes"], beta: float
) -> Float[np.ndarray, "classes"]:
    """Return the weight of each class.

    `balanced` is items / (classes × items of the class), as in scikit-learn (King and Zeng 2001).
    `effective_number` is (1 − β) / (1 − β^items of the class), scaled to a mean of 1 (Cui et al.
    2019, section 4).

    Args:
        counts: items of each class, at least 1.
        beta: β, at least 0 and below 1; unused unless `kind` is `effective_number`.
    """
    if kind == "equal":
        return np.ones(len(counts))
    if kind == "balanced":
        return counts.sum() / (len(counts) * counts)
    weights = 1.0 / _effective(counts, beta)
    return weights * len(weights) / weights.sum()


def positive_weights(
    kind: Weighting, present: Int[np.ndarray, "labels"], items: int, beta: float
) -> Float[np.ndarray, "labels"]:
    """Return the weight of the items that have each label, relative to those that lack it, for
    items with any number of labels.

    `balanced` lets both count the same, `effective_number` by their effective numbers.

    Args:
        present: items that have each label, at least 1 and below `items`.
        items: the number of all items.
        beta: as in `class_weights`.
    """
    absent = items - present
    if kind == "equal":
        return np.ones(len(present))
    if kind == "balanced":
        return absent / present
    return _effective(absent, beta) / _effective(present, beta)


def _effective(counts: Int[np.ndarray, "classes"], beta: float) -> Float[np.ndarray, "classes"]:
    """Return (1 − β^n) / (1 − β), the effective number of n items."""
    return -np.expm1(counts * np.log(beta)) / (1 - beta) if beta else np.ones(len(counts))
