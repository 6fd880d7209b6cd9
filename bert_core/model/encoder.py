"""The encoder: token ids in, one vector per token out. `heads.py` and the objectives use the
vectors."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bert_core.errors import InputError
from bert_core.model.attention import SHARED
from bert_core.model.config import EncoderConfig
from bert_core.model.dot_product import Scores
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
"""Packed rows are padded to a multiple of this many tokens where each number of tokens compiles its
own kernels."""


@dataclass(frozen=True)
class Encoded:
    """The encoder's output for a batch; `*tokens` is (B, S) for padded rows, (T,) for packed."""

    hidden: Float[Tensor, "..."]
    """One vector per token (*tokens, hidden), meaningless for padding; (N, hidden) if `places`
    selected N tokens."""
    pooled: Float[Tensor, "batch hidden"] | None
    """One vector per sequence; None if the encoder has no pooler."""
    rows: RowLayout
    """Layout of the rows in `hidden`."""
    layers: list[Float[Tensor, "*_ hidden"]] = field(default_factory=list)
    """The vectors before the first layer and after each, if requested; the last entry has only the
    tokens of `hidden`."""
    scores: list[Scores] = field(default_factory=list)
    """Each layer's attention scores before the softmax, if requested."""
    shared: Any = None
    """Values that the attentions of all layers share; None for most."""
    unpooled: Float[Tensor, "batch hidden"] | None = None
    """The vector that a pooler reads."""


class Encoder(nn.Module):
    """The encoder that a config describes, with or without a pooler."""

    def __init__(self, config: EncoderConfig, *, pooler: bool = True) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False
        """Whether training recomputes layers in the backward pass instead of keeping activations.
        """
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
        attention_mask: Int[Tensor, "batch *seq_seq"] | None = None,
        offsets: Int[Tensor, "batch_1"] | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        places: Int[Tensor, "chosen"] | None = None,
        all_layers: bool = False,
        all_scores: bool = False,
    ) -> Encoded:
        """Encode rows that are padded to one width, (B, S), or packed end to end, (T,).

        Args:
            input_ids: at most `max_length` per row.
            token_type_ids: the segment of each token; ignored by an encoder without segments.
            attention_mask: for padded rows, 1 = attend; None if all are 1, which is faster. Each
                row needs at least one 1.
                With (B, S, S), which tokens (last) each token may attend to, for attention like
                BERT's or MPNet's.
            offsets: for packed rows: where each begins, then T.
            positions: for padded rows: each token's position, if it is not its place in the row;
                rows may then have more places than positions.
            places: of the tokens whose vectors to return; the last layer computes no others.
            all_layers: whether to return the output of every layer.
            all_scores: whether to return every layer's attention scores; this turns off
                `checkpointing`.
        Raises: InputError if a row is too long (not checked for packed rows on a GPU).
        """
        input_rows = rows = self._rows(input_ids, attention_mask, offsets, positions)
        tokens = input_ids.shape[0]  # NOTE: len() would fix the number in a graph
        if isinstance(rows, Packed) and not all_scores and self._makes_kernels(rows):
            input_ids, token_type_ids, rows = self._padded_to_multiple(
                input_ids, token_type_ids, rows
            )
        hidden = embedded = self.embeddings(input_ids, token_type_ids, rows)
        shared = None if self.shared is None else self.shared(rows)
        layers = [hidden] if all_layers else []
        scores: list[Scores] = [[] for _ in range(self.config.num_hidden_layers * all_scores)]
        last = self.config.num_hidden_layers - 1
        whole = all_scores or not self.may_take_early
        early = None if whole else self._outputs_of_last_layer(input_rows, places)
        for index in range(last + 1):
            layer = self.layers[index % len(self.layers)]
            selected = early if index == last else None
            if all_scores:
                hidden = layer(hidden, rows, shared, None, scores[index])
            elif self.checkpointing and self.training:
                hidden = checkpoint(layer, hidden, rows, shared, selected, use_reentrant=False)
            else:
                hidden = layer(hidden, rows, shared, selected)
            if index == 0 and self.convolution is not None:
                hidden = self.convolution(embedded, hidden, rows)
            if all_layers:
                layers.append(hidden)
        if self.norm is not None:  # Hugging Face treats it as part of the last layer
            hidden = self.norm(hidden)
            layers[-1:] = [hidden] if all_layers else []
        if rows is not input_rows:
            layers = [layer[:tokens] for layer in layers]
            hidden = hidden[:tokens] if early is None else hidden
        if early is None or places is None:
            first, hidden = self._first(hidden, input_rows), gather_tokens(hidden, places)
        else:
            first, hidden = hidden.split([len(early) - len(places), len(places)])
        pooled = None if self.pooler is None else self.pooler(first)
        return Encoded(hidden, pooled, input_rows, layers, scores, shared, first)

    def output_of(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        places: Int[Tensor, "chosen"] | None = None,
    ) -> Encoded:
        """Return the output for rows whose tokens' vectors another pass has computed."""
        first = self._first(hidden, rows)
        pooled = None if self.pooler is None else self.pooler(first)
        return Encoded(gather_tokens(hidden, places), pooled, rows, unpooled=first)

    @property
    def may_take_early(self) -> bool:
        """Whether the last layer may compute only selected tokens, because nothing after it reads
        others."""
        mean = self.pooler is not None and self.pooler.pooling == "mean"
        convolved = self.convolution is not None and self.config.num_hidden_layers == 1
        return not mean and not convolved

    def _outputs_of_last_layer(
        self, rows: RowLayout, places: Int[Tensor, "chosen"] | None
    ) -> Int[Tensor, "outputs"] | None:
        """Return the places of the last layer's outputs: the pooler's tokens, then the selected
        tokens."""
        if places is None or self.pooler is None:
            return places
        return torch.cat([rows.starts(), places])

    def _first(
        self, hidden: Float[Tensor, "*tokens hidden"], rows: RowLayout
    ) -> Float[Tensor, "batch hidden"] | None:
        """Return the pooler's input."""
        if self.pooler is None:
            return None
        return rows.mean(hidden) if self.pooler.pooling == "mean" else rows.first(hidden)

    def _rows(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        offsets: Tensor | None,
        positions: Tensor | None = None,
    ) -> RowLayout:
        if positions is not None:
            return Padded(input_ids, attention_mask, positions)
        if offsets is None:
            self._check_length(input_ids.shape[1])
            return Padded(input_ids, attention_mask)
        rows = Packed(input_ids, offsets, self.config.max_length)
        if offsets.device.type == "cpu":  # on a GPU, this would have to wait for it
            self._check_length(max(rows.lengths, default=0))
        return rows

    def _makes_kernels(self, rows: Packed) -> bool:
        """Whether matrix products compile a kernel for each new number of tokens, which takes
        longer than the product itself for a small batch."""
        bf16 = (
            torch.is_autocast_enabled("cpu") or self.embeddings.norm.weight.dtype == torch.bfloat16
        )
        return rows.offsets.device.type == "cpu" and bf16 and not torch.compiler.is_compiling()

    def _padded_to_multiple(
        self, input_ids: Int[Tensor, "tokens"], token_type_ids: Int[Tensor, "tokens"], rows: Packed
    ) -> tuple[Int[Tensor, "more"], Int[Tensor, "more"], Packed]:
        """Add a row of padding that brings the number of tokens to a multiple of 32."""
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
                f"input_ids: wanted rows of at most {most} tokens, the positions of the model, got "
                f"{longest}: truncate them, or split the text"
            )
