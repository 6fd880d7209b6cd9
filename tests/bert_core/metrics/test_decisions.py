"""Thresholds chosen on labelled rows do best on them, or as well as was asked for."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from bert_core.metrics.decisions import best_threshold, threshold_of_precision

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("decimals", [1, 2, 8])
@pytest.mark.parametrize("share", [0.02, 0.3, 1.0])
def test_no_other_threshold_has_a_better_f1(decimals: int, share: float) -> None:
    scores = RNG.random(200).round(decimals)
    present = RNG.random(200) < share * (0.2 + scores)
    present[0] = True
    threshold = best_threshold(scores, present)
    assert threshold is not None
    assert 0 <= threshold < 1
    best = f1_score(present, scores >= threshold)
    others = [f1_score(present, scores >= each, zero_division=0) for each in np.unique(scores)]
    assert best == pytest.approx(max(others))


def test_a_threshold_lies_halfway_between_two_scores() -> None:
    scores, present = np.array([0.9, 0.2, 0.6]), np.array([True, False, True])
    assert best_threshold(scores, present) == pytest.approx(0.4)
    assert best_threshold(scores, np.array([True] * 3)) == pytest.approx(0.1)
    assert best_threshold(scores, np.array([False] * 3)) is None


def test_answers_above_the_threshold_are_right_as_often_as_was_asked() -> None:
    scores = RNG.random(500).round(2)
    is_right = RNG.random(500) < scores
    for precision in (0.6, 0.8, 0.9):
        threshold = threshold_of_precision(scores, is_right, precision)
        assert threshold is not None
        assert is_right[scores >= threshold].mean() >= precision
        lower = [each for each in np.unique(scores) if each < threshold]
        assert all(is_right[scores >= each].mean() < precision for each in lower)


def test_no_threshold_makes_wrong_answers_right() -> None:
    scores = np.array([0.9, 0.9, 0.3])
    assert threshold_of_precision(scores, np.array([True, False, False]), 0.9) is None
    assert threshold_of_precision(scores, np.array([True, False, True]), 0.5) == 0.3
