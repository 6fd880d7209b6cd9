"""Random numbers by key: the number for a place in a row is a function of the row's key.

So a row's mask depends neither on the rows that are masked together with it nor on the process that
masks them: it is the same in a shard and at training time, in any batch, on any number of workers.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer, UInt64

# What numbers are drawn for; each purpose has separate numbers at every place.
ORDER, LENGTH, FATE, REPLACEMENT = PURPOSES = range(4)
GUESS = 1  # added to a row's key when drawing the tokens that a generator puts there

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(state: UInt64[np.ndarray, "*any"]) -> UInt64[np.ndarray, "*any"]:
    """Apply the output function of SplitMix64 (Steele, Lea and Flood 2014): every bit of the input
    affects every bit of the output."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def row_keys(*parts: int | Integer[np.ndarray, "rows"]) -> UInt64[np.ndarray, "rows"]:
    """Return a key for every row, from numbers that identify it: a seed, its epoch, ….

    A part that is a single number applies to all rows; at least one part must be an array.
    """
    keys = np.zeros(1, dtype=np.uint64)
    for part in parts:
        keys = _mix(keys + _STEP + np.asarray(part).astype(np.uint64))
    return keys


@dataclass(frozen=True)
class Draws:
    """Draws uniform numbers for places in rows with these keys: SplitMix64 with random access."""

    keys: UInt64[np.ndarray, "rows"]

    def __call__(
        self,
        purpose: int,
        rows: Integer[np.ndarray, "drawn"],
        places: int | Integer[np.ndarray, "drawn"],
    ) -> Float[np.ndarray, "drawn"]:
        """Return a number in [0, 1) for each of `places`.

        Args:
            purpose: one of `PURPOSES`.
            rows: the row of each place, as an index into `keys`.
            places: positions counted from the beginning of the row.
        """
        counters = np.atleast_1d(places).astype(np.uint64) * np.uint64(len(PURPOSES))
        counters = counters + np.uint64(purpose + 1)
        return (_mix(self.keys[rows] + counters * _STEP) >> np.uint64(11)) * 2.0**-53
