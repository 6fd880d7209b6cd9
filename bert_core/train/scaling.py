"""Scales and shifts of a head's scores, fitted so that probabilities mean what they say.

They become part of the head's last layer, so that whatever computes the scores, here or elsewhere,
computes calibrated ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bert_core.metrics import Calibration
from bert_core.train.optim import Eager

LEAST, MOST = 0.02, 50.0
"""Limits of a scale."""
STEPS = 200


@dataclass(frozen=True)
class Scaling:
    """Scores become `scale * score + shift`."""

    scale: tuple[float, ...]
    """One per label, above 0."""
    shift: tuple[float, ...]

    def applied(self, logits: Float[np.ndarray, "rows labels"]) -> Float[np.ndarray, "rows labels"]:
        """Return the scaled scores, fp64."""
        return logits * np.array(self.scale) + np.array(self.shift)

    @torch.no_grad()
    def apply(self, layer: nn.Linear) -> None:
        """Make it part of the layer that computes the scores, in place."""
        scale, shift = (layer.bias.new_tensor(values) for values in (self.scale, self.shift))
        layer.weight.mul_(scale[:, None])
        layer.bias.mul_(scale).add_(shift)


def fitted(
    logits: Float[np.ndarray, "rows labels"],
    labels: Int[np.ndarray, "rows *labels"],
    kind: Calibration,
) -> Scaling:
    """Return the scaling under which the scores of these rows have the highest likelihood.

    With one label per row, `temperature` is that of Guo et al. 2017 (section 4.2), as 1 / T;
    `per_label` adds a shift per label (Alexandari et al. 2020, bias-corrected temperature scaling),
    which mends what weights of classes do to scores. With several labels per row, `per_label` is
    Platt's scaling of each (1999). Labels are smoothed as Platt does, by one more row of every
    class, so that rows without an error have a scaling too.

    Args:
        logits: scores before softmax or sigmoid.
        labels: label id of each row; or 0 or 1 per label, with several labels per row.
    """
    several, classes = labels.ndim == 2, logits.shape[1]
    scores = torch.from_numpy(logits.astype(np.float64))
    targets = torch.from_numpy(_several_targets(labels) if several else _targets(labels, classes))
    scales = classes if several and kind == "per_label" else 1
    logs, shift = (torch.zeros(size, dtype=scores.dtype) for size in (scales, classes))
    learned = [] if kind == "none" else [logs, *([shift] if kind == "per_label" else [])]
    for each in learned:
        each.requires_grad_(True)
    if learned:
        _minimise(learned, lambda: _loss(scores * logs.exp() + shift, targets, several=several))
    scale = logs.detach().exp().clamp(LEAST, MOST).expand(classes)
    return Scaling(tuple(scale.tolist()), tuple(shift.detach().tolist()))


class _LBFGS(Eager, torch.optim.LBFGS):
    """torch's L-BFGS."""

    step = torch.no_grad()(unwrap(torch.optim.LBFGS.step))


def _loss(scores: Tensor, targets: Tensor, *, several: bool) -> Tensor:
    if several:
        return nn.functional.binary_cross_entropy_with_logits(scores, targets)
    return nn.functional.cross_entropy(scores, targets)


def _minimise(learned: list[Tensor], loss: Callable[[], Tensor]) -> None:
    optimizer = _LBFGS(
        learned, max_iter=STEPS, tolerance_grad=1e-9, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optimizer.step(closure)


def _targets(labels: Int[np.ndarray, "rows"], classes: int) -> Float[np.ndarray, "rows labels"]:
    """Return the probabilities to fit: (n + 1) / (n + classes) of the label, for a label with n
    rows, and equal shares of the rest."""
    rest = 1.0 / (np.bincount(labels, minlength=classes) + classes)
    targets = np.repeat(rest[labels][:, None], classes, axis=1)
    targets[np.arange(len(labels)), labels] = 1 - (classes - 1) * rest[labels]
    return targets


def _several_targets(labels: Int[np.ndarray, "rows labels"]) -> Float[np.ndarray, "rows labels"]:
    """Return Platt's targets of each label: (n + 1) / (n + 2) where present, 1 / (m + 2) where
    absent, for n rows with the label and m without."""
    present, absent = (labels > 0).sum(0), (labels == 0).sum(0)
    return np.where(labels > 0, (present + 1) / (present + 2), 1 / (absent + 2))
