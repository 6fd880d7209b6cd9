"""What is minimised: an encoder, and for each part of the loss a head and its labels.

An objective gives an unreduced sum and a count; dividing is for the training loop alone, once, by
the counts of the whole global batch, so that neither workers nor micro-batches change a gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.rows import taken
from bert_core.model.variants import EncoderConfig

Batch = dict[str, Tensor]
"""Tensors of B rows, int64, in one of two layouts (`model.rows`).

Padded to S tokens: `input_ids`, `token_type_ids` (B, S); `attention_mask` (B, S), 1 = attend,
absent where all are 1. End to end: `input_ids`, `token_type_ids` (T,) and `offsets` (B + 1,).
Labels: `mlm_positions`, `mlm_labels` (M,) and `token_positions`, `token_labels` (N,), positions
counting along the flattened tokens; `next_sentence_label`, `sentence_order_label` (B,), 0 = is
next, in order; `labels` (B,), or one a question, whose rows `choices` (Q,) counts;
`start_positions`, `end_positions` (B,), within the row. Vectors (V,): `vector_starts` and
`vector_ends`, the tokens that each is the mean of; `similarities`, `texts` (equal texts have equal
numbers), of rows that `choices` counts and `groups` (G,) joins.
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
    reads_layers: ClassVar[bool] = False
    """Whether it reads what every layer gave (`Encoded.layers`)."""
    trains_encoder: ClassVar[bool] = True
    """Whether the encoder learns from it, or stays as it is."""
    in_transformers: ClassVar[bool] = True
    """Whether a class of transformers has its head."""

    @abstractmethod
    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items classes"]:
        """Scores of every class for every item, in the order of the labels.

        Args:
            encoded: its `hidden` has the tokens at `places`, in their order, or all.
        """

    def places(self, batch: Batch) -> Int[Tensor, "items"] | None:
        """Places of the tokens that it reads beside the pooled vector; None reads all."""
        if self.position_key is not None:
            return batch[self.position_key]
        return batch["input_ids"].new_empty(0) if self.needs_pooler else None

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
        self.frozen = bool(objectives) and not any(each.trains_encoder for each in objectives)
        """Whether the encoder stays as it is: it gets no gradient, and drops nothing."""
        self.encoder.requires_grad_(not self.frozen)

    def train(self, mode: bool = True) -> "ObjectiveModel":
        super().train(mode)
        self.encoder.train(mode and not self.frozen)
        return self

    def forward(self, batch: Batch) -> dict[str, Part]:
        """Each objective's part, by name."""
        words = self._word_embeddings
        return {part.name: part(own, batch, words) for part, own in self._encoded(batch)}

    def logits(self, batch: Batch) -> dict[str, Tensor]:
        """Each objective's scores (items, classes), by name; labels are not needed."""
        words = self._word_embeddings
        return {part.name: part.logits(own, batch, words) for part, own in self._encoded(batch)}

    def encode(
        self,
        batch: Batch,
        places: Int[Tensor, "chosen"] | None = None,
        *,
        all_layers: bool = False,
        all_scores: bool = False,
    ) -> Encoded:
        """The encoder's output alone; with `places` that of the tokens there."""
        return self.encoder(
            batch["input_ids"],
            batch["token_type_ids"],
            batch.get("attention_mask"),
            batch.get("offsets"),
            places=places,
            all_layers=all_layers,
            all_scores=all_scores,
        )

    def outputs(self, batch: Batch) -> int | None:
        """How many tokens' vectors the last layer has to give; None for those of all."""
        asked = [part.places(batch) for part in self._parts]
        if any(places is None for places in asked) or not self.encoder.may_take_early:
            return None
        rows = len(batch["input_ids"]) if "offsets" not in batch else len(batch["offsets"]) - 1
        pooled = 0 if self.encoder.pooler is None else rows
        return pooled + sum(len(places) for places in asked if places is not None)

    def _encoded(self, batch: Batch) -> Iterator[tuple[Objective, Encoded]]:
        """Each objective with what it reads: what none reads is not computed."""
        asked = [part.places(batch) for part in self._parts]
        chosen = [places for places in asked if places is not None]
        if not chosen or len(chosen) < len(asked):
            encoded = self.encode(batch, all_layers=any(part.reads_layers for part in self._parts))
            hiddens = [taken(encoded.hidden, places) for places in asked]
        else:
            encoded = self.encode(batch, torch.cat(chosen))
            hiddens = list(encoded.hidden.split([len(places) for places in chosen]))
        for part, hidden in zip(self._parts, hiddens, strict=True):
            yield part, replace(encoded, hidden=hidden)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Items of each part in the batch, by name, without a forward pass."""
        return {part.name: part.counts(batch) for part in self._parts}

    @property
    def in_transformers(self) -> frozenset[str]:
        """The objectives whose heads a class of transformers has."""
        return frozenset(part.name for part in self._parts if part.in_transformers)

    @property
    def _parts(self) -> list[Objective]:
        return cast("list[Objective]", list(self.objectives.values()))

    @property
    def _word_embeddings(self) -> Tensor:
        return self.encoder.embeddings.word_embeddings.weight
