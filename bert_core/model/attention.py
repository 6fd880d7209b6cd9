"""Attention: one class per mechanism, without the residual connection around it.

With `places`, only the tokens at those places get a vector, (N, hidden); all tokens are still
attended to. With `scores`, a list, the scores before the softmax are appended to it, one tensor per
block of `rows`, and are computed step by step rather than by a fused kernel.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.config import (
    AttentionConfig,
    BiasedAttentionConfig,
    DisentangledAttentionConfig,
    EncoderConfig,
    RotaryAttentionConfig,
)
from bert_core.model.dropout import Dropout, dropout
from bert_core.model.layout import Bins, Packed, RowLayout, gather_tokens, in_inference, rounded_up

Scores = list[Tensor]
"""One tensor (b, heads, s, s) per block of rows, query before key; -inf where a query may not
attend."""


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


class BiasedAttention(SelfAttention):
    """Self-attention with a number added to each score, which depends on the head and the distance
    (MPNet, Song et al. 2020)."""

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: Float[Tensor, "heads width width"],
        places: Int[Tensor, "chosen"] | None = None,
        scores: Scores | None = None,
    ) -> Float[Tensor, "..."]:
        qkv = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))
        dropout_p = self.dropout if self.training else 0.0
        context = attend(qkv, rows, dropout_p, scores, added=shared.to(qkv.dtype))
        return self.output(gather_tokens(context, places))


def attend(
    qkv: Float[Tensor, "*tokens 3 heads size"],
    rows: RowLayout,
    dropout_p: float,
    scores: Scores | None = None,
    reach: int | None = None,
    added: Float[Tensor, "heads width width"] | None = None,
) -> Float[Tensor, "*tokens hidden"]:
    """Multi-head attention among the tokens of each row. All implementations give the same vectors.

    Args:
        reach: limits it to so many tokens each way; not together with `added`.
        added: what is added to the scores for each head, query and key, a function of their
            distance; at least as wide as the widest block.
    """
    plain = scores is None and added is None
    if isinstance(rows, Packed) and plain and _runs_unpadded(qkv, dropout_p):
        return _attend_unpadded(qkv, rows, reach)
    if torch.compiler.is_exporting():
        return _attend_in_graph(qkv, rows, reach, added)
    return _attend_in_blocks(qkv, rows, dropout_p, scores, reach, added)


def _attend_unpadded(
    qkv: Float[Tensor, "tokens 3 heads size"], rows: Packed, reach: int | None
) -> Float[Tensor, "tokens hidden"]:
    """Attention over packed rows, by the GPU kernel for that layout."""
    query, key, value = qkv.unbind(-3)
    offsets = rows.offsets.int()
    window: Any = {} if reach is None else {"window_size": (reach, reach)}
    from torch.nn.attention.varlen import varlen_attn  # it imports torch._dynamo: a second

    context = varlen_attn(query, key, value, offsets, offsets, rows.bound, rows.bound, **window)
    assert isinstance(context, Tensor)
    return context.flatten(-2)


def _attend_in_blocks(
    qkv: Float[Tensor, "*tokens 3 heads size"],
    rows: RowLayout,
    dropout_p: float,
    scores: Scores | None,
    reach: int | None,
    added: Float[Tensor, "heads width width"] | None,
) -> Float[Tensor, "*tokens hidden"]:
    """Attention block by block; rows in a block have one length. Packed rows may share bins."""
    layout: RowLayout | Bins = rows
    if isinstance(rows, Packed) and scores is None and (reach is None or rows.longest <= reach + 1):
        fused = _is_fused(qkv, rows.longest, dropout_p)
        if not (fused and rows.row_by_row) and rows.bins is not None:
            layout, reach = rows.bins, None
    blocks = []
    for block, mask in zip(layout.blocks(qkv), layout.masks(), strict=True):
        query, key, value = block.permute(2, 0, 3, 1, 4)  # each (b, H, s, D / H)
        if reach is not None and scores is None and query.shape[2] > reach + 1:
            context = sliding_window_attention(query, key, value, mask, reach, dropout_p)
        else:
            if reach is not None and scores is not None:
                bias: Tensor | None = _window_bias(reach, mask, query)
            else:
                bias = None if mask is None else _mask_bias(mask, query)
            bias = _plus(bias, added, query.shape[2])
            context = _dot_product_attention(query, key, value, bias, dropout_p, scores=scores)
        blocks.append(context.transpose(1, 2).flatten(2))
    return layout.from_blocks(blocks)


def _attend_in_graph(
    qkv: Float[Tensor, "*tokens 3 heads size"],
    rows: RowLayout,
    reach: int | None,
    added: Float[Tensor, "heads width width"] | None,
) -> Float[Tensor, "*tokens hidden"]:
    """Attention as a single ONNX operator, which takes rows of any length, so without blocks."""
    [block], [mask] = rows.blocks(qkv), rows.masks()
    heads, length = block.shape[-2], block.shape[1]
    query, key, value = (part.flatten(-2) for part in block.unbind(2))
    bias: Tensor | None = None if mask is None else _mask_bias(mask, query)
    if reach is not None:
        bias = _window_bias(reach, mask, block.permute(2, 0, 3, 1, 4)[0])
    bias = _plus(bias, added, length)
    if bias is not None:
        bias = bias.expand(block.shape[0], -1, length, -1)
    context, *_ = torch.onnx.ops.attention(
        query, key, value, bias, q_num_heads=heads, kv_num_heads=heads
    )
    return rows.from_blocks([context])


def sliding_window_attention(
    query: Float[Tensor, "batch heads seq size"],
    key: Float[Tensor, "batch heads seq size"],
    value: Float[Tensor, "batch heads seq size"],
    mask: Bool[Tensor, "batch seq"] | None,
    reach: int,
    dropout_p: float,
) -> Float[Tensor, "batch heads seq size"]:
    """Attention within `reach` tokens each way, in blocks of `reach` queries and 3 × `reach` keys,
    so that work and memory grow linearly with the row length."""
    batch, length = query.shape[0], query.shape[2]
    count = -(-length // reach)
    missing = count * reach - length
    spread = (0, 0, reach, missing + reach)

    def blocks(tensor: Tensor) -> Tensor:  # (batch × count, heads, 3 × reach, size)
        cut = functional.pad(tensor, spread).unfold(2, 3 * reach, reach)
        return cut.permute(0, 2, 1, 4, 3).flatten(0, 1)

    queries = functional.pad(query, (0, 0, 0, missing)).unflatten(2, (count, reach))
    step = torch.arange(reach, device=query.device)
    distance = torch.arange(-reach, 2 * reach, device=query.device) - step[:, None]
    real = mask if mask is not None else query.new_ones((1, length), dtype=torch.bool)
    seen = functional.pad(real, spread[2:]).unfold(1, 3 * reach, reach)[:, :, None, :]
    # Padding attends to itself: attending to nothing would make its vectors NaN.
    allowed = (distance.abs() <= reach) & (seen | (distance == 0))  # (b, count, reach, 3 × reach)
    bias = query.new_zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))
    context = _dot_product_attention(
        queries.transpose(1, 2).flatten(0, 1),
        blocks(key),
        blocks(value),
        bias.expand(batch, -1, -1, -1).flatten(0, 1)[:, None],
        dropout_p,
    )
    return context.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _dot_product_attention(
    query: Float[Tensor, "batch heads queries size"],
    key: Float[Tensor, "batch heads keys size"],
    value: Float[Tensor, "batch heads keys size"],
    bias: Float[Tensor, "..."] | None,
    dropout_p: float,
    scale: float | None = None,
    scores: Scores | None = None,
) -> Float[Tensor, "batch heads queries size"]:
    """Scaled dot-product attention; by default, `scale` is 1 / sqrt(size)."""
    if scores is None and _is_fused(query, query.shape[-2], dropout_p):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale
        )
    logits = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    logits = logits if bias is None else logits + bias
    if scores is not None:
        scores.append(logits)
    # Autocast would widen the weights to fp32, only for the product to narrow them again.
    with torch.autocast(logits.device.type, enabled=False):
        weights = logits.softmax(-1)
    return dropout(weights, dropout_p) @ value


FUSED_FROM = 512
"""Tokens of a row from which a CPU trains fastest with its fused kernel in half precision: with 64,
the kernel's backward pass takes five times as long as plain products, with 128 four times."""


