"""Rows of different lengths in one flat array, divided by offsets."""

import numpy as np
from jaxtyping import Int64, Integer
from numpy.typing import ArrayLike


def ragged_ranges(
    starts: Integer[np.ndarray, "runs"], lengths: Integer[np.ndarray, "runs"]
) -> Integer[np.ndarray, "total"]:
    """Return `start, start + 1, …`, `length` items for every run, one run after the other."""
    total = int(lengths.sum())
    return np.arange(total, dtype=np.int64) + np.repeat(starts - starts_of(lengths), lengths)


def offsets_of(lengths: ArrayLike) -> Int64[np.ndarray, "items_1"]:
    """Return where each of several items laid end to end begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def starts_of(lengths: Integer[np.ndarray, "items"]) -> Int64[np.ndarray, "items"]:
    """Return where each of several items laid end to end begins."""
    return offsets_of(lengths)[:-1]
