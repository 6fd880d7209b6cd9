"""Attention modules: one class per mechanism, without the residual connection around it, and the
position modules that layers share.

With `places`, only the tokens at those places get a vector, (N, hidden); all tokens are still
attended to. `dot_product` computes the attention; DeBERTa's is in `disentangled`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bert_core.model.config import (
    AttentionConfig,
    BiasedAttentionConfig,
    DisentangledAttentionConfig,
    EncoderConfig,
    RotaryAttentionConfig,
)
from bert_core.model.disentangled import DisentangledAttention, RelativePositions
from bert_core.model.dot_product import HEAD_MULTIPLE, Scores, attend
from bert_core.model.layout import (
    Packed,
    Padded,
    RowLayout,
    gather_tokens,
    in_inference,
    rounded_up,
)


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017).

    Query, key and value are one matrix product with 3D outputs, in that order. Hugging Face stores
    them as three tensors (`hf.py` splits and joins them).
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.num_heads = config.attention.num_heads
        self.dropout = config.attention.dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.biases)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.biases)

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: Any,
        places: Int[Tensor, "chosen"] | None = None,
        scores: Scores | None = None,
    ) -> Float[Tensor, "..."]:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))
        context = attend(qkv, rows, self.dropout if self.training else 0.0, scores)
        return self.output(gather_tokens(context, places))


class RotaryAttention(SelfAttention):
    """Self-attention with rotary position embeddings; local layers attend within a sliding window
    (ModernBERT, Warner et al. 2024)."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config.attention, RotaryAttentionConfig)
        self.reach = config.attention.reach(layer)

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: "Rotations",
        places: Int[Tensor, "chosen"] | None = None,
        scores: Scores | None = None,
    ) -> Float[Tensor, "..."]:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))
        rotated = apply_rotary(
            qkv[..., :2, :, :], shared.full if self.reach is None else shared.local
        )
        qkv = torch.cat([rotated, qkv[..., 2:, :, :]], dim=-3)
        dropout_p = self.dropout if self.training else 0.0
        context = attend(qkv, rows, dropout_p, scores, self.reach)
        return self.output(gather_tokens(context, places))


@dataclass(frozen=True)
class Rotations:
    """The cosine and sine of every token's rotation angles (2, *positions, size / 2), for full and
    for local attention."""

    full: Float[Tensor, "2 *positions half"]
    local: Float[Tensor, "2 *positions half"]


TABLE_MULTIPLE = 64
"""Positions in a table of rotations are a multiple of this, so that vector registers are full."""