def _is_fused(like: Tensor, longest: int, dropout_p: float) -> bool:
    """Whether attention runs in a fused kernel.

    Args:
        like: queries, or what they are part of.
        longest: tokens of the longest row.
    """
    if like.is_cuda or torch.compiler.is_compiling():
        return True
    if dropout_p:  # a CPU has no fused kernel with dropout, and our dropout is faster there
        return False
    return like.element_size() > 2 or not like.requires_grad or longest >= FUSED_FROM


PACKED_FROM = 0.1
"""Share of padding from which packed rows are faster on a CPU, although attention must split them.
"""


def packing(config: EncoderConfig, device: torch.device, precision: str) -> float:
    """The share of padding in a batch from which an encoder is faster on packed rows.

    0 (always pack) on a GPU whose kernel for packed rows can be used, 1 (never) on other GPUs.
    """
    if device.type == "cpu":
        return PACKED_FROM
    fused = ATTENTION[type(config.attention)] in (SelfAttention, RotaryAttention)
    fused &= not config.attention.dropout and config.head_size % HEAD_MULTIPLE == 0
    return 0.0 if fused and device.type == "cuda" and precision == "bf16" else 1.0


HEAD_MULTIPLE = 8
"""What the size of a head has to be a multiple of in the GPU's kernel for packed rows."""


