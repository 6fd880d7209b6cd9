"""Losses of uneven classes equal torch's own, and their sources' equations."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import BCEWithLogitsLoss, CrossEntropyLoss

from bert_core.objectives import IGNORE
from bert_core.objectives.class_loss import ClassLoss
from bert_core.objectives.class_weights import class_weights, positive_weights

CLASSES = 4
WEIGHTS = (0.25, 1.0, 3.0, 7.5)
SPLITS = [(17,), (5, 12), (1, 1, 15), (6, 6, 5)]


def items(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Scores of 17 items, and their classes, some of which are ignored."""
    draws = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(17, CLASSES, generator=draws, dtype=dtype)
    labels = torch.randint(CLASSES, (17,), generator=draws)
    labels[[2, 11]] = IGNORE
    return scores, labels


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [(), WEIGHTS], ids=["equal", "weighted"])
def test_sums_over_workers_divided_once_are_the_mean_that_torch_computes(
    weights: tuple[float, ...], smoothing: float, split: tuple[int, ...]
) -> None:
    scores, labels = items()
    loss = ClassLoss(weights=weights, label_smoothing=smoothing)
    parts = list(zip(scores.split(split), labels.split(split), strict=True))
    ours = sum(loss.of_one(*part).sum for part in parts) / sum(
        loss.divisor(of_worker) for _, of_worker in parts
    )
    theirs = CrossEntropyLoss(
        torch.tensor(weights, dtype=torch.float64) if weights else None, label_smoothing=smoothing
    )(scores, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    right = sum(int(loss.of_one(*part).correct or 0) for part in parts)
    assert right == int((scores.argmax(1) == labels).sum())


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("weights", [(), WEIGHTS], ids=["equal", "weighted"])
def test_several_labels_per_item_have_the_mean_that_torch_computes(
    weights: tuple[float, ...], split: tuple[int, ...]
) -> None:
    scores, _ = items()
    labels = (scores + torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))) > 0
    loss = ClassLoss(weights=weights)
    parts = zip(scores.split(split), labels.long().split(split), strict=True)
    summed = [loss.of_several(*part) for part in parts]
    ours = sum(part.sum for part in summed) / sum(part.count for part in summed)
    theirs = BCEWithLogitsLoss(
        pos_weight=torch.tensor(weights, dtype=torch.float64) if weights else None
    )(scores, labels.double())
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_smoothed_labels_are_a_little_of_both() -> None:
    scores, _ = items()
    labels = (scores > 1).long()
    smooth = ClassLoss(label_smoothing=0.2).of_several(scores, labels)
    theirs = BCEWithLogitsLoss()(scores, 0.8 * labels.double() + 0.1)
    torch.testing.assert_close(smooth.sum / smooth.count, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("weights", [(), WEIGHTS], ids=["equal", "weighted"])
def test_the_focal_loss_is_that_of_its_paper(weights: tuple[float, ...], gamma: float) -> None:
    """Lin et al. 2017, equation 5, in numpy."""
    scores, labels = items()
    shares = np.exp(scores.numpy()) / np.exp(scores.numpy()).sum(1, keepdims=True)
    of_class = np.array(weights or (1.0,) * CLASSES)
    known = labels.numpy() != IGNORE
    p = shares[known, labels.numpy()[known]]
    wanted = -(of_class[labels.numpy()[known]] * (1 - p) ** gamma * np.log(p)).sum()
    loss = ClassLoss(weights=weights, focal_gamma=gamma)
    assert float(loss.of_one(scores, labels).sum) == pytest.approx(wanted, rel=1e-12)
    assert loss.divisor(labels) == pytest.approx(of_class[labels.numpy()[known]].sum())

    present = (scores > 1).numpy()
    alone = 1 / (1 + np.exp(-scores.numpy()))
    p = np.where(present, alone, 1 - alone)
    alpha = np.where(present, of_class, 1.0)
    wanted = -(alpha * (1 - p) ** gamma * np.log(p)).mean(1).sum()
    found = loss.of_several(scores, torch.from_numpy(present).long()).sum
    assert float(found) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_the_focal_loss_of_items_that_are_certain_has_a_finite_gradient(gamma: float) -> None:
    scores = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    loss = ClassLoss(focal_gamma=gamma)
    for part in (
        loss.of_one(scores, torch.tensor([0, 0])),
        loss.of_several(scores, torch.tensor([[1, 0], [1, 1]])),
    ):
        [slope] = torch.autograd.grad(part.sum, scores)
        assert slope.isfinite().all()


def test_a_loss_in_bfloat16_is_computed_in_fp32() -> None:
    scores, labels = items(torch.bfloat16)
    wanted = ClassLoss(weights=WEIGHTS).of_one(scores.float(), labels).sum
    found = ClassLoss(weights=WEIGHTS).of_one(scores, labels).sum
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels = np.repeat([0, 1, 2], [1, 10, 89])
    theirs = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    np.testing.assert_allclose(class_weights("balanced", np.bincount(labels), 0.9), theirs)
    assert class_weights("equal", np.bincount(labels), 0.9).tolist() == [1, 1, 1]


def test_effective_numbers_lie_between_equal_and_balanced() -> None:
    counts = np.array([5, 50, 5000])
    [rare, some, many] = class_weights("effective_number", counts, 0.999)
    assert rare + some + many == pytest.approx(3)
    assert rare / many == pytest.approx((1 - 0.999**5000) / (1 - 0.999**5))
    assert 1 < rare / some < 10
    assert class_weights("effective_number", counts, 0.0).tolist() == [1, 1, 1]
    nearly = class_weights("effective_number", counts, 1 - 1e-9)
    assert nearly[0] / nearly[2] == pytest.approx(1000, rel=1e-4)


def test_with_several_labels_those_with_one_count_like_those_without() -> None:
    present = np.array([10, 50, 99])
    assert positive_weights("balanced", present, 100, 0.9).tolist() == [9, 1, 1 / 99]
    assert positive_weights("equal", present, 100, 0.9).tolist() == [1, 1, 1]
    [rare, even, usual] = positive_weights("effective_number", present, 100, 0.99)
    assert 1 < rare < 9
    assert even == 1
    assert 1 / 99 < usual < 1