class RotaryPositions(nn.Module):
    """The rotation angles of positions (Su et al. 2021, section 3.2.2); all layers share them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        attention = config.attention
        assert isinstance(attention, RotaryAttentionConfig)
        self.thetas = attention.theta, attention.local_theta
        self.size = config.head_size

    def forward(self, rows: RowLayout) -> Rotations:
        positions = places = rows.positions()
        on_cpu = positions.device.type == "cpu"
        by_table = isinstance(rows, Packed) and on_cpu and in_inference()
        if by_table:  # else a cosine's last bit depends on its place in a vector register
            places = torch.arange(rounded_up(rows.longest, TABLE_MULTIPLE))
        steps = torch.arange(0, self.size, 2, device=positions.device) / self.size
        angles = [places[..., None] * theta**-steps for theta in self.thetas]
        tables = [torch.stack([angle.cos(), angle.sin()]) for angle in angles]
        full, local = [table[:, positions] for table in tables] if by_table else tables
        return Rotations(full, local)


def apply_rotary(
    vectors: Float[Tensor, "*tokens both heads size"],
    rotation: Float[Tensor, "2 *positions half"],
) -> Float[Tensor, "*tokens both heads size"]:
    """Rotate pairs of entries, half a vector apart, by their angles; in fp32 or wider.

    Args:
        rotation: cosine and sine of the angles.
    """
    cosine, sine = rotation[..., None, None, :]
    first, second = vectors.chunk(2, dim=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(rotated, dim=-1).to(vectors.dtype)


class BiasedAttention(SelfAttention):
    """Self-attention that adds a learned number to each score, by head and distance (MPNet, Song et
    al. 2020)."""

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: Float[Tensor, "*batch heads width width"],
        places: Int[Tensor, "chosen"] | None = None,
        scores: Scores | None = None,
    ) -> Float[Tensor, "..."]:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))
        dropout_p = self.dropout if self.training else 0.0
        context = attend(qkv, rows, dropout_p, scores, added=shared.to(qkv.dtype))
        return self.output(gather_tokens(context, places))


class RelativeBias(nn.Module):
    """Numbers that are added to attention scores, by head and distance, shared by all layers.

    Near distances have a bucket each, farther distances share log-spaced buckets; keys before and
    after the query have buckets of their own. Source: Raffel et al. 2019, section 2.1; the order of
    the buckets is that of transformers' MPNet.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert isinstance(config.attention, BiasedAttentionConfig)
        self.config = config.attention
        # NOTE: a constant, as in `RelativePositions`.
        farthest = config.max_length - 1
        self._buckets = self.bucket(torch.arange(-farthest, farthest + 1, device="cpu"))
        self.embeddings = nn.Embedding(self.config.num_buckets, self.config.num_heads)

    def forward(self, rows: RowLayout) -> Float[Tensor, "*batch heads width width"]:
        """Return the bias for each query (first) and key, as wide as the widest block of rows; per
        row if its positions are not its places."""
        if isinstance(rows, Padded) and rows.placed is not None:
            distances = rows.placed[:, None, :] - rows.placed[:, :, None]  # (B, S, S)
            index = self._buckets.to(distances.device)[distances + len(self._buckets) // 2]
            return self.embeddings(index).permute(0, 3, 1, 2)
        width = rows.bin_width if isinstance(rows, Packed) else rows.longest
        # Only tokens of different rows, which are masked, are farther apart than this in a bin.
        farthest = len(self._buckets) // 2
        places = torch.arange(width)
        distances = (places - places[:, None]).clamp_(-farthest, farthest)
        index = self._buckets[distances + farthest].to(self.embeddings.weight.device)
        return self.embeddings(index).permute(2, 0, 1)

    def bucket(self, distance: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the bucket of a distance, the key's position minus the query's."""
        half = self.config.num_buckets // 2
        max_exact = half // 2
        far = distance.abs().clamp(min=max_exact).float() / max_exact
        steps = far.log() / math.log(self.config.max_distance / max_exact) * (half - max_exact)
        shared = (max_exact + steps.long()).clamp(max=half - 1)
        bucket = torch.where(distance.abs() < max_exact, distance.abs(), shared)
        return bucket + half * (distance > 0)


# The config's class selects the attention; some have a module that all layers share.
ATTENTION: dict[type[AttentionConfig], type[nn.Module]] = {
    AttentionConfig: SelfAttention,
    BiasedAttentionConfig: BiasedAttention,
    DisentangledAttentionConfig: DisentangledAttention,
    RotaryAttentionConfig: RotaryAttention,
}
SHARED: dict[type[AttentionConfig], type[nn.Module]] = {
    BiasedAttentionConfig: RelativeBias,
    DisentangledAttentionConfig: RelativePositions,
    RotaryAttentionConfig: RotaryPositions,
}


PACKED_FROM = 0.1
"""Share of padding from which packed rows are faster on a CPU, although attention must split them.
"""


def packing(config: EncoderConfig, device: torch.device, precision: str) -> float:
    """Return the share of padding in a batch from which an encoder is faster on packed rows.

    0 (always pack) on a GPU whose kernel for packed rows can be used, 1 (never) on other GPUs.
    """
    if device.type == "cpu":
        return PACKED_FROM
    fused = ATTENTION[type(config.attention)] in (SelfAttention, RotaryAttention)
    fused &= not config.attention.dropout and config.head_size % HEAD_MULTIPLE == 0
    return 0.0 if fused and device.type == "cuda" and precision == "bf16" else 1.0