def _runs_unpadded(qkv: Float[Tensor, "tokens 3 heads size"], dropout: float) -> bool:
    """Whether the kernel for packed rows can be used: CUDA, half precision, no dropout, and a
    head's size."""
    fits = qkv.shape[-1] % HEAD_MULTIPLE == 0
    return qkv.is_cuda and qkv.element_size() == 2 and dropout == 0 and fits


def _mask_bias(mask: Tensor, like: Tensor) -> Float[Tensor, "batch 1 queries_1 seq"]:
    """What is added to scores: 0 for tokens that are real, or that the query may attend to; -inf
    for others.

    Every attention call would convert a bool mask into this again.
    """
    bias = like.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    return bias[:, None, None, :] if mask.ndim == 2 else bias[:, None]


def _plus(
    bias: Float[Tensor, "..."] | None, added: Float[Tensor, "heads width width"] | None, length: int
) -> Float[Tensor, "..."] | None:
    """`bias` and the upper left corner of `added`, for rows of `length`, or those that there are.

    NOTE: right for rows side by side in a bin, too: the distance between two tokens of a row is
    that between their places.
    """
    if added is None:
        return bias
    corner = added[None, :, :length, :length]
    return corner if bias is None else corner + bias


def _window_bias(
    reach: int, mask: Tensor | None, like: Tensor
) -> Float[Tensor, "batch_1 1 seq seq"]:
    """`_mask_bias` for queries that attend within `reach` only; padding also attends to itself."""
    places = torch.arange(like.shape[2], device=like.device)
    distance = (places[:, None] - places).abs()
    allowed = (distance <= reach)[None]
    if mask is not None:
        allowed = allowed & (mask[:, None, :] | (distance == 0))
    return like.new_zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))[:, None]


@dataclass(frozen=True)
class Rotations:
    """Cosine and sine of every token's angles (2, *positions, size / 2), for full and for local
    attention."""

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
        if by_table:  # a cosine's last bit depends on its place in a vector register
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
    """Rotate pairs of entries, half a vector apart, by their angles; in fp32 or wider."""
    cosine, sine = rotation[..., None, None, :]
    first, second = vectors.chunk(2, dim=-1)
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat(rotated, dim=-1).to(vectors.dtype)


