"""Labels or a number per sequence (Devlin et al. 2018, section 4.1)."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import LinearHead
from bert_core.objectives.base import Batch, LossPart, Objective, cross_entropy

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""transformers' names of the kinds of training for this head."""


class Classification(Objective):
    """Predict one of `num_labels` for a sequence, several of them, or a number (with one "label").

    The loss is cross-entropy, binary cross-entropy (the mean over labels), or the squared error.
    """

    name = "classification"
    needs_pooler = True
    label_key = "labels"

    def __init__(
        self,
        config: EncoderConfig,
        num_labels: int,
        dropout: float | None = None,
        problem_type: ProblemType = "single_label_classification",
    ) -> None:
        """`dropout` defaults to the encoder's."""
        super().__init__()
        self.problem_type = problem_type
        self.chooses = problem_type != "regression"
        self.head = LinearHead(config, num_labels, dropout)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch labels"]:
        assert encoded.pooled is not None
        return self.head(encoded.pooled)

    def counts(self, batch: Batch) -> int:
        return len(batch[self.label_key])

    def part(self, logits: Float[Tensor, "batch labels"], batch: Batch) -> LossPart:
        labels = batch[self.label_key]
        if self.problem_type == "single_label_classification":
            return cross_entropy(logits, labels)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.problem_type == "regression":
            errors = (wide[:, 0] - labels).square()
            return LossPart(errors.sum(), len(labels), None)
        losses = functional.binary_cross_entropy_with_logits(
            wide, labels.to(wide.dtype), reduction="none"
        )
        right = ((wide > 0) == (labels > 0.5)).all(1)  # a label may be a share
        return LossPart(losses.mean(1).sum(), len(labels), right.sum())

    def soft_part(
        self,
        logits: Float[Tensor, "batch labels"],
        teachers: Float[Tensor, "batch labels"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """For several labels, T² times the mean of their KL divergences; for a number, the squared
        difference, at any temperature."""
        if self.problem_type == "single_label_classification":
            return super().soft_part(logits, teachers, batch, temperature)
        wide = torch.promote_types(logits.dtype, torch.float32)
        student, teacher = logits.to(wide), teachers.to(wide)
        if self.problem_type == "regression":
            return LossPart((student - teacher).square().sum(), len(student), None)
        shares = (teacher / temperature).sigmoid()
        losses, least = (
            functional.binary_cross_entropy_with_logits(scores, shares, reduction="none")
            for scores in (student / temperature, teacher / temperature)
        )
        agree = ((student > 0) == (teacher > 0)).all(1)
        return LossPart(temperature**2 * (losses - least).mean(1).sum(), len(student), agree.sum())
