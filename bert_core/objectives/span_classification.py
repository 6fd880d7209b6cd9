"""Predicts the labels of all spans up to a length, which may be nested and overlap."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import SpanHead
from bert_core.objectives import IGNORE
from bert_core.objectives.base import Batch, LossPart, Objective
from bert_core.objectives.graph_scores import span_scores


class SpanClassification(Objective):
    """Scores every label of every span from each token at `token_positions`, its first, to one of
    the next in the same row, its last. The loss is binary cross-entropy, summed over the spans from
    a token."""

    name = "span_classification"
    needs_pooler = False
    label_key = "span_labels"
    position_key = "token_positions"
    in_transformers = False

    def __init__(self, config: EncoderConfig, num_labels: int, most: int) -> None:
        """Build the head; `most` is the greatest number of tokens of a span."""
        super().__init__()
        self.graph_scores = span_scores(num_labels, most)
        self.num_labels, self.most = num_labels, most
        self.head = SpanHead(config, num_labels)

    @property
    def item_weights(self) -> int:
        return sum(part.numel() for part in self.head.parameters() if part.dim() > 1)

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items scores"]:
        return self.head(encoded.hidden)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items most labels"]:
        """Return the scores of spans by their first token, length and label; -inf if a span would
        end in another row."""
        parts = self.every(encoded, word_embeddings)
        labels, size = self.num_labels, self.head.SIZE
        starts, ends, left, right = parts.split([labels * size, size, labels, labels], dim=-1)
        starts = starts.unflatten(-1, (labels, size))
        rows, units = _rows_of(batch), len(parts)
        scores = []
        for more in range(min(self.most, units)):
            first, last = slice(units - more), slice(more, None)
            paired = torch.einsum("uld,ud->ul", starts[first], ends[last])
            paired = paired + left[first] + right[last]
            paired = paired.masked_fill((rows[first] != rows[last])[:, None], float("-inf"))
            scores.append(functional.pad(paired, (0, 0, 0, more), value=float("-inf")))
        missing = self.most - len(scores)
        found = torch.stack(scores, 1) if scores else parts.new_empty((0, 0, labels))
        return functional.pad(found, (0, 0, 0, missing), value=float("-inf"))

    def counts(self, batch: Batch) -> int:
        return int(_known(batch[self.label_key]).sum())

    def part(self, logits: Float[Tensor, "items most labels"], batch: Batch) -> LossPart:
        labels = batch[self.label_key]
        known = _known(labels)
        scores = logits[known].to(torch.promote_types(logits.dtype, torch.float32))
        wanted = labels[known].to(scores.dtype)
        real = scores.detach() > float("-inf")
        losses = functional.binary_cross_entropy_with_logits(
            scores[real], wanted[real], reduction="none"
        )
        right = ((scores.detach() > 0) == (wanted > 0)) | ~real
        return LossPart(losses.sum(), int(known.sum()), right.flatten(1).all(1).sum())

    def soft_part(
        self,
        logits: Float[Tensor, "items most labels"],
        teachers: Float[Tensor, "items most labels"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Return T² times the KL divergences of all labels of all spans from a token, summed."""
        known = _known(batch[self.label_key])
        wide = torch.promote_types(logits.dtype, torch.float32)
        student, teacher = logits[known].to(wide), teachers[known].to(wide)
        real = teacher > float("-inf")
        agree = (((student > 0) == (teacher > 0)) | ~real).flatten(1).all(1)
        student, teacher = student[real] / temperature, teacher[real] / temperature
        losses, least = (
            functional.binary_cross_entropy_with_logits(scores, teacher.sigmoid(), reduction="none")
            for scores in (student, teacher)
        )
        part = LossPart((losses - least).sum(), int(known.sum()), agree.sum())
        return replace(part, sum=temperature**2 * part.sum)


def _known(labels: Int[Tensor, "items most labels"]) -> Bool[Tensor, "items"]:
    """Return which tokens have labels for the spans from them."""
    return (labels != IGNORE).flatten(1).all(1)


def _rows_of(batch: Batch) -> Int[Tensor, "items"]:
    """Return the row of each token at `token_positions`."""
    positions = batch["token_positions"]
    if "offsets" in batch:
        return torch.searchsorted(batch["offsets"], positions, right=True)
    return positions // batch["input_ids"].shape[1]
