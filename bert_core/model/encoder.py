"""Ids in, one vector a token out. What is made of the vectors is for `heads.py` and objectives."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bert_core.errors import InputError
from bert_core.model.attention import SHARED, Scores
from bert_core.model.config import EncoderConfig
from bert_core.model.layers import (
    LAYERS,
    Convolution,
    Embeddings,
    Pooler,
    initialise,
    layer_norm,
)
from bert_core.model.layout import Packed, Padded, RowLayout, gather_tokens, rounded_up

TOKENS_MULTIPLE = 32
"""Tokens that rows end to end are filled up to a multiple of, where kernels are made for each
number of tokens."""


@dataclass(frozen=True)
class Encoded:
    """What an encoder makes of a batch; `*tokens` is (B, S), or (T,) of rows end to end."""

    hidden: Float[Tensor, "..."]
    """One vector a token (*tokens, hidden), those of padding meaning nothing; of tokens that were
    asked for (N, hidden)."""
    pooled: Float[Tensor, "batch hidden"] | None
    """One vector a sequence, None where the encoder has no pooler."""
    rows: RowLayout
    """How the rows lie in `hidden`."""
    layers: list[Float[Tensor, "*_ hidden"]] = field(default_factory=list)
    """The vectors before the first layer and after each, where they were asked for; of the last
    those that `hidden` has too."""
    scores: list[Scores] = field(default_factory=list)
    """Of each layer what its softmax is taken of, where it was asked for."""
    shared: Any = None
    """What the attentions of all layers have in common, None for most."""


class Encoder(nn.Module):
    """The encoder that a config describes; with `pooler` the layer that whole sequences pass."""

    def __init__(self, config: EncoderConfig, *, pooler: bool = True) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False
        """Whether training computes layers again in the backward pass instead of keeping them."""
        self.embeddings = Embeddings(config)
        shared = SHARED.get(type(config.attention))
        self.shared = None if shared is None else shared(config)
        layer = LAYERS[config.norm_placement]
        distinct = 1 if config.shared_layers else config.num_hidden_layers
        self.layers = nn.ModuleList(layer(config, index) for index in range(distinct))
        self.convolution = (
            None if config.convolution is None else Convolution(config, config.convolution)
        )
        pre = config.norm_placement == "pre"
        self.norm = layer_norm(config, config.hidden_size) if pre else None
        self.pooler = Pooler(config) if pooler else None
        initialise(self, config)

    def forward(
        self,
        input_ids: Int[Tensor, "*tokens"],
        token_type_ids: Int[Tensor, "*tokens"],
        attention_mask: Int[Tensor, "batch seq"] | None = None,
        offsets: Int[Tensor, "batch_1"] | None = None,
        *,
        places: Int[Tensor, "chosen"] | None = None,
        all_layers: bool = False,
        all_scores: bool = False,
    ) -> Encoded:
        """Encode rows that are padded to one width, (B, S), or lie end to end, (T,).

        Args:
            input_ids: at most `max_length` a row.
            token_type_ids: the segment of each token; not read where there are no segments.
            attention_mask: of padded rows, 1 = attend; None where all are 1, which is faster. A row
                needs a 1.
            offsets: of rows end to end: where each begins, and at last T.
            places: of the tokens whose vectors are asked for; the last layer computes no others.
            all_layers: whether to keep what every layer gave.
            all_scores: whether to keep how every layer's tokens look at each other; then nothing is
                computed again in the backward pass.
        Raises: InputError if a row is too long (end to end on a GPU that is not looked at).
        """
        given = rows = self._rows(input_ids, attention_mask, offsets)
        tokens = input_ids.shape[0]  # NOTE: len() would fix the number in a graph
        if isinstance(rows, Packed) and not all_scores and self._makes_kernels(rows):
            input_ids, token_type_ids, rows = self._evened(input_ids, token_type_ids, rows)
        hidden = embedded = self.embeddings(input_ids, token_type_ids, rows)
        shared = None if self.shared is None else self.shared(rows)
        layers = [hidden] if all_layers else []
        scores: list[Scores] = [[] for _ in range(self.config.num_hidden_layers * all_scores)]
        last = self.config.num_hidden_layers - 1
        whole = all_scores or not self.may_take_early
        early = None if whole else self._asked(given, places)
        for index in range(last + 1):
            layer = self.layers[index % len(self.layers)]
            asked = early if index == last else None
            if all_scores:
                hidden = layer(hidden, rows, shared, None, scores[index])
            elif self.checkpointing and self.training:
                hidden = checkpoint(layer, hidden, rows, shared, asked, use_reentrant=False)
            else:
                hidden = layer(hidden, rows, shared, asked)
            if index == 0 and self.convolution is not None:
                hidden = self.convolution(embedded, hidden, rows)
            if all_layers:
                layers.append(hidden)
        if self.norm is not None:  # which Hugging Face counts to the last layer
            hidden = self.norm(hidden)
            layers[-1:] = [hidden] if all_layers else []
        if rows is not given:
            layers = [each[:tokens] for each in layers]
            hidden = hidden[:tokens] if early is None else hidden
        if early is None or places is None:
            first, hidden = self._first(hidden, given), gather_tokens(hidden, places)
        else:
            first, hidden = hidden.split([len(early) - len(places), len(places)])
        pooled = None if self.pooler is None else self.pooler(first)
        return Encoded(hidden, pooled, given, layers, scores, shared)

    @property
    def may_take_early(self) -> bool:
        """Whether nothing after the last layer looks at tokens that nobody asked for."""
        mean = self.pooler is not None and self.pooler.pooling == "mean"
        convolved = self.convolution is not None and self.config.num_hidden_layers == 1
        return not mean and not convolved

    def _asked(
        self, rows: RowLayout, places: Int[Tensor, "chosen"] | None
    ) -> Int[Tensor, "asked"] | None:
        """Places of what comes out of the last layer: the pooler's tokens before the others."""
        if places is None or self.pooler is None:
            return places
        return torch.cat([rows.starts(), places])

    def _first(
        self, hidden: Float[Tensor, "*tokens hidden"], rows: RowLayout
    ) -> Float[Tensor, "batch hidden"] | None:
        """What the pooler takes."""
        if self.pooler is None:
            return None
        return rows.mean(hidden) if self.pooler.pooling == "mean" else rows.first(hidden)

    def _rows(
        self, input_ids: Tensor, attention_mask: Tensor | None, offsets: Tensor | None
    ) -> RowLayout:
        if offsets is None:
            self._check_length(input_ids.shape[1])
            return Padded(input_ids, attention_mask)
        rows = Packed(input_ids, offsets, self.config.max_length)
        if offsets.device.type == "cpu":  # a GPU would have to be waited for
            self._check_length(max(rows.lengths, default=0))
        return rows

    def _makes_kernels(self, rows: Packed) -> bool:
        """Whether matrix products have a kernel for each number of tokens, made when it is first
        seen, which takes longer than a product of a small batch."""
        bf16 = (
            torch.is_autocast_enabled("cpu") or self.embeddings.norm.weight.dtype == torch.bfloat16
        )
        return rows.offsets.device.type == "cpu" and bf16 and not torch.compiler.is_compiling()

    def _evened(
        self, input_ids: Int[Tensor, "tokens"], token_type_ids: Int[Tensor, "tokens"], rows: Packed
    ) -> tuple[Int[Tensor, "more"], Int[Tensor, "more"], Packed]:
        """With one more row, of padding, that fills the tokens up to a multiple of 32."""
        multiple = min(TOKENS_MULTIPLE, self.config.max_length)
        whole = rounded_up(len(input_ids), multiple)
        missing = (0, whole - len(input_ids))
        if missing == (0, 0):
            return input_ids, token_type_ids, rows
        input_ids = functional.pad(input_ids, missing, value=self.config.embeddings.pad_token_id)
        offsets = functional.pad(rows.offsets, (0, 1), value=whole)
        even = Packed(input_ids, offsets, self.config.max_length)
        return input_ids, functional.pad(token_type_ids, missing), even

    def _check_length(self, longest: int) -> None:
        most = self.config.max_length
        if longest > most:
            raise InputError(
                f"input_ids: wanted rows of at most {most} tokens, the positions that the model "
                f"has, got {longest}: cut them, or split the text"
            )