class RelativeBias(nn.Module):
    """What is added to attention scores, by head and distance, shared by all layers.

    Near distances have a bucket each, farther ones share log-spaced buckets; keys before and after
    the query have buckets of their own. Source: Raffel et al. 2019, section 2.1; the order of the
    buckets is that of transformers' MPNet.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert isinstance(config.attention, BiasedAttentionConfig)
        self.config = config.attention
        # NOTE: a constant, as in `RelativePositions`.
        farthest = config.max_length - 1
        self._buckets = self.bucket(torch.arange(-farthest, farthest + 1, device="cpu"))
        self.embeddings = nn.Embedding(self.config.num_buckets, self.config.num_heads)

    def forward(self, rows: RowLayout) -> Float[Tensor, "heads width width"]:
        """The bias for each query (first) and key, as wide as the widest block of rows."""
        width = rows.bin_width if isinstance(rows, Packed) else rows.longest
        # Places in a bin are farther apart than positions in a row only in different rows.
        farthest = len(self._buckets) // 2
        places = torch.arange(width)
        distances = (places - places[:, None]).clamp_(-farthest, farthest)
        index = self._buckets[distances + farthest].to(self.embeddings.weight.device)
        return self.embeddings(index).permute(2, 0, 1)

    def bucket(self, distance: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bucket of a distance, the key's position minus the query's."""
        half = self.config.num_buckets // 2
        max_exact = half // 2
        far = distance.abs().clamp(min=max_exact).float() / max_exact
        steps = far.log() / math.log(self.config.max_distance / max_exact) * (half - max_exact)
        shared = (max_exact + steps.long()).clamp(max=half - 1)
        bucket = torch.where(distance.abs() < max_exact, distance.abs(), shared)
        return bucket + half * (distance > 0)


class RelativePositions(nn.Module):
    """Embeddings of relative distances, shared by all layers (DeBERTa, He et al. 2020).

    There are 2k of them, with distance 0 in row k. `forward` returns those that the batch's rows
    can need; in an exported graph it returns all, as constants.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        attention = config.attention
        assert isinstance(attention, DisentangledAttentionConfig)
        self.config = attention
        # NOTE: a constant, because another log implementation would round the farthest distance
        # into another bucket.
        farthest = config.max_length - 1
        self._buckets = self.bucket(torch.arange(-farthest, farthest + 1, device="cpu"))
        self.embeddings = nn.Embedding(2 * attention.span, config.hidden_size)
        self.norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if attention.normalised
            else None
        )

    def forward(self, rows: RowLayout) -> "Distances":
        span, middle = self.config.span, len(self._buckets) // 2
        exporting = torch.compiler.is_exporting()
        reach = span if exporting else int(self.bucket(torch.tensor([rows.longest - 1])))
        first, last = max(0, span - reach), min(2 * span - 1, span + reach)
        table = self.embeddings.weight[first : last + 1]
        places = torch.arange(rows.longest)
        buckets = self._buckets[middle + places[:, None] - places] + span
        index = (buckets.clamp_(0, 2 * span - 1) - first).to(table.device)
        return Distances(table if self.norm is None else self.norm(table), index)

    def bucket(self, distance: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bucket of a distance: near distances have one each, farther ones share log-spaced
        buckets."""
        if not self.config.position_buckets:
            return distance.clamp(-self.config.span, self.config.span)
        middle = self.config.position_buckets // 2
        far = distance.abs().clamp(min=middle)
        most = torch.tensor((self.config.max_relative_positions - 1) / middle, device="cpu")
        scale = torch.log(most)
        steps = torch.ceil(torch.log(far / middle) / scale * (middle - 1)).long() + middle
        return torch.where(distance.abs() <= middle, distance, steps * distance.sign())


@dataclass(frozen=True)
class Distances:
    """Relative distances between tokens, as attention reads them."""

    table: Float[Tensor, "distances hidden"]
    """Vectors of the N distances that the batch needs."""
    index: Int[Tensor, "seq seq"]
    """The row of `table` for each query (first) and key."""

    def within(self, length: int) -> tuple[int, int, Int[Tensor, "length length"]]:
        """The first row of `table` that a row of `length` tokens needs and the one after the last,
        and the place among them for each query and key."""
        if not in_inference() or length == self.index.shape[0]:
            return 0, self.table.shape[0], self.index[:length, :length]
        # Distances grow along a row of the index, so that its corners are the farthest.
        first, last = int(self.index[0, length - 1]), int(self.index[length - 1, 0])
        first, last = min(first, last), max(first, last)
        return first, last + 1, self.index[:length, :length] - first


