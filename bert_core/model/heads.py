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
    comes in with each call and is stored once.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialise(self, config.initializer_range)

    def forward(
        self, rows: Float[Tensor, "rows hidden"], word_embeddings: Float[Tensor, "vocab hidden"]
    ) -> Float[Tensor, "rows vocab"]:
        return functional.linear(
            self.norm(self.activation(self.dense(rows))), word_embeddings, self.bias
        )


class NextSentenceHead(nn.Module):
    """Whether the second segment followed the first: score 0 = is next, 1 = is not."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.hidden_size, 2)
        initialise(self, config.initializer_range)

    def forward(self, pooled: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch 2"]:
        return self.linear(pooled)


class ClassificationHead(nn.Module):
    """Scores of labels for a whole sequence: dropout, then a linear map of the pooled vector."""

    def __init__(self, config: EncoderConfig, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(config.hidden_size, num_labels)
        initialise(self, config.initializer_range)

    def forward(self, pooled: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch labels"]:
        return self.linear(self.dropout(pooled))
