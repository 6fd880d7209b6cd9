"""What turns vectors into scores: one small class a head."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.dropout import Dropout
from bert_core.model.layers import Transform, initialise
from bert_core.model.variants import EncoderConfig


class MaskedLanguageModelHead(nn.Module):
    """Scores of every word for chosen positions (Devlin et al. 2018, section 3.1).

    The decoder is the word embedding itself and only its bias is the head's own, so the embedding
    comes in with each call and is stored once. E is the width of the embedding.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.transform = Transform(config, config.embedding_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialise(self, config)

    def forward(
        self, rows: Float[Tensor, "rows hidden"], word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "rows vocab"]:
        return functional.linear(self.transform(rows), word_embeddings, self.bias)


class LinearHead(nn.Module):
    """Scores of labels for a sequence: dropout, then a linear map of its vector."""

    def __init__(
        self, config: EncoderConfig, num_labels: int, dropout: float | None = None
    ) -> None:
        """`dropout` None takes that of the encoder's classifiers."""
        super().__init__()
        self.dropout = Dropout(config.classifier_dropout if dropout is None else dropout)
        self.linear = nn.Linear(config.hidden_size, num_labels)
        initialise(self, config)

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items labels"]:
        return self.linear(self.dropout(vectors))


class TokenHead(LinearHead):
    """The same for tokens, whose vectors pass the encoder's `Transform` first where it has one."""

    def __init__(
        self, config: EncoderConfig, num_labels: int, dropout: float | None = None
    ) -> None:
        super().__init__(config, num_labels, dropout)
        self.transform = Transform(config, config.hidden_size) if config.head.transform else None
        if self.transform is not None:
            initialise(self.transform, config)

    def forward(self, vectors: Float[Tensor, "*items hidden"]) -> Float[Tensor, "*items labels"]:
        return super().forward(vectors if self.transform is None else self.transform(vectors))
