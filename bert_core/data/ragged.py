"""Rows of unlike length, flat: one array, cut by offsets."""

import numpy as np
from jaxtyping import Integer


def ragged_ranges(
    starts: Integer[np.ndarray, "runs"], lengths: Integer[np.ndarray, "runs"]
) -> Integer[np.ndarray, "total"]:
    """`start, start + 1, …` for `length` items of every run, one after the other."""
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
