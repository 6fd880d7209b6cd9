"""Correlations beside their definitions."""

import numpy as np
import pytest

from bert_core.metrics.regression import correlations


def test_correlations_are_of_values_and_of_ranks() -> None:
    rng = np.random.default_rng(0)
    labels = rng.normal(size=100)
    predicted = labels**3 + rng.normal(size=100) * 0.1
    found = correlations(predicted, labels)
    assert found["pearson"] == pytest.approx(np.corrcoef(predicted, labels)[0, 1])
    ours, theirs = (np.argsort(np.argsort(each)) for each in (predicted, labels))
    assert found["spearman"] == pytest.approx(np.corrcoef(ours, theirs)[0, 1])
    assert found["correlation"] == pytest.approx((found["pearson"] + found["spearman"]) / 2)
    assert found["mse"] == pytest.approx(np.square(predicted - labels).mean())


@pytest.mark.parametrize(
    ("predicted", "labels"),
    [([1.0, 1.0], [1.0, 2.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0], [1.0])],
)
def test_constants_have_no_correlation(predicted: list[float], labels: list[float]) -> None:
    found = correlations(np.array(predicted), np.array(labels))
    assert found["pearson"] == found["spearman"] == found["correlation"] == 0.0
