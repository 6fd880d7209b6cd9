"""What turns vectors into scores: one small class a head."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.layers import ACTIVATIONS, initialise
from bert_core.model.variants import EncoderConfig


class MaskedLanguageModelHead(nn.Module):
    """Scores of every word for chosen positions (Devlin et al. 2018, section 3.1).

    The decoder is the word embedding itself and only its bias is the head's own, so the embedding
    comes in with each call and is stored once. E is the width of the embedding.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.activation = ACTIVATIONS[config.feed_forward.activation]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialise(self, config.initializer_range)

    def forward(
        self, rows: Float[Tensor, "rows hidden"], word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "rows vocab"]:
        return functional.linear(
            self.norm(self.activation(self.dense(rows))), word_embeddings, self.bias
        )


class LinearHead(nn.Module):
    """Scores of labels for a sequence or a token: dropout, then a linear map of its vector."""

    def __init__(self, config: EncoderConfig, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(config.hidden_size, num_labels)
        initialise(self, config.initializer_range)

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items labels"]:
        return self.linear(self.dropout(vectors))


def classifier(config: EncoderConfig, num_labels: int, dropout: float | None = None) -> LinearHead:
    """A head that classifies; `dropout` None takes the encoder's own."""
    return LinearHead(config, num_labels, config.classifier_dropout if dropout is None else dropout)
