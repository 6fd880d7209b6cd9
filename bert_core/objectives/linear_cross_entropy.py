"""Softmax cross-entropy of a linear layer's scores, without holding all scores in memory.

With a vocabulary of 30,000, a batch's scores are larger than everything else in it, and plain
autograd keeps several copies. Here a few rows are scored at a time, and their gradient is computed
immediately, while the scores are in memory.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bert_core.objectives.base import LossPart, widened

CHUNK_BYTES = {
    "cpu": 48 << 20
}  # of fp32 scores; the gradient's matrix product prefers large chunks
OTHER_CHUNK_BYTES = 256 << 20  # a GPU needs larger chunks
VECTOR = 16


def linear_cross_entropy(
    rows: Float[Tensor, "items size"],
    weight: Float[Tensor, "classes size"],
    bias: Float[Tensor, "classes"],
    labels: Int[Tensor, "items"],
) -> LossPart:
    """Return `cross_entropy(rows @ weight.T + bias, labels)`, with the same gradients."""
    learns = torch.is_grad_enabled()  # not visible inside the autograd function
    total, correct = _LinearCrossEntropy.apply(rows, weight, bias, labels, learns)
    return LossPart(total, labels.numel(), correct)


@torch.no_grad()
def linear_sample(
    rows: Float[Tensor, "items size"],
    weight: Float[Tensor, "classes size"],
    bias: Float[Tensor, "classes"],
    draws: Float[Tensor, "items"],
) -> Int[Tensor, "items"]:
    """Sample a class per item from the softmax of `rows @ weight.T + bias`: the class whose
    interval of the cumulative distribution contains the item's draw."""
    size = _chunk_size(CHUNK_BYTES.get(rows.device.type, OTHER_CHUNK_BYTES) // (8 * len(weight)))
    chosen = [draws.new_empty((0, 1), dtype=torch.long)]
    for chunk, marks in zip(rows.split(size), draws.split(size), strict=True):
        scores = functional.linear(chunk, weight, bias)
        shares = widened(scores).softmax(-1)
        sums = shares.cumsum(-1, dtype=draws.dtype)  # the last is 1, up to rounding
        chosen.append(torch.searchsorted(sums, sums[:, -1:] * marks[:, None], right=True))
    return torch.cat(chosen)[:, 0].clamp_(max=len(weight) - 1)


def _chunk_size(most: int) -> int:
    """Return the items per chunk: a multiple of the CPU's vector width, because a remainder adds
    half to the time."""
    return max(1, most // VECTOR * VECTOR or most)


def _correct(
    scores: Float[Tensor, "classes items"],
    best: Bool[Tensor, "items"],
    labels: Int[Tensor, "items"],
) -> Int[Tensor, ""]:
    """Return the number of items whose label is the first class with the best score."""
    if scores.device.type == "cpu":  # argmax is slow on a CPU; on a GPU, indexing is
        scores, labels = scores[:, best], labels[best]
    return (scores.argmax(0) == labels).sum()


class _LinearCrossEntropy(Function):
    """The autograd function; scores are (classes, items): on a CPU, a few columns take half the
    time of a few rows."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, learns: bool
    ) -> tuple[Tensor, Tensor]:
        kind = rows.device.type
        autocast = torch.is_autocast_enabled(kind)
        narrow = torch.get_autocast_dtype(kind) if autocast else weight.dtype
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=rows.device)
        correct = torch.zeros((), dtype=torch.long, device=rows.device)
        if learns:
            rows_grad, weight_grad = torch.empty_like(rows), None
            bias_grad = torch.zeros_like(bias)
        factor = weight.to(narrow)
        size = _chunk_size(CHUNK_BYTES.get(kind, OTHER_CHUNK_BYTES) // (4 * len(weight)))
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(rows), size):
                chunk = slice(start, start + size)
                vectors, targets = rows[chunk].to(narrow), labels[chunk]
                scores = factor @ vectors.T
                added = bias.to(wide)[:, None]
                scores = scores.add_(added) if narrow == wide else scores + added
                highest = scores.amax(0)
                of_label = scores.gather(0, targets[None])[0]
                correct += _correct(scores, of_label == highest, targets)
                powers = scores.sub_(highest).exp_()
                sums = powers.sum(0)
                total += (sums.log() + highest - of_label).sum()
                if learns:  # gradient: probabilities, powers / sums, minus 1 at the label
                    powers, shares = powers.to(narrow), sums.reciprocal()
                    pulled = (powers.T @ factor).to(rows.dtype) * shares[:, None].to(rows.dtype)
                    rows_grad[chunk] = pulled - weight[targets].to(rows.dtype)
                    scaled = (rows[chunk] * shares[:, None]).to(narrow)
                    if weight_grad is None:
                        weight_grad = (powers @ scaled).to(weight.dtype)
                    elif narrow == weight.dtype:
                        weight_grad.addmm_(powers, scaled)
                    else:
                        weight_grad += powers @ scaled
                    weight_grad.index_add_(0, targets, rows[chunk].to(weight.dtype), alpha=-1)
                    bias_grad += (powers @ shares.to(narrow)[:, None])[:, 0]
                    bias_grad.index_add_(
                        0, targets, torch.ones_like(of_label, dtype=bias.dtype), alpha=-1
                    )
        if learns:
            weight_grad = torch.zeros_like(weight) if weight_grad is None else weight_grad
            ctx.gradients = rows_grad, weight_grad, bias_grad
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a gradient is as large as the word embedding. So backward can run only once.
        rows_grad, weight_grad, bias_grad = ctx.gradients
        del ctx.gradients
        return rows_grad.mul_(slope), weight_grad.mul_(slope), bias_grad.mul_(slope), None, None
