"""Computes sparse vectors from a masked-word head: a weight per entry of the vocabulary."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.objectives import EntryPooling, EntryWeight, VectorLoss
from bert_core.objectives.base import OWN_ROWS, Batch, JointPart, LossPart, Objective
from bert_core.objectives.graph_scores import SPARSE_VECTORS
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.vector_losses import LOSSES, Compared, counted

SCORES_AT_ONCE = 1 << 25
"""Most scores in memory at once, 128 MB in fp32: there is one per token and entry."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """What the entries of vectors cost: the sum over entries of the squared mean of their weights,
    an estimate of the products that a search takes (Paria et al. 2020, section 4)."""

    queries: float = 0.0
    """Weight in the loss, for the first texts of rows."""
    passages: float = 0.0
    """The same for the other texts."""
    warmup: float = 0.0
    """Share of the training in which both weights rise with the square of the step."""

    def at(self, progress: float) -> tuple[float, float]:
        """Return the weights when this share of the steps is done."""
        share = 1.0 if progress >= self.warmup else (progress / self.warmup) ** 2
        return share * self.queries, share * self.passages


class Splade(MaskedLanguageModeling):
    """Computes the maximum or the sum over a row's tokens of log(1 + ReLU(score)), for every entry.

    It has the weights and names of the masked-word head. Tokens are pooled as soon as they are
    scored, since their scores take many times as much memory as their vectors.

    Rows are those of `Embedding`, and their vectors are compared by their products. The cost of
    entries is that of all rows of a global batch, so that vectors are as sparse for any number of
    workers. A measured loss has the weights of the end of training.

    Source: Formal et al. 2021 (SPLADE v2, equations 1, 3 to 6); `log1p_relu` takes the logarithm
        twice (Geng et al. 2025).
    """

    part_name = "splade"
    position_key = None
    graph_scores = SPARSE_VECTORS
    joint_labels: ClassVar[tuple[str, ...]] = ("similarities", "texts")
    joint = True

    def __init__(
        self,
        config: EncoderConfig,
        pooling: EntryPooling = "max",
        activation: EntryWeight = "relu",
        loss: VectorLoss = "contrastive",
        temperature: float = 1.0,
        flops: Flops | None = None,
    ) -> None:
        """Choose how vectors are computed and trained.

        Args:
            temperature: what products are divided by.
            flops: weights of what entries cost; None counts nothing.
        """
        super().__init__(config)
        self.pooling, self.activation = pooling, activation
        self.loss, self.entry_cost = LOSSES[loss](temperature, False), flops or Flops()
        self.chooses, self.progress = self.loss.chooses, 1.0

    @property
    def item_weights(self) -> int:
        return 0  # the head runs on tokens instead (`flops`)

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        return 6 * super().item_weights * int(lengths.sum())

    def counts(self, batch: Batch) -> int:
        return self.loss.count(batch)

    def begin_step(self, progress: float) -> None:
        self.progress = progress

    def forward(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> LossPart | JointPart:
        return Objective.forward(self, encoded, batch, word_embeddings)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch vocab"]:
        blocks = list(_in_blocks(encoded, len(word_embeddings)))
        pooled: Callable[..., Tensor] = self._pooled
        if torch.is_grad_enabled() and len(blocks) > 1:  # the backward pass scores a block again
            pooled = partial(
                checkpoint, self._pooled, use_reentrant=False, preserve_rng_state=False
            )
        return torch.cat([pooled(hidden, word_embeddings, real) for hidden, real in blocks])

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch vocab"]:
        (block,), (mask,) = encoded.rows.blocks(encoded.hidden), encoded.rows.masks()
        return self._pooled(block, word_embeddings, mask)

    def part(self, logits: Float[Tensor, "items vocab"], batch: Batch) -> LossPart:
        """Return the loss of the rows `OWN_ROWS`, and the cost of all rows' entries for each of
        their items: divided by the items of all ranks, their sum has the cost once."""
        part = self._of_own_rows(self.loss.part, (logits,), batch)
        with torch.autocast(logits.device.type, enabled=False):
            is_query = logits.new_zeros(len(logits))
            is_query[Compared.of(batch["choices"]).own_at] = 1.0
            sides = torch.stack([is_query, 1 - is_query])
            means = sides / sides.sum(1, keepdim=True) @ logits  # (2, vocab)
            weights = self.entry_cost.at(self.progress if self.training else 1.0)
            cost = (means.square().sum(1) * logits.new_tensor(weights)).sum()
        return replace(part, sum=part.sum + part.count * cost)

    def soft_part(
        self,
        logits: Float[Tensor, "items vocab"],
        teachers: Float[Tensor, "items other_vocab"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Compare products instead of vectors: a teacher may have another vocabulary. Entries cost
        nothing here."""
        soft_part = partial(self.loss.soft_part, temperature=temperature)
        return self._of_own_rows(soft_part, (logits, teachers), batch)

    def _of_own_rows(
        self, loss: Callable[..., LossPart], models: tuple[Tensor, ...], batch: Batch
    ) -> LossPart:
        """Return a loss of the rows `OWN_ROWS`.

        Args:
            models: the vectors of all rows, by each model.
        """
        own = batch.get(OWN_ROWS)
        if own is None or self.loss.joint:  # which knows them
            return loss(*models, batch=batch)
        items = torch.isin(counted(batch["choices"]), own).nonzero()[:, 0]
        labels = {name: batch[name].index_select(0, items) for name in self.joint_labels}
        vectors = [each.index_select(0, items) for each in models]
        return loss(*vectors, batch=labels | {"choices": batch["choices"][own]})

    def _pooled(
        self,
        hidden: Float[Tensor, "rows seq hidden"],
        word_embeddings: Float[Tensor, "vocab embedding"],
        real: Bool[Tensor, "rows seq"] | None,
    ) -> Float[Tensor, "rows vocab"]:
        """Return the vectors of rows, in fp32 or wider."""
        scores = self.head(hidden, word_embeddings)
        wide = torch.promote_types(scores.dtype, torch.float32)
        if real is not None:
            scores = scores.masked_fill(~real[..., None], 0.0)  # 0 adds no weight
        if self.pooling == "max":  # the function is increasing: once per entry is enough
            return self._weights(scores.amax(1).to(wide))
        return self._weights(scores).sum(1, dtype=wide)

    def _weights(self, scores: Float[Tensor, "*items vocab"]) -> Float[Tensor, "*items vocab"]:
        weights = scores.relu().log1p()
        return weights.log1p() if self.activation == "log1p_relu" else weights


def _in_blocks(
    encoded: Encoded, vocab_size: int
) -> Iterator[tuple[Float[Tensor, "rows seq hidden"], Bool[Tensor, "rows seq"] | None]]:
    """Yield rows that are scored together, and which of their tokens are real; None if all are."""
    blocks, masks = encoded.rows.blocks(encoded.hidden), encoded.rows.masks()
    for block, mask in zip(blocks, masks, strict=True):
        rows = max(1, SCORES_AT_ONCE // (block.shape[1] * vocab_size))
        real = [None] * len(block) if mask is None else mask.split(rows)
        yield from zip(block.split(rows), real, strict=False)
