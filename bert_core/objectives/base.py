"""What is minimised: an encoder, and for each part of the loss a head and its labels.

An objective gives an unreduced sum and a count; dividing is for the training loop alone, once, by
the counts of the whole global batch, so that neither workers nor micro-batches change a gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.variants import EncoderConfig

Batch = dict[str, Tensor]
"""Tensors of B rows, int64, in one of two layouts (`model.rows`).

Padded to S tokens: `input_ids`, `token_type_ids` (B, S); `attention_mask` (B, S), 1 = attend,
absent where all are 1. End to end: `input_ids`, `token_type_ids` (T,) and `offsets` (B + 1,).
Labels: `mlm_positions`, `mlm_labels` (M,) and `token_positions`, `token_labels` (N,), positions
counting along the flattened tokens; `next_sentence_label`, `sentence_order_label` (B,), 0 = is
next, in order; `labels` (B,), or one a question, whose rows `choices` (Q,) counts;
`start_positions`, `end_positions` (B,), within the row.
"""


@dataclass(frozen=True)
class Part:
    """One part of the loss over one batch."""

    sum: Float[Tensor, ""]
    """Loss summed over the items, fp32 at least."""
    count: int
    """Items summed; the mean is `sum / count` over all workers' batches."""
    correct: Int[Tensor, ""] | None
    """Items whose best score is the label's; carries no gradient. None where nothing is chosen."""


class Objective(nn.Module, ABC):
    """One part of the loss: owns its head, knows where its labels are."""

    name: ClassVar[str]
    """Key of its part, its weights and its metrics."""
    needs_pooler: ClassVar[bool]
    """Whether its head reads the pooled vector."""
    label_key: ClassVar[str]
    """Entry of the batch that holds one label an item."""
    position_key: ClassVar[str | None] = None
    """Entry of the batch that names the tokens that are scored; None where a row has one score."""
    chooses: bool = True
    """Whether its part counts what is correct."""

    @abstractmethod
    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items classes"]:
        """Scores of every class for every item, in the order of the labels."""

    def counts(self, batch: Batch) -> int:
        """Items that this part has in the batch, known without a forward pass."""
        return batch[self.label_key].numel()

    def forward(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Part:
        return cross_entropy(self.logits(encoded, batch, word_embeddings), batch[self.label_key])


def cross_entropy(logits: Float[Tensor, "items classes"], labels: Int[Tensor, "items"]) -> Part:
    """Softmax cross-entropy as a part, in fp32 at least. No items give zero."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = functional.cross_entropy(wide, labels, reduction="sum")
    return Part(total, labels.numel(), (logits.detach().argmax(-1) == labels).sum())


class ObjectiveModel(nn.Module):
    """An encoder with the objectives that train it; the one module that is trained and saved.

    The encoder has a pooler only where an objective reads it, so that every parameter gets a
    gradient, which DistributedDataParallel wants.
    """

    def __init__(self, encoder_config: EncoderConfig, objectives: Sequence[Objective]) -> None:
        super().__init__()
        self.encoder = Encoder(
            encoder_config, pooler=any(objective.needs_pooler for objective in objectives)
        )
        self.objectives = nn.ModuleDict({objective.name: objective for objective in objectives})

    def forward(self, batch: Batch) -> dict[str, Part]:
        """Each objective's part, by name."""
        encoded, words = self.encode(batch), self._word_embeddings
        return {part.name: part(encoded, batch, words) for part in self._parts}

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Each objective's scores (items, classes), by name; labels are not needed."""
        encoded, words = self.encode(batch), self._word_embeddings
        return {part.name: part.logits(encoded, batch, words) for part in self._parts}

    def encode(self, batch: Batch) -> Encoded:
        """The encoder's output alone."""
        return self.encoder(
            batch["input_ids"],
            batch["token_type_ids"],
            batch.get("attention_mask"),
            batch.get("offsets"),
        )

    def counts(self, batch: Batch) -> dict[str, int]:
        """Items of each part in the batch, by name, without a forward pass."""
        return {part.name: part.counts(batch) for part in self._parts}

    @property
    def _parts(self) -> list[Objective]:
        return cast("list[Objective]", list(self.objectives.values()))

    @property
    def _word_embeddings(self) -> Tensor:
        return self.encoder.embeddings.word_embeddings.weight
