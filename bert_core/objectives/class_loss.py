"""The loss of items with classes, where classes are uneven or labels are not to be trusted fully.

Sums are divided as torch does for the mean: by the sum of the items' weights
(`torch.nn.CrossEntropyLoss`), or, with several labels per item, by the number of items
(`torch.nn.BCEWithLogitsLoss`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor
from torch.nn import functional

from bert_core.objectives import IGNORE
from bert_core.objectives.base import LossPart, widened


@dataclass(frozen=True, kw_only=True)
class ClassLoss:
    """Cross-entropy, with weights of classes, a focus on hard items, or smoothed labels."""

    weights: tuple[float, ...] = ()
    """Weight of each class, or with several labels per item, of each label's positive items; empty
    means 1 for all."""
    focal_gamma: float = 0.0
    """Items count by (1 − p)^γ, where p is the probability of what is right (Lin et al. 2017,
    equation 5)."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all classes (Szegedy et al. 2016, section 7);
    over present and absent, with several labels per item."""

    def of_one(
        self, logits: Float[Tensor, "items classes"], labels: Int[Tensor, "items"]
    ) -> LossPart:
        """Return the loss of items that have one class each, in fp32 or wider. Those with the class
        IGNORE add nothing to it, but are in its count."""
        wide = widened(logits)
        weights = wide.new_tensor(self.weights) if self.weights else None
        right = (logits.detach().argmax(-1) == labels).sum()
        if not self.focal_gamma:
            total = functional.cross_entropy(
                wide, labels, weights, reduction="sum", label_smoothing=self.label_smoothing
            )
            return LossPart(total, len(labels), right)
        losses = functional.cross_entropy(wide, labels, reduction="none")
        losses = losses * self._focus(losses)
        if weights is not None:
            losses = losses * weights[labels.clamp(min=0)]  # the loss of ignored items is 0
        return LossPart(losses.sum(), len(labels), right)

    def of_several(
        self, logits: Float[Tensor, "items labels"], labels: Real[Tensor, "items labels"]
    ) -> LossPart:
        """Return the mean loss over labels of items that have any number of them, in fp32 or
        wider.

        Args:
            labels: 1 for labels that an item has, and 0 for others; or shares between.
        """
        wide = widened(logits)
        targets = labels.to(wide.dtype)
        smooth = self.label_smoothing
        losses = functional.binary_cross_entropy_with_logits(
            wide,
            targets * (1 - smooth) + smooth / 2 if smooth else targets,
            pos_weight=wide.new_tensor(self.weights) if self.weights else None,
            reduction="none",
        )
        if self.focal_gamma:
            alone = functional.binary_cross_entropy_with_logits(wide, targets, reduction="none")
            losses = losses * self._focus(alone)
        right = ((wide > 0) == (targets > 0.5)).all(1)
        return LossPart(losses.mean(1).sum(), len(labels), right.sum())

    def divisor(self, labels: Int[Tensor, "items"]) -> float:
        """Return what the sum of `of_one` is divided by: the sum of the items' weights."""
        known = labels[labels != IGNORE]
        if not self.weights:
            return float(len(known))
        return float(torch.tensor(self.weights, dtype=torch.float64)[known.cpu()].sum())

    def _focus(self, losses: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return (1 − p)^γ of items with these unweighted losses, −log p."""
        wrong = -torch.expm1(-losses)
        # NOTE: with γ below 1 the slope at 0 is infinite, and times 0 it is NaN.
        return wrong.clamp(min=torch.finfo(wrong.dtype).eps) ** self.focal_gamma
