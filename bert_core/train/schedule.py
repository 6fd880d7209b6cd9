"""Learning-rate schedules. A new one is a function, an entry in `DECAYS` and a value of `Decay`."""

import math
from collections.abc import Callable
from typing import Literal

Decay = Literal["linear", "cosine", "1-sqrt", "constant"]


def linear(left: float) -> float:
    """Return the share of the peak of a linear fall to 0 (Devlin et al. 2019, appendix A.2).

    Args:
        left: share of the fall that is left, from 1 to 0.
    """
    return left


def cosine(left: float) -> float:
    """Return the share of the peak of a fall along a half cosine to 0 (Loshchilov and Hutter
    2017)."""
    return 0.5 - 0.5 * math.cos(math.pi * left)


def one_minus_sqrt(left: float) -> float:
    """Return the share of the peak of a fall that is steep first: 1 - sqrt of the share of the fall
    that is over (Hägele et al. 2024, section 3; ModernBERT, Warner et al. 2024, section 2.2.2)."""
    return 1 - math.sqrt(1 - left)


def constant(left: float) -> float:
    """Return 1: the learning rate stays at its peak."""
    return 1.0


DECAYS: dict[Decay, Callable[[float], float]] = {
    "linear": linear,
    "cosine": cosine,
    "1-sqrt": one_minus_sqrt,
    "constant": constant,
}
"""The share of the peak learning rate, as a function of the share of the decay that is left: 1 at
its start, 0 after the last step."""


def share_of_peak(
    step: float, max_steps: int, *, warmup: int, decay: Decay, decay_share: float
) -> float:
    """Return the share of the peak learning rate at `step`, counted from 0.

    Args:
        warmup: number of steps in which it rises linearly; the first has a rate above 0.
        decay_share: share of the steps after the warmup in which it falls, the last ones; before
            them it stays at the peak.
    """
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    falling = decay_share * (max_steps - warmup)
    return DECAYS[decay](min(1.0, max(0.0, (max_steps - step) / max(1, falling))))
