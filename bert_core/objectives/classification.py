"""Predicts labels or a number per sequence (Devlin et al. 2018, section 4.1)."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import LinearHead
from bert_core.objectives.base import Batch, LossPart, Objective, widened
from bert_core.objectives.class_loss import ClassLoss
from bert_core.objectives.graph_scores import CLASSIFICATION

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""transformers' names of the kinds of training for this head."""


class Standardised(nn.Module):
    """Turns a learned weight into the weight as used, `learned * deviation + mean`, so that numbers
    are learned around 0, at the scale of 1, whatever the unit of the targets is. What is saved and
    loaded is the weight as used."""

    def __init__(self, deviation: float, mean: float = 0.0) -> None:
        super().__init__()
        self.deviation, self.mean = deviation, mean

    def forward(self, learned: Tensor) -> Tensor:
        return learned * self.deviation + self.mean

    def right_inverse(self, used: Tensor) -> Tensor:
        return (used - self.mean) / self.deviation


class Classification(Objective):
    """Predicts one of `num_labels` for a sequence, several of them, or a number (with one "label").

    The loss is cross-entropy, binary cross-entropy (the mean over labels), or the squared error in
    units of the targets' variance. `loss` changes the first two.
    """

    name = "classification"
    needs_pooler = True
    label_key = "labels"
    loss = ClassLoss()
    graph_scores = CLASSIFICATION

    def __init__(
        self,
        config: EncoderConfig,
        num_labels: int,
        dropout: float | None = None,
        problem_type: ProblemType = "single_label_classification",
        *,
        mean: float = 0.0,
        deviation: float = 1.0,
    ) -> None:
        """Build the head.

        Args:
            dropout: probability before the head; by default the encoder's.
            mean: mean of the numbers to predict; scores are in their unit.
            deviation: standard deviation of the numbers to predict.
        """
        super().__init__()
        self.problem_type = problem_type
        self.chooses = problem_type != "regression"
        self.head: nn.Module = LinearHead(config, num_labels, dropout)
        self.deviation = deviation
        if (mean, deviation) != (0.0, 1.0):
            self._standardise(mean, deviation)

    def _standardise(self, mean: float, deviation: float) -> None:
        linear = self.head.get_submodule("linear")
        for name, unit in (
            ("weight", Standardised(deviation)), ("bias", Standardised(deviation, mean)),
        ):  # fmt: skip
            drawn = getattr(linear, name).detach().clone()
            parametrize.register_parametrization(linear, name, unit)
            setattr(linear, name, unit(drawn))

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch labels"]:
        pooled = encoded.pooled
        assert pooled is not None
        if self.chooses or not torch.is_autocast_enabled(pooled.device.type):
            return self.head(pooled)
        # NOTE: bfloat16 has 8 bits, which are few for a number far from 0, such as a year.
        with torch.autocast(pooled.device.type, enabled=False):
            return self.head(pooled.float())

    def counts(self, batch: Batch) -> int:
        return len(batch[self.label_key])

    def divisor(self, batch: Batch) -> float:
        if self.problem_type != "single_label_classification":
            return super().divisor(batch)
        return self.loss.divisor(batch[self.label_key])

    def part(self, logits: Float[Tensor, "batch labels"], batch: Batch) -> LossPart:
        labels = batch[self.label_key]
        if self.problem_type == "single_label_classification":
            return self.loss.of_one(logits, labels)
        if self.problem_type == "multi_label_classification":
            return self.loss.of_several(logits, labels)
        wide = widened(logits)
        errors = ((wide[:, 0] - labels) / self.deviation).square()
        return LossPart(errors.sum(), len(labels), None)

    def soft_part(
        self,
        logits: Float[Tensor, "batch labels"],
        teachers: Float[Tensor, "batch labels"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Return the loss against a teacher's scores: for several labels, T² times the mean of
        their KL divergences; for a number, the squared difference, at any temperature."""
        if self.problem_type == "single_label_classification":
            return super().soft_part(logits, teachers, batch, temperature)
        wide = torch.promote_types(logits.dtype, torch.float32)
        student, teacher = logits.to(wide), teachers.to(wide)
        if self.problem_type == "regression":
            errors = ((student - teacher) / self.deviation).square()
            return LossPart(errors.sum(), len(student), None)
        shares = (teacher / temperature).sigmoid()
        losses, least = (
            functional.binary_cross_entropy_with_logits(scores, shares, reduction="none")
            for scores in (student / temperature, teacher / temperature)
        )
        agree = ((student > 0) == (teacher > 0)).all(1)
        return LossPart(temperature**2 * (losses - least).mean(1).sum(), len(student), agree.sum())
