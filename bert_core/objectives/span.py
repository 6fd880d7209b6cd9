"""Predicts the position of an answer in a row (Devlin et al. 2018, section 4.2)."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import TokenHead
from bert_core.objectives.base import (
    Batch,
    LossPart,
    Objective,
    cross_entropy,
    soft_cross_entropy,
)
from bert_core.objectives.graph_scores import SPAN


class Span(Objective):
    """Predicts the tokens of a row at which an answer starts and ends.

    A row's loss is the mean of both; padding is never scored.
    """

    name = "span"
    needs_pooler = False
    label_key = "start_positions"
    graph_scores = SPAN

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head = TokenHead(config, 2, config.head.span_dropout)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch seq 2"]:
        """Return start and end scores, -inf at padding."""
        rows = encoded.rows
        scores, masks = rows.blocks(self.head(encoded.hidden)), rows.masks()
        blocks = []
        for block, mask in zip(scores, masks, strict=True):
            if mask is not None:
                block = block.masked_fill(~mask[..., None], float("-inf"))
            missing = rows.longest - block.shape[1]
            blocks.append(functional.pad(block, (0, 0, 0, missing), value=float("-inf")))
        return torch.cat(blocks)

    def part(self, logits: Float[Tensor, "batch seq 2"], batch: Batch) -> LossPart:
        start, end = logits.unbind(-1)
        begins, ends = batch["start_positions"], batch["end_positions"]
        total = cross_entropy(start, begins).sum + cross_entropy(end, ends).sum
        both = (start.argmax(-1) == begins) & (end.argmax(-1) == ends)
        return LossPart(total / 2, len(begins), both.sum())

    def soft_part(
        self,
        logits: Float[Tensor, "batch seq 2"],
        teachers: Float[Tensor, "batch seq 2"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Return the mean of the losses of start and end, each over the tokens of a row."""
        student, teacher = logits.mT, teachers.mT  # (B, 2, S)
        ends = soft_cross_entropy(student, teacher, temperature)
        both = (student.argmax(-1) == teacher.argmax(-1)).all(-1)
        return LossPart(ends.sum / 2, len(both), both.sum())
