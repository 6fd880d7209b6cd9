"""The parts of an encoder that look at one token at a time, and the block that joins them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.attention import ATTENTION, KeylessBiasLinear
from bert_core.model.rows import Rows
from bert_core.model.variants import ConvolutionConfig, EncoderConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "tanh": torch.tanh,
}


def initialise(module: nn.Module, standard_deviation: float) -> None:
    """Fill every weight below `module` by Hugging Face's rule, from torch's global generator.

    Normal weights, zero biases, unit norms and a zero row for padding. The paper's code truncates
    the normal at two standard deviations, Hugging Face does not.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv1d):
            nn.init.normal_(part.weight, std=standard_deviation)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        elif isinstance(part, KeylessBiasLinear):
            nn.init.normal_(part.weight, std=standard_deviation)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=standard_deviation)
            if part.padding_idx is not None:
                nn.init.zeros_(part.weight[part.padding_idx])
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)


class Embeddings(nn.Module):
    """Word + position + segment, normalised (Devlin et al. 2018, figure 2).

    Families leave out positions or segments; ALBERT's are narrow and widened after.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        part, width = config.embeddings, config.embedding_size
        self.offset = part.position_offset
        self.word_embeddings = nn.Embedding(part.vocab_size, width, padding_idx=part.pad_token_id)
        self.position_embeddings = (
            nn.Embedding(part.max_position_embeddings, width) if part.absolute_positions else None
        )
        self.token_type_embeddings = (
            nn.Embedding(part.type_vocab_size, width) if part.type_vocab_size else None
        )
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.widen = nn.Linear(width, config.hidden_size) if part.size else None

    def forward(
        self,
        input_ids: Int[Tensor, "*tokens"],
        token_type_ids: Int[Tensor, "*tokens"],
        rows: Rows,
    ) -> Float[Tensor, "*tokens hidden"]:
        hidden = self.word_embeddings(input_ids)
        if self.token_type_embeddings is not None:
            one = self.token_type_embeddings.num_embeddings == 1
            hidden = hidden + (
                self.token_type_embeddings.weight[0]
                if one
                else self.token_type_embeddings(token_type_ids)
            )
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(rows.positions() + self.offset)
        hidden = self.dropout(self.norm(hidden))
        return hidden if self.widen is None else self.widen(hidden)


class FeedForward(nn.Module):
    """Two linear maps with an activation between (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.feed_forward.intermediate_size)
        self.down = nn.Linear(config.feed_forward.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.feed_forward.activation]

    def forward(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens hidden"]:
        return self.down(self.activation(self.up(hidden)))


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each added to its input and normalised after (post-norm)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = ATTENTION[type(config.attention)](config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden: Float[Tensor, "*tokens hidden"], rows: Rows, shared: Any
    ) -> Float[Tensor, "*tokens hidden"]:
        """`shared` is what the attentions of all layers have in common, None for most."""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, rows, shared)))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


class Convolution(nn.Module):
    """What neighbouring embeddings say, added to the first layer's output (DeBERTa v2)."""

    def __init__(self, config: EncoderConfig, part: ConvolutionConfig) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            config.hidden_size, config.hidden_size, part.kernel_size, padding="same"
        )
        self.activation = ACTIVATIONS[part.activation]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        embedded: Float[Tensor, "*tokens hidden"],
        hidden: Float[Tensor, "*tokens hidden"],
        rows: Rows,
    ) -> Float[Tensor, "*tokens hidden"]:
        blocks = []
        for block, mask in zip(rows.blocks(embedded), rows.masks(), strict=True):
            real = block if mask is None else block * mask[..., None]
            blocks.append(self.conv(real.transpose(1, 2)).transpose(1, 2))
        return self.norm(hidden + self.activation(self.dropout(rows.joined(blocks))))


class Pooler(nn.Module):
    """One vector a sequence: its first token's through a linear map and an activation."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        dropout = config.head.pooler_dropout
        self.dropout = nn.Dropout(config.classifier_dropout if dropout is None else dropout)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.head.pooler_activation]

    def forward(self, first: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch hidden"]:
        return self.activation(self.dense(self.dropout(first)))
