"""The modules of an encoder that work on one token at a time, and the layers built from them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bert_core.model.attention import ATTENTION
from bert_core.model.config import ConvolutionConfig, EncoderConfig, NormPlacement
from bert_core.model.disentangled import KeylessBiasLinear
from bert_core.model.dot_product import Scores
from bert_core.model.dropout import Dropout
from bert_core.model.layout import RowLayout, gather_tokens, in_inference

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "tanh": torch.tanh,
}


def initialise(module: nn.Module, config: EncoderConfig) -> None:
    """Initialise every weight in `module` by Hugging Face's rule, from torch's global generator.

    Weights are normal, biases zero, the norms' weights one, and the row for padding zero. BERT's
    original code truncates the normal at two standard deviations; Hugging Face truncates only if
    `initializer_cutoff` is set. The residual stream of pre-norm layers is not normalised, so their
    output weights are divided by sqrt(2 L) (Radford et al. 2019, section 2.3).
    """
    spread, cutoff = config.initializer_range, config.initializer_cutoff
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
        elif isinstance(part, nn.Linear | nn.Conv1d | nn.Embedding | KeylessBiasLinear):
            if cutoff is None:
                nn.init.normal_(part.weight, std=spread)
            else:
                limit = cutoff * spread
                nn.init.trunc_normal_(part.weight, std=spread, a=-limit, b=limit)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])
        if isinstance(part, nn.LayerNorm | nn.Linear | nn.Conv1d) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for layer in module.modules():
        if isinstance(layer, PreNormLayer):
            for added in (layer.attention.output, layer.feed_forward.down):
                with torch.no_grad():
                    added.weight /= math.sqrt(2 * config.num_hidden_layers)


@contextmanager
def without_values() -> Iterator[None]:
    """Create the modules inside with weights that have shapes but no values, which take neither
    memory nor time."""
    with torch.device("meta"), _NothingDrawn():
        yield


class _NothingDrawn(TorchFunctionMode):
    """Skips the random initialisation of weights without values; torch would import its compiler
    for it, which takes 3 s."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def layer_norm(config: EncoderConfig, width: int) -> nn.LayerNorm:
    """Return a LayerNorm with the encoder's settings."""
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.biases)


