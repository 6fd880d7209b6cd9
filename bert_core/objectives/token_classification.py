"""Predicts one label per token (Devlin et al. 2018, section 5.3)."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import RecurrentHead, TokenHead
from bert_core.model.layout import gather_tokens
from bert_core.objectives import IGNORE
from bert_core.objectives.base import Batch, LossPart, Objective, soft_cross_entropy
from bert_core.objectives.class_loss import ClassLoss
from bert_core.objectives.graph_scores import TOKEN_CLASSIFICATION

LAYERS = 4
"""Last layers that the feature-based head reads, or all if there are fewer: the best choice in the
paper's table 7."""


class TokenLabels(Objective):
    """Predicts the label of each token at `token_positions`; subclasses provide the head."""

    needs_pooler = False
    label_key = "token_labels"
    position_key = "token_positions"
    loss = ClassLoss()

    def counts(self, batch: Batch) -> int:
        return int((batch[self.label_key] != IGNORE).sum())

    def part(self, logits: Float[Tensor, "items labels"], batch: Batch) -> LossPart:
        part = self.loss.of_one(logits, batch[self.label_key])
        return replace(part, count=self.counts(batch))

    def divisor(self, batch: Batch) -> float:
        return self.loss.divisor(batch[self.label_key])

    def soft_part(
        self,
        logits: Float[Tensor, "items labels"],
        teachers: Float[Tensor, "items labels"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        known = batch[self.label_key] != IGNORE
        return soft_cross_entropy(logits[known], teachers[known], temperature)


class TokenClassification(TokenLabels):
    """Predicts token labels with a linear head, trained with the encoder."""

    name = "token_classification"
    graph_scores = TOKEN_CLASSIFICATION

    def __init__(
        self, config: EncoderConfig, num_labels: int, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.head = TokenHead(config, num_labels, dropout)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items labels"]:
        return self.head(encoded.hidden)


class FeatureBasedTokenClassification(TokenLabels):
    """Predicts token labels with a recurrent head over a frozen encoder; only the head is
    trained."""

    name = "feature_based_token_classification"
    reads_layers = True
    trains_encoder = False
    in_transformers = False
    graph_scores = None  # the LSTM depends on the length of each row

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self._layers = min(LAYERS, config.num_hidden_layers)
        self.head = RecurrentHead(config, self._layers * config.hidden_size, num_labels)

    def places(self, batch: Batch) -> None:
        """Return None, which means all tokens, since the head reads each token's context."""

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items labels"]:
        vectors = torch.cat(encoded.layers[-self._layers :], dim=-1)
        return gather_tokens(self.head(vectors, encoded.rows), batch[self.position_key])
