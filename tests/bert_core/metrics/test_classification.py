"""Metrics of labels beside their definitions."""

import numpy as np
import pytest

from bert_core.metrics.classification import accuracy, macro_f1


def test_accuracy_is_the_share_that_is_right() -> None:
    assert accuracy(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])) == 0.75


def test_macro_f1_is_the_mean_of_each_class_f1() -> None:
    rng = np.random.default_rng(0)
    predictions, labels = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    scores = []
    for label in range(4):
        hit = ((predictions == label) & (labels == label)).sum()
        scores.append(2 * hit / ((predictions == label).sum() + (labels == label).sum()))
    assert macro_f1(predictions, labels) == pytest.approx(np.mean(scores))


def test_a_class_never_predicted_counts_zero() -> None:
    assert macro_f1(np.array([0, 0, 0]), np.array([0, 0, 1])) == pytest.approx(0.8 / 2)
