"""Agreement of annotators: published examples, and scikit-learn's kappa."""

import math

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from bert_core.metrics.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha


@pytest.mark.parametrize("seed", range(5))
def test_cohens_kappa_is_that_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 4, 50)
    second = np.where(rng.random(50) < 0.6, first, rng.integers(0, 4, 50))
    pairs = [*zip(first.tolist(), second.tolist(), strict=True)]
    assert cohen_kappa(pairs) == pytest.approx(cohen_kappa_score(first, second))


def test_fleiss_kappa_is_that_of_the_usual_example() -> None:
    """14 raters of 10 items in 5 classes: 0.210 (Wikipedia, "Fleiss' kappa", worked example)."""
    table = [
        [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
    ]  # fmt: skip
    labels = [np.repeat(range(5), counts).tolist() for counts in table]
    assert fleiss_kappa(labels) == pytest.approx(0.210, abs=5e-4)


def test_alpha_is_that_of_krippendorffs_example() -> None:
    """Four observers, twelve units, missing values: 0.743 (Krippendorff 2011, section C)."""
    a = ["1", "2", "3", "3", "2", "1", "4", "1", "2", ".", ".", "."]
    b = ["1", "2", "3", "3", "2", "2", "4", "1", "2", "5", ".", "3"]
    c = [".", "3", "3", "3", "2", "3", "4", "2", "2", "5", "1", "."]
    d = ["1", "2", "3", "3", "2", "4", "4", "1", "2", "5", "1", "."]
    units = [[one for one in unit if one != "."] for unit in zip(a, b, c, d, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)


def test_alpha_of_many_items_comes_near_kappa() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 3, 4000)
    second = np.where(rng.random(4000) < 0.7, first, rng.integers(0, 3, 4000))
    pairs = [*zip(first.tolist(), second.tolist(), strict=True)]
    assert krippendorff_alpha(pairs) == pytest.approx(fleiss_kappa(pairs), abs=1e-3)


def test_labels_that_are_all_the_same_say_nothing() -> None:
    same = [["a", "a"]] * 3
    assert math.isnan(cohen_kappa(same))
    assert math.isnan(fleiss_kappa(same))
    assert math.isnan(krippendorff_alpha(same))
    assert math.isnan(krippendorff_alpha([["a"], ["b"]]))
    assert krippendorff_alpha([["a", "a"], ["b", "b"], ["c"]]) == 1.0
