"""Calibration finds what other implementations find, and becomes part of a head."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.calibration import _sigmoid_calibration
from torch import nn

from bert_core.metrics import Calibration
from bert_core.metrics.calibration import reliability
from bert_core.train.scaling import Scaling, fitted

RNG = np.random.default_rng(0)
ROWS, CLASSES = 2000, 4


def rows(
    temperature: float = 1.0, shift: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores that are too certain by `temperature`, and labels drawn from what is right."""
    right = 2 * RNG.standard_normal((ROWS, CLASSES))
    labels = (right - np.log(-np.log(RNG.random(right.shape)))).argmax(1)
    return temperature * (right - (0 if shift is None else shift)), labels


def test_the_temperature_is_the_one_of_the_best_likelihood() -> None:
    logits, labels = rows(2.5)
    scaling = fitted(logits, labels, "temperature")

    counts = np.bincount(labels)[labels][:, None]
    wanted = np.where(np.eye(CLASSES)[labels] > 0, counts + 1, 1) / (counts + CLASSES)

    def loss(scale: float) -> float:
        return -float((wanted * log_softmax(scale * logits, axis=1)).sum(1).mean())

    best = minimize_scalar(loss, bounds=(0.01, 10), method="bounded").x
    assert scaling.shift == (0.0,) * CLASSES
    assert len(set(scaling.scale)) == 1
    assert scaling.scale[0] == pytest.approx(best, rel=1e-4)
    assert 1 / scaling.scale[0] == pytest.approx(2.5, rel=0.1)


def test_shifts_mend_what_weights_of_classes_did() -> None:
    shift = np.array([-1.5, 0.0, 0.5, 1.0])
    logits, labels = rows(2.0, shift)
    scaling = fitted(logits, labels, "per_label")
    assert scaling.scale[0] == pytest.approx(0.5, rel=0.1)
    found = np.array(scaling.shift)
    np.testing.assert_allclose(found - found.mean(), shift - shift.mean(), atol=0.2)


def test_several_labels_are_scaled_as_platt_does() -> None:
    logits = 3 * RNG.standard_normal((ROWS, 2))
    labels = (RNG.random(logits.shape) < 1 / (1 + np.exp(1.0 - 0.4 * logits))).astype(int)
    scaling = fitted(logits, labels, "per_label")
    for label in range(2):
        a, b = _sigmoid_calibration(logits[:, label], labels[:, label])
        assert scaling.scale[label] == pytest.approx(-a, rel=1e-3)
        assert scaling.shift[label] == pytest.approx(-b, rel=1e-3)
    shared = fitted(logits, labels, "temperature")
    assert shared.scale[0] == shared.scale[1]
    assert shared.shift == (0.0, 0.0)


@pytest.mark.parametrize("kind", ["temperature", "per_label"])
def test_calibration_lowers_the_error_on_other_rows(kind: Calibration) -> None:
    logits, labels = rows(3.0)
    scaling = fitted(logits[:1000], labels[:1000], kind)

    def error(scores: np.ndarray) -> float:
        shares = softmax(scores[1000:], axis=1)
        return reliability(
            shares.max(1), shares.argmax(1) == labels[1000:]
        ).expected_calibration_error

    assert error(scaling.applied(logits)) < 0.05 < 0.1 < error(logits)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["temperature", "per_label"])
def test_rows_without_an_error_have_a_finite_scaling(kind: Calibration, several: bool) -> None:
    logits = np.array([[9.0, -9.0], [-8.0, 8.0], [7.0, -7.0]])
    labels = np.array([[1, 0], [0, 1], [1, 0]]) if several else np.array([0, 1, 0])
    scaling = fitted(logits, labels, kind)
    assert np.isfinite([*scaling.scale, *scaling.shift]).all()
    assert all(0.02 <= scale <= 50 for scale in scaling.scale)


def test_nothing_is_fitted_unless_asked() -> None:
    logits, labels = rows(2.0)
    assert fitted(logits, labels, "none") == Scaling((1.0,) * CLASSES, (0.0,) * CLASSES)


def test_a_scaling_becomes_part_of_the_head() -> None:
    layer, vectors = nn.Linear(8, 3), torch.randn(5, 8)
    before = layer(vectors).detach().double().numpy()
    scaling = Scaling((0.5, 2.0, 1.0), (0.1, 0.0, -3.0))
    scaling.apply(layer)
    np.testing.assert_allclose(layer(vectors).detach(), scaling.applied(before), rtol=1e-5)
