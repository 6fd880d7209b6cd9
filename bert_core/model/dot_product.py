"""Attention among the tokens of each row, computed from queries, keys and values; this module
selects the implementation. All give the same vectors.

With `scores`, a list, the scores before the softmax are appended to it, one tensor per block of
`rows`, and are computed step by step rather than by a fused kernel.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from bert_core.model.dropout import dropout
from bert_core.model.layout import Bins, Packed, RowLayout

Scores = list[Tensor]
"""One tensor (b, heads, s, s) per block of rows, query before key; -inf where a query may not
attend."""


def attend(
    qkv: Float[Tensor, "*tokens 3 heads size"],
    rows: RowLayout,
    dropout_p: float,
    scores: Scores | None = None,
    reach: int | None = None,
    added: Float[Tensor, "*batch heads width width"] | None = None,
) -> Float[Tensor, "*tokens hidden"]:
    """Compute multi-head attention among the tokens of each row. All implementations give the same
    vectors.

    Args:
        reach: limits attention to this many tokens in each direction; not together with `added`.
        added: what is added to the scores for each head, query and key, a function of their
            distance, of all rows or of each; at least as wide as the widest block.
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
    """Compute attention over packed rows, by the GPU kernel for that layout."""
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
    added: Float[Tensor, "*batch heads width width"] | None,
) -> Float[Tensor, "*tokens hidden"]:
    """Compute attention block by block; all rows of a block have the same length. Packed rows may
    share bins."""
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
            context = dot_product_attention(query, key, value, bias, dropout_p, scores=scores)
        blocks.append(context.transpose(1, 2).flatten(2))
    return layout.from_blocks(blocks)


def _attend_in_graph(
    qkv: Float[Tensor, "*tokens 3 heads size"],
    rows: RowLayout,
    reach: int | None,
    added: Float[Tensor, "*batch heads width width"] | None,
) -> Float[Tensor, "*tokens hidden"]:
    """Compute attention as a single ONNX operator, which takes rows of any length and so needs no
    blocks."""
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
    """Compute attention within `reach` tokens in each direction, in blocks of `reach` queries and 3
    × `reach` keys, so that work and memory grow linearly with the row length."""
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
    context = dot_product_attention(
        queries.transpose(1, 2).flatten(0, 1),
        blocks(key),
        blocks(value),
        bias.expand(batch, -1, -1, -1).flatten(0, 1)[:, None],
        dropout_p,
    )
    return context.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def dot_product_attention(
    query: Float[Tensor, "batch heads queries size"],
    key: Float[Tensor, "batch heads keys size"],
    value: Float[Tensor, "batch heads keys size"],
    bias: Float[Tensor, "..."] | None,
    dropout_p: float,
    scale: float | None = None,
    scores: Scores | None = None,
) -> Float[Tensor, "batch heads queries size"]:
    """Compute scaled dot-product attention; by default, `scale` is 1 / sqrt(size)."""
    if scores is None and _is_fused(query, query.shape[-2], dropout_p):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=dropout_p, scale=scale
        )
    logits = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    logits = logits if bias is None else logits + bias
    if scores is not None:
        scores.append(logits)
    # Autocast would widen the weights to fp32, and the product would narrow them again.
    with torch.autocast(logits.device.type, enabled=False):
        weights = logits.softmax(-1)
    return dropout(weights, dropout_p) @ value


FUSED_FROM = 512
"""Tokens of a row from which a CPU trains fastest with its fused kernel in half precision: with 64,
the kernel's backward pass takes five times as long as plain products, with 128 four times."""


def _is_fused(like: Tensor, longest: int, dropout_p: float) -> bool:
    """Whether attention runs in a fused kernel.

    Args:
        like: queries, or the tensor that they are part of.
        longest: tokens of the longest row.
    """
    if like.is_cuda or torch.compiler.is_compiling():
        return True
    if dropout_p:  # a CPU has no fused kernel with dropout, and our dropout is faster there
        return False
    return like.element_size() > 2 or not like.requires_grad or longest >= FUSED_FROM


HEAD_MULTIPLE = 8
"""The GPU's kernel for packed rows takes heads whose size is a multiple of this."""


def _runs_unpadded(qkv: Float[Tensor, "tokens 3 heads size"], dropout: float) -> bool:
    """Whether the kernel for packed rows can be used: on CUDA, in half precision, without dropout,
    and if it supports the head's size."""
    fits = qkv.shape[-1] % HEAD_MULTIPLE == 0
    return qkv.is_cuda and qkv.element_size() == 2 and dropout == 0 and fits


def _mask_bias(mask: Tensor, like: Tensor) -> Float[Tensor, "batch 1 queries_1 seq"]:
    """Return the mask as numbers to add to scores: 0 for tokens that are real, or that the query
    may attend to; -inf for others.

    Otherwise every attention call would convert a bool mask into this again.
    """
    bias = like.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    return bias[:, None, None, :] if mask.ndim == 2 else bias[:, None]


def _plus(
    bias: Float[Tensor, "..."] | None,
    added: Float[Tensor, "*batch heads width width"] | None,
    length: int,
) -> Float[Tensor, "..."] | None:
    """Return the sum of `bias` and the upper left corner of `added`, for rows of `length`; either
    may be None.

    NOTE: correct for rows side by side in a bin, too: the distance between two tokens of a row is
        that between their places.
    """
    if added is None:
        return bias
    corner = added[..., :length, :length]
    return corner if bias is None else corner + bias


def _window_bias(
    reach: int, mask: Tensor | None, like: Tensor
) -> Float[Tensor, "batch_1 1 seq seq"]:
    """Return `_mask_bias` for queries that attend within `reach` only; padding also attends to
    itself."""
    places = torch.arange(like.shape[2], device=like.device)
    distance = (places[:, None] - places).abs()
    allowed = (distance <= reach)[None]
    if mask is not None:
        allowed = allowed & (mask[:, None, :] | (distance == 0))
    return like.new_zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))[:, None]