class DisentangledAttention(nn.Module):
    """Attention scores: content to content, content to position and position to content.

    The score of query i and key j, where d is the head width and r the embedding of their distance:
    (q_i·k_j + q_i·key(r) + query(r)·k_j) / sqrt(3 d) (He et al. 2020, equation 4).
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        assert isinstance(config.attention, DisentangledAttentionConfig)
        width, heads = config.hidden_size, config.attention.num_heads
        self.num_heads = heads
        self.dropout = config.attention.dropout
        self.shared = config.attention.shared_projections
        self.scale = (3 * width // heads) ** -0.5
        if self.shared:
            self.qkv: nn.Module = nn.Linear(width, 3 * width)
        else:
            self.qkv = KeylessBiasLinear(width)
            self.position_key = nn.Linear(width, width, bias=False)
            self.position_query = nn.Linear(width, width)
        self.position_dropout = Dropout(config.hidden_dropout_prob)
        self.output = nn.Linear(width, width)

    def forward(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        rows: RowLayout,
        shared: Distances,
        places: Int[Tensor, "chosen"] | None = None,
        scores: Scores | None = None,
        queries: Float[Tensor, "*tokens hidden"] | None = None,
    ) -> Float[Tensor, "..."]:
        """With `queries`, they attend to `hidden` in place of its own tokens, at the same
        positions."""
        qkv = self.qkv(hidden)
        if queries is not None:
            qkv = torch.cat([self._project_queries(queries), qkv[..., queries.shape[-1] :]], dim=-1)
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))  # (*tokens, 3, H, d)
        far_key, far_query = (
            far * self.scale for far in self._project_distances(shared.table)
        )  # (H, d, N)
        blocks = []
        for block, mask in zip(rows.blocks(qkv), rows.masks(), strict=True):
            query, key, value = block.permute(2, 0, 3, 1, 4)  # each (b, H, s, d)
            first, end, index = shared.within(query.shape[2])
            bias = _gather_distances(query @ far_key[..., first:end], index)  # (b, H, s, s)
            bias += _gather_distances(key @ far_query[..., first:end], index.T).transpose(-1, -2)
            if mask is not None:
                bias.masked_fill_(~mask[:, None, None, :], float("-inf"))
            dropout_p = self.dropout if self.training else 0.0
            context = _dot_product_attention(query, key, value, bias, dropout_p, self.scale, scores)
            blocks.append(context.transpose(1, 2).flatten(2))
        return self.output(gather_tokens(rows.from_blocks(blocks), places))

    def _project_queries(
        self, queries: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens hidden"]:
        width = queries.shape[-1]
        if isinstance(self.qkv, KeylessBiasLinear):
            return functional.linear(queries, self.qkv.weight[:width], self.qkv.query_bias)
        assert isinstance(self.qkv, nn.Linear)
        return functional.linear(queries, self.qkv.weight[:width], self.qkv.bias[:width])

    def _project_distances(
        self, table: Float[Tensor, "distances hidden"]
    ) -> tuple[Float[Tensor, "heads width distances"], Float[Tensor, "heads width distances"]]:
        """Keys and queries of distances."""
        table = self.position_dropout(table)
        if self.shared:
            width = table.shape[1]
            assert isinstance(self.qkv, nn.Linear)
            weight, bias = self.qkv.weight[: 2 * width], self.qkv.bias[: 2 * width]
            query, key = functional.linear(table, weight, bias).chunk(2, dim=-1)
        else:
            query, key = self.position_query(table), self.position_key(table)
        split = (self.num_heads, -1)
        return key.unflatten(-1, split).permute(1, 2, 0), query.unflatten(-1, split).permute(
            1, 2, 0
        )


class KeylessBiasLinear(nn.Module):
    """Query, key and value in one matrix product; the key has no bias (DeBERTa v1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * width, width))
        self.query_bias = nn.Parameter(torch.zeros(width))
        self.value_bias = nn.Parameter(torch.zeros(width))

    def forward(
        self, hidden: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens three_hidden"]:
        key_bias = torch.zeros_like(self.query_bias)
        bias = torch.cat([self.query_bias, key_bias, self.value_bias])
        return functional.linear(hidden, self.weight, bias)


def _gather_distances(
    scores: Float[Tensor, "batch heads seq distances"], index: Int[Tensor, "seq seq"]
) -> Float[Tensor, "batch heads seq seq"]:
    """For every pair of tokens, the query's score with the distance between them."""
    return scores.gather(-1, index.expand(*scores.shape[:2], *index.shape))


# The config's class selects the attention; some attentions have a module that all layers share.
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
