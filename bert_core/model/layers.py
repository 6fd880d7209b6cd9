"""The parts of an encoder that look at one token at a time, and the block that joins them."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.attention import SelfAttention
from bert_core.model.variants import EncoderConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def initialise(module: nn.Module, standard_deviation: float) -> None:
    """Fill every weight below `module` by Hugging Face's rule, from torch's global generator.

    Normal weights, zero biases, unit norms and a zero row for padding. The paper's code truncates
    the normal at two standard deviations, Hugging Face does not.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=standard_deviation)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=standard_deviation)
            if part.padding_idx is not None:
                nn.init.zeros_(part.weight[part.padding_idx])
        elif isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)


class Embeddings(nn.Module):
    """Word + position + segment, normalised (Devlin et al. 2018, figure 2)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id
        )
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, input_ids: Int[Tensor, "batch seq"], token_type_ids: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch seq hidden"]:
        hidden = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        positions = self.position_embeddings.weight[: input_ids.shape[1]]  # (S, D)
        return self.dropout(self.norm(hidden + positions))


class FeedForward(nn.Module):
    """Two linear maps with an activation between (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(
        self, hidden: Float[Tensor, "batch seq hidden"]
    ) -> Float[Tensor, "batch seq hidden"]:
        return self.down(self.activation(self.up(hidden)))


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each added to its input and normalised after (post-norm)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden: Float[Tensor, "batch seq hidden"],
        bias: Float[Tensor, "batch 1 1 seq"] | None,
    ) -> Float[Tensor, "batch seq hidden"]:
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, bias)))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


class Pooler(nn.Module):
    """One vector a sequence: the state of [CLS] through a linear map and tanh."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch hidden"]:
        return torch.tanh(self.dense(hidden[:, 0]))
