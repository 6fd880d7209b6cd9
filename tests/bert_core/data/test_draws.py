"""Numbers by key: those of SplitMix64 by its paper, uniform, and independent of each other."""

from typing import Any

import numpy as np
import pytest

from bert_core.data.draws import LENGTH, ORDER, PURPOSES, Draws, row_keys

SIGMAS = 4.5
WORD = (1 << 64) - 1


def splitmix64(state: int) -> tuple[int, int]:
    """The next state and output, on Python's integers (Steele, Lea and Flood 2014, figure 15)."""
    state = z = (state + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return state, z ^ (z >> 31)


def test_the_numbers_of_a_row_are_the_outputs_of_splitmix64_in_turn() -> None:
    [key] = row_keys(11, np.array([5])).tolist()
    draws = Draws(np.array([key], np.uint64))
    state = key
    for place in range(20):
        for purpose in PURPOSES:
            state, output = splitmix64(state)
            drawn = draws(purpose, np.array([0]), np.array([place]))
            assert drawn.tolist() == [(output >> 11) / 2**53]


def test_the_published_outputs_for_the_seed_1234567_come_out() -> None:
    # https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    state, outputs = 1234567, []
    for _ in range(3):
        state, output = splitmix64(state)
        outputs.append(output)
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_keys_differ_by_every_part_and_by_their_order() -> None:
    rows = np.arange(50)
    parts: list[tuple[Any, ...]] = [
        (0, 1, rows),
        (1, 0, rows),
        (1, 1, rows),
        (0, 0, rows),
        (0, rows, 1),
        (rows, 0, 1),
    ]
    keys = np.concatenate([row_keys(*each) for each in parts])
    assert len(np.unique(keys)) >= len(keys) - 12  # of these tuples, two are equal here and there
    assert (row_keys(0, 1, rows) == row_keys(np.zeros(50, int), np.ones(50, int), rows)).all()


@pytest.mark.parametrize("purpose", PURPOSES)
def test_numbers_are_uniform_over_rows_and_over_places(purpose: int) -> None:
    rows, places = np.divmod(np.arange(400_000), 400)
    drawn = Draws(row_keys(7, np.arange(1000)))(purpose, rows, places)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.bincount((drawn * 1000).astype(int), minlength=1000)
    chi_squared = ((counts - 400) ** 2 / 400).sum()
    assert abs(chi_squared - 999) < SIGMAS * np.sqrt(2 * 999)
    for axis in (0, 1):
        means = drawn.reshape(1000, 400).mean(axis=axis)
        spread = 1 / np.sqrt(12 * (400_000 / len(means)))
        assert np.abs(means - 0.5).max() < (SIGMAS + 1) * spread


def test_neighbouring_rows_positions_and_purposes_are_uncorrelated() -> None:
    draws = Draws(row_keys(0, np.arange(200_001)))
    rows = np.arange(200_000)
    columns = [
        draws(ORDER, rows, 0),
        draws(ORDER, rows + 1, 0),
        draws(ORDER, rows, 1),
        draws(LENGTH, rows, 0),
        Draws(row_keys(1, rows))(ORDER, rows, 0),
    ]
    correlations = np.corrcoef(columns)[np.triu_indices(len(columns), k=1)]
    assert np.abs(correlations).max() < SIGMAS / np.sqrt(len(rows))
