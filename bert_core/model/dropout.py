"""Dropout, with randomness that is cheap on a CPU."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

LEVELS = 1 << 16


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`; see `dropout`."""

    def forward(self, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return dropout(values, self.p) if self.training else values


def dropout(values: Float[Tensor, "*shape"], p: float) -> Float[Tensor, "*shape"]:
    """Entries set to zero with probability `p`, the others scaled so that means stay.

    torch draws a number for every entry on one core, which took an eighth of a training step of a
    small BERT. On a CPU 16 bits an entry are drawn here, four entries at once: `p` is rounded to a
    65536th, and the scale with it.
    """
    dropped = min(round(p * LEVELS), LEVELS - 1)
    if not dropped or values.device.type != "cpu" or torch.compiler.is_compiling():
        return functional.dropout(values, p)
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    bits = words.view(torch.int16)[: values.numel()].view(values.shape)
    kept = (bits >= dropped - LEVELS // 2).to(values.dtype)
    return values * kept.mul_(LEVELS / (LEVELS - dropped))
