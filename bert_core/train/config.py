"""How a model is trained: settings only, so that help and errors need no torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bert_core.checks import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ShareBelowOne,
    check_fields,
)

Precision = Literal["fp32", "bf16"]
Decay = Literal["linear", "cosine", "constant"]
Algorithm = Literal["adamw", "lamb"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How weights are moved. Defaults: Devlin et al. 2019, appendix A.2."""

    name: Algorithm = "adamw"
    """`adamw` (Loshchilov and Hutter 2019), or `lamb` for large batches (You et al. 2020)."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay of weight matrices and embeddings; biases and LayerNorms have none."""
    beta1: ShareBelowOne = 0.9
    """Decay of the mean of gradients."""
    beta2: ShareBelowOne = 0.999
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""
    max_grad_norm: NonNegativeFloat = 1.0
    """The whole gradient is scaled down to this L2 norm; 0 leaves it as it is."""
    layer_decay: PositiveShare = 1.0
    """A layer's learning rate is so many times that of the one above it, the uppermost one's so
    many times that of the heads (Howard and Ruder 2018; Clark et al. 2020 take 0.8 for base); 1
    moves all alike."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="optimizer.")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate of every step. Defaults: Devlin et al. 2019, appendix A.2."""

    warmup_steps: NonNegativeInt = 10_000
    """Steps in which the learning rate climbs from 0 to its peak."""
    decay: Decay = "linear"
    """What follows: `linear` falls, to be 0 after the last step; `cosine` does so along half a wave
    (Loshchilov and Hutter 2017); `constant` stays."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="schedule.")

    def learning_rate(self, peak: float, max_steps: int) -> Callable[[float], float]:
        """The learning rate at a step, counted from 0, of a run of `max_steps`."""
        return lambda step: peak * self.factor(step, max_steps)

    def factor(self, step: float, max_steps: int) -> float:
        """Share of the peak learning rate at `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        left = max(0.0, (max_steps - step) / max(1, max_steps - self.warmup_steps))
        return left if self.decay == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """What the training loop itself needs to know."""

    max_steps: PositiveInt
    """Optimizer steps in all."""
    max_hours: PositiveFloat | None = None
    """Wall-clock hours in all, where they end before the steps: then the schedule runs along the
    hours as it would along the steps, and is as far when they end. Hours between an interruption
    and its resumption do not count. Such a run is not the same twice."""
    precision: Precision = "bf16"
    """`bf16` runs matrix products in bfloat16 by autocast; weights and losses stay fp32."""
    seed: int = 0
    """Seed of fresh weights and of dropout."""
    compile: bool = False
    """Whether `torch.compile` makes kernels for the encoder: minutes at the start, faster steps on
    a GPU. Which kernels follows from the shapes seen first, so a resumed run may end with other
    last digits."""
    activation_checkpointing: bool = False
    """Whether layers are computed again in the backward pass: a third more
    work, far less memory."""

    def __post_init__(self) -> None:
        check_fields(self)

    def place(self, steps: int, elapsed_s: float) -> float:
        """How far a run is, in steps of `max_steps`: by its steps, or by its hours where they are
        further."""
        if self.max_hours is None:
            return steps
        return max(steps, elapsed_s / (3600 * self.max_hours) * self.max_steps)
