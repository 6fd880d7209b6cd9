"""DeBERTa's attention, whose scores come from contents and from relative distances."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig
from bert_core.model.dot_product import Scores, dot_product_attention
from bert_core.model.dropout import Dropout
from bert_core.model.layout import RowLayout, gather_tokens, in_inference


class RelativePositions(nn.Module):
    """Embeddings of relative distances, shared by all layers (DeBERTa, He et al. 2020).

    There are 2k of them, with distance 0 in row k. `forward` returns those that the batch's rows
    may need; in an exported graph it returns all, as constants.
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
        """Return the bucket of a distance: near distances have one each, farther distances share
        log-spaced buckets."""
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
    """Relative distances between tokens, in the form that attention reads."""

    table: Float[Tensor, "distances hidden"]
    """Vectors of the N distances that the batch needs."""
    index: Int[Tensor, "seq seq"]
    """The row of `table` for each query (first) and key."""

    def within(self, length: int) -> tuple[int, int, Int[Tensor, "length length"]]:
        """Return the part of `table` that a row of `length` tokens needs: the first row, the one
        after the last, and the index within that part for each query and key."""
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
            self.qkv: Any = nn.Linear(width, 3 * width)
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
        """Return the attention output. With `queries`, those attend to `hidden`, at the same
        positions, instead of its own tokens."""
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
            context = dot_product_attention(query, key, value, bias, dropout_p, self.scale, scores)
            blocks.append(context.transpose(1, 2).flatten(2))
        return self.output(gather_tokens(rows.from_blocks(blocks), places))

    def _project_queries(
        self, queries: Float[Tensor, "*tokens hidden"]
    ) -> Float[Tensor, "*tokens hidden"]:
        width = queries.shape[-1]
        return functional.linear(queries, self.qkv.weight[:width], self.qkv.bias[:width])

    def _project_distances(
        self, table: Float[Tensor, "distances hidden"]
    ) -> tuple[Float[Tensor, "heads width distances"], Float[Tensor, "heads width distances"]]:
        """Return the keys and the queries of distances."""
        table = self.position_dropout(table)
        if self.shared:
            width = table.shape[1]
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
        return functional.linear(hidden, self.weight, self.bias)

    @property
    def bias(self) -> Float[Tensor, "three_hidden"]:
        return torch.cat([self.query_bias, torch.zeros_like(self.query_bias), self.value_bias])


def _gather_distances(
    scores: Float[Tensor, "batch heads seq distances"], index: Int[Tensor, "seq seq"]
) -> Float[Tensor, "batch heads seq seq"]:
    """Return, for every pair of tokens, the query's score with the distance between them."""
    return scores.gather(-1, index.expand(*scores.shape[:2], *index.shape))
