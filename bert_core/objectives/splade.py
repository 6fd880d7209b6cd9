"""Computes sparse vectors from a masked-word head: a weight per entry of the vocabulary."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.objectives import EntryPooling, EntryWeight
from bert_core.objectives.base import Batch
from bert_core.objectives.graph_scores import SPARSE_VECTORS
from bert_core.objectives.mlm import MaskedLanguageModeling

SCORES_AT_ONCE = 1 << 25
"""Most scores in memory at once, 128 MB in fp32: there is one per token and entry."""


class Splade(MaskedLanguageModeling):
    """Computes the maximum or the sum over a row's tokens of log(1 + ReLU(score)), for every entry.

    It uses the weights and names of the masked-word head, and never trains them. Tokens are pooled
    as soon as they are scored, since their scores take many times as much memory as their vectors.

    Source: Formal et al. 2021 (SPLADE v2, equations 1 and 6); `log1p_relu` takes the logarithm
        twice (Geng et al. 2025).
    """

    position_key = None
    graph_scores = SPARSE_VECTORS

    def __init__(
        self, config: EncoderConfig, pooling: EntryPooling = "max", activation: EntryWeight = "relu"
    ) -> None:
        super().__init__(config)
        self.pooling, self.activation = pooling, activation

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch vocab"]:
        vectors = []
        blocks, masks = encoded.rows.blocks(encoded.hidden), encoded.rows.masks()
        for block, mask in zip(blocks, masks, strict=True):
            rows = max(1, SCORES_AT_ONCE // (block.shape[1] * len(word_embeddings)))
            real = [None] * len(block) if mask is None else mask.split(rows)
            for part, seen in zip(block.split(rows), real, strict=False):
                vectors.append(self._pooled(self.head(part, word_embeddings), seen))
        return torch.cat(vectors)

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch vocab"]:
        (block,), (mask,) = encoded.rows.blocks(encoded.hidden), encoded.rows.masks()
        return self._pooled(self.head(block, word_embeddings), mask)

    def _pooled(
        self, scores: Float[Tensor, "rows seq vocab"], real: Bool[Tensor, "rows seq"] | None
    ) -> Float[Tensor, "rows vocab"]:
        if real is not None:
            scores = scores.masked_fill(~real[..., None], 0.0)  # 0 adds no weight
        if self.pooling == "max":  # the function is increasing: once per entry is enough
            return self._weights(scores.amax(1))
        return self._weights(scores).sum(1)

    def _weights(self, scores: Float[Tensor, "*items vocab"]) -> Float[Tensor, "*items vocab"]:
        weights = scores.relu().log1p()
        return weights.log1p() if self.activation == "log1p_relu" else weights
