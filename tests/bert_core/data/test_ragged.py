"""Flat rows."""

import numpy as np

from bert_core.data.ragged import ragged_ranges


def test_ragged_ranges_equal_a_loop() -> None:
    rng = np.random.default_rng(0)
    starts, lengths = rng.integers(0, 100, 50), rng.integers(0, 5, 50)
    expected = [i for s, n in zip(starts, lengths, strict=True) for i in range(s, s + n)]
    assert ragged_ranges(starts, lengths).tolist() == expected
