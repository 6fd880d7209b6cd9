"""Calibration beside a case worked by hand, and scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_core.metrics.calibration import reliability


def test_a_case_worked_by_hand() -> None:
    # Bins of 0.25. In (0.5, 0.75]: 0.6 right, 0.7 wrong: mean 0.65, share 0.5, gap 0.15, 2 of 5.
    # In (0.75, 1]: 0.8 and 1 right, 0.9 wrong: mean 0.9, share 2/3, gap 0.7/3, 3 of 5.
    fit = reliability(
        np.array([0.6, 0.7, 0.8, 0.9, 1.0]), np.array([True, False, True, False, True]), bins=4
    )
    assert fit.counts.tolist() == [0, 0, 2, 3]
    assert fit.expected_calibration_error == pytest.approx(0.4 * 0.15 + 0.6 * 0.7 / 3)
    assert fit.brier_score == pytest.approx((0.16 + 0.49 + 0.04 + 0.81) / 5)
    assert [row["above"] for row in fit.table] == [0.5, 0.75]
    assert fit.table[0] == {
        "above": 0.5,
        "up_to": 0.75,
        "count": 2,
        "confidence": pytest.approx(0.65),
        "accuracy": 0.5,
    }


def test_a_bin_includes_its_upper_end_and_the_first_includes_zero() -> None:
    fit = reliability(np.array([0.0, 0.5, 1.0]), np.array([True, True, True]), bins=2)
    assert fit.counts.tolist() == [2, 1]


def test_perfect_calibration_has_no_error() -> None:
    confidence = np.repeat([0.25, 0.75], 4)
    right = np.array([True, False, False, False, True, True, True, False])
    assert reliability(confidence, right).expected_calibration_error == 0
    assert reliability(confidence, ~right).expected_calibration_error == pytest.approx(0.5)


CLAIMS = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


@given(CLAIMS)
def test_bins_and_score_are_those_of_scikit_learn(claims: list[tuple[float, bool]]) -> None:
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import brier_score_loss

    confidence, right = (
        np.array([each for each, _ in claims]),
        np.array([is_so for _, is_so in claims]),
    )
    fit = reliability(confidence, right)
    assert fit.counts.sum() == len(claims)
    shares, means = calibration_curve(right, confidence, n_bins=15, pos_label=True)
    filled = fit.counts > 0
    np.testing.assert_allclose(fit.accuracy[filled], shares)
    np.testing.assert_allclose(fit.confidence[filled], means)
    assert np.isnan(fit.accuracy[~filled]).all()
    assert fit.brier_score == pytest.approx(brier_score_loss(right, confidence, pos_label=True))