class Embeddings(nn.Module):
    """Word + position + segment embeddings, normalised (Devlin et al. 2018, figure 2).

    Some families have no positions or no segments; ALBERT's and small ELECTRA's embeddings are
    narrow and projected to `hidden_size`.
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
        self.norm = layer_norm(config, width)
        self.dropout = Dropout(config.hidden_dropout_prob)
        projected = part.projected or width != config.hidden_size
        self.widen = nn.Linear(width, config.hidden_size) if projected else None

    def forward(
        self,
        input_ids: Int[Tensor, "*tokens"],
        token_type_ids: Int[Tensor, "*tokens"],
        rows: RowLayout,
    ) -> Float[Tensor, "*tokens hidden"]:
        hidden = self.word_embeddings(input_ids)
        if self.token_type_embeddings is not None:
            single = self.token_type_embeddings.num_embeddings == 1
            hidden = hidden + (
                self.token_type_embeddings.weight[0]
                if single
                else self.token_type_embeddings(token_type_ids)
            )
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(rows.positions() + self.offset)
        hidden = self.dropout(self.norm(hidden))
        return hidden if self.widen is None else self.widen(hidden)


class FeedForward(nn.Module):
    """Two linear layers with an activation between (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        part, width = config.feed_forward, config.hidden_size
        self.gated = part.gated
        inner = part.intermediate_size * (2 if part.gated else 1)
        self.up = nn.Linear(width, inner, bias=config.biases)
        self.down = nn.Linear(part.intermediate_size, width, bias=config.biases)
        self.activation = ACTIVATIONS[part.activation]

    def forward(self, hidden: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens hidden"]:
        inner = self.up(hidden)
        if not self.gated:
            return self.down(self.activation(inner))
        value, gate = inner.chunk(2, dim=-1)
        if in_inference():
            # GELU has one kernel for dense tensors, which half of a single token is, and another
            # for other tensors, whose last bits differ.
            value = value.contiguous()
        return self.down(self.activation(value) * gate)


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each added to its input and then normalised (post-norm)."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attention: Any = ATTENTION[type(config.attention)](config, layer)
        self.attention_norm: nn.Module = layer_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = layer_norm(config, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: Any,
        places: Int[Tensor, "chosen"] | None = None,
        scores: Scores | None = None,
    ) -> Float[Tensor, "..."]:
        """Return the tokens' vectors after the layer; with `places`, only those tokens, (N,
        hidden).

        Args:
            shared: what the attentions of all layers share, None for most.
            scores: attention scores are appended to it, if given.
        """
        attended = self.attention(hidden, rows, shared, places, scores)
        return self._added(gather_tokens(hidden, places), attended)

    def decoded(
        self,
        queries: Float[Tensor, "*tokens hidden"],
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: Any,
        places: Int[Tensor, "chosen"] | None = None,
    ) -> Float[Tensor, "..."]:
        """Return the layer's output for `queries`, which attend to their rows' tokens in `hidden`
        from the same positions; disentangled attention only."""
        attended = self.attention(hidden, rows, shared, places, queries=queries)
        return self._added(gather_tokens(queries, places), attended)

    def _added(
        self, stream: Float[Tensor, "*tokens hidden"], attended: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens hidden"]:
        hidden = self.attention_norm(stream + self.dropout(attended))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


class PreNormLayer(EncoderLayer):
    """Attention, then feed-forward; each reads its normalised input and is added to the
    unnormalised one (pre-norm)."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        if layer == 0:  # the embeddings are already normalised
            self.attention_norm = nn.Identity()

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: Any,
        places: Int[Tensor, "chosen"] | None = None,
        scores: Scores | None = None,
    ) -> Float[Tensor, "..."]:
        attended = self.attention(self.attention_norm(hidden), rows, shared, places, scores)
        hidden = gather_tokens(hidden, places) + self.dropout(attended)
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


LAYERS: dict[NormPlacement, type[EncoderLayer]] = {"post": EncoderLayer, "pre": PreNormLayer}


class Convolution(nn.Module):
    """A convolution over the embeddings, added to the first layer's output (DeBERTa v2)."""

    def __init__(self, config: EncoderConfig, part: ConvolutionConfig) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            config.hidden_size, config.hidden_size, part.kernel_size, padding="same"
        )
        self.activation = ACTIVATIONS[part.activation]
        self.norm = layer_norm(config, config.hidden_size)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        embedded: Float[Tensor, "*tokens hidden"],
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
    ) -> Float[Tensor, "*tokens hidden"]:
        blocks = []
        for block, mask in zip(rows.blocks(embedded), rows.masks(), strict=True):
            real = block if mask is None else block * mask[..., None]
            blocks.append(self._convolved(real))
        return self.norm(hidden + self.activation(self.dropout(rows.from_blocks(blocks))))

    def _convolved(
        self, block: Float[Tensor, "batch seq hidden"]
    ) -> Float[Tensor, "batch seq hidden"]:
        if not in_inference() or block.is_cuda:
            return self.conv(block.transpose(1, 2)).transpose(1, 2)
        # As a matrix product, whose rows do not depend on how many there are.
        (width,) = self.conv.kernel_size
        before = (width - 1) // 2
        padded = functional.pad(block, (0, 0, before, width - 1 - before))
        seen = padded.unfold(1, width, 1).flatten(-2)  # (b, s, hidden × width)
        return functional.linear(seen, self.conv.weight.flatten(1), self.conv.bias)


class Transform(nn.Module):
    """A linear layer to `size`, an activation and a LayerNorm, as used before vocabulary scores."""

    def __init__(self, config: EncoderConfig, size: int, inputs: int | None = None) -> None:
        """Build the layers; `inputs` is the width of the input, by default the encoder's."""
        super().__init__()
        self.dense = nn.Linear(inputs or config.hidden_size, size, bias=config.biases)
        activation = config.head.transform_activation or config.feed_forward.activation
        self.activation = ACTIVATIONS[activation]
        self.norm = layer_norm(config, size)

    def forward(self, vectors: Float[Tensor, "*items inputs"]) -> Float[Tensor, "*items size"]:
        return self.norm(self.activation(self.dense(vectors)))


class Pooler(nn.Module):
    """Turns a sequence into a single vector: its first token's, or the mean, through a linear
    layer, an activation and, with `head.transform`, a LayerNorm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        dropout = config.head.pooler_dropout
        self.dropout = Dropout(config.classifier_dropout if dropout is None else dropout)
        self.pooling = config.head.pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.biases)
        self.activation = ACTIVATIONS[config.head.pooler_activation]
        self.norm = layer_norm(config, config.hidden_size) if config.head.transform else None

    def forward(self, vectors: Float[Tensor, "batch hidden"]) -> Float[Tensor, "batch hidden"]:
        pooled = self.activation(self.dense(self.dropout(vectors)))
        return pooled if self.norm is None else self.norm(pooled)
