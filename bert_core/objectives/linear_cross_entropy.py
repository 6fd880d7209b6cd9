"""Softmax cross-entropy of a linear map's scores, without ever holding the scores of all rows.

With a vocabulary of 30,000 the scores of a batch are larger than everything else in it, and plain
autograd keeps several copies. Here a few rows are scored at a time, and their gradient is taken at
once, while the scores are at hand.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from bert_core.objectives.base import Part

CHUNK_BYTES = 32 << 20  # of scores in fp32


def linear_cross_entropy(
    rows: Float[Tensor, "items size"],
    weight: Float[Tensor, "classes size"],
    bias: Float[Tensor, "classes"],
    labels: Int[Tensor, "items"],
) -> Part:
    """What `cross_entropy(rows @ weight.T + bias, labels)` gives, with the same gradients."""
    total, correct = _LinearCrossEntropy.apply(rows, weight, bias, labels)
    return Part(total, labels.numel(), correct)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(weight.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=rows.device)
        correct = torch.zeros((), dtype=torch.long, device=rows.device)
        learns = any(ctx.needs_input_grad)
        if learns:
            rows_grad = torch.empty_like(rows)
            weight_grad, bias_grad = torch.zeros_like(weight), torch.zeros_like(bias)
        size = max(1, CHUNK_BYTES // (4 * len(weight)))
        for start in range(0, len(rows), size):
            chunk = slice(start, start + size)
            some, wanted = rows[chunk], labels[chunk, None]
            scores = linear(some, weight, bias).log_softmax(-1, dtype=wide)
            correct += (scores.argmax(-1, keepdim=True) == wanted).sum()
            total -= scores.gather(-1, wanted).sum()
            if learns:
                slope = scores.exp_()  # probabilities, less one for the label
                slope.scatter_add_(-1, wanted, torch.full_like(wanted, -1, dtype=wide))
                bias_grad += slope.sum(0)
                if torch.is_autocast_enabled(rows.device.type):
                    rows_grad[chunk] = slope @ weight
                    weight_grad += slope.T @ some
                else:
                    torch.mm(slope, weight, out=rows_grad[chunk])
                    weight_grad.addmm_(slope.T, some)
        if learns:
            ctx.save_for_backward(rows_grad, weight_grad, bias_grad)
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows_grad, weight_grad, bias_grad = ctx.saved_tensors
        return rows_grad * slope, weight_grad * slope, bias_grad * slope, None
