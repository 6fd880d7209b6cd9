"""Training settings, without torch, so that help and error messages need not import it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bert_core.checks import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFinite,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ShareBelowOne,
    check_fields,
)
from bert_core.errors import ConfigError
from bert_core.scores import Precision
from bert_core.train.schedule import Decay, share_of_peak

Algorithm = Literal["adamw", "stable_adamw", "lamb", "muon"]
Frozen = Literal["nothing", "embeddings", "encoder", "weights"]
"""Parts of a model that training may leave as they are."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer settings. Defaults: Devlin et al. 2019, appendix A.2."""

    name: Algorithm = "adamw"
    """`adamw` (Loshchilov and Hutter 2019); `stable_adamw`, whose steps are smaller where gradients
    jump (Wortsman et al. 2023), for ModernBERT, with max_grad_norm 0; `lamb` for large batches (You
    et al. 2020); `muon` for the matrices of the encoder's layers, scaled to AdamW's steps, which
    all else keeps (Jordan et al. 2024; Liu et al. 2025)."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay of weight matrices and embeddings; biases and LayerNorms have none."""
    beta1: ShareBelowOne = 0.9
    """Decay of the running mean of gradients."""
    beta2: ShareBelowOne = 0.999
    """Decay of the running mean of squared gradients."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum L2 norm of the whole gradient, which is scaled down to it; 0 disables clipping."""
    layer_decay: PositiveShare = 1.0
    """Factor between the learning rates of a layer and the one above it, and of the top layer and
    the heads (Howard and Ruder 2018; Clark et al. 2020 use 0.8 for base); 1 disables it."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="optimizer.")

    def check_sharding(self, sharded: bool) -> None:
        """Check that the optimizer can train sharded weights. Raises: ConfigError if weights are
        `sharded` and the optimizer needs whole matrices."""
        if sharded and self.name == "muon":
            raise ConfigError(
                "optimizer.name: wanted adamw or lamb with fsdp, got muon, which needs whole "
                "matrices: train with copies (--fsdp false), or with adamw"
            )


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A low-rank adapter (LoRA), which is trained instead of the encoder. Defaults: Hu et al. 2022,
    section 4.2 and table 9, for RoBERTa-base."""

    rank: PositiveInt = 8
    """Rank of every change."""
    alpha: PositiveFloat = 8.0
    """The changes are scaled by this, divided by their rank."""
    rank_stabilized: bool = False
    """Divide by the root of the rank instead, so that higher ranks learn as fast (rsLoRA,
    Kalajdzievski 2023)."""
    dropout: ShareBelowOne = 0.0
    """Dropout on the input of the changes; the encoder's own stays as it is."""
    targets: tuple[str, ...] = ()
    """Linear layers that are changed, by the ends of their names in transformers, such as `query`
    or `attention.output.dense`, or `all-linear`; by default query and value, or the matrix that
    holds them."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="adapter.")

    @property
    def scale(self) -> float:
        """Return the factor of the product of both factors."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning-rate schedule. Defaults: Devlin et al. 2019, appendix A.2."""

    warmup_steps: NonNegativeInt | None = None
    """Steps in which the learning rate rises linearly from 0 to its peak; by default a hundredth of
    the schedule's (10,000 of 1,000,000 in the paper)."""
    decay: Decay = "linear"
    """Schedule after the warmup: `linear` falls to 0 after the last step, `cosine` falls along a
    half cosine (Loshchilov and Hutter 2017), `1-sqrt` falls steeply first (Hägele et al. 2024),
    `constant` stays at the peak."""
    decay_share: PositiveShare = 1.0
    """Share of the steps after the warmup in which the rate falls; before them it stays at the peak
    (Hu et al. 2024, MiniCPM, use the last tenth)."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="schedule.")

    def check_warmup(self, max_steps: int, *, name: str = "schedule.warmup_steps") -> None:
        """Check the length of the warmup. Raises: ConfigError if a schedule of `max_steps` would
        end before its peak."""
        if self.warmup_steps is not None and self.warmup_steps >= max_steps:
            raise ConfigError(
                f"{name}: wanted fewer than the {max_steps:,} steps of its schedule, so that the "
                f"learning rate reaches its peak and falls, got {self.warmup_steps:,}: lower it, "
                "or train for more steps"
            )

    def warmup(self, max_steps: int) -> int:
        """Return the number of steps of the warmup in a schedule of `max_steps`."""
        return round(max_steps / 100) if self.warmup_steps is None else self.warmup_steps

    def learning_rate(self, peak: float, max_steps: int) -> Callable[[float], float]:
        """Return the learning rate as a function of the step, counted from 0, for a run of
        `max_steps`."""
        return lambda step: peak * self.factor(step, max_steps)

    def factor(self, step: float, max_steps: int) -> float:
        """Return the share of the peak learning rate at `step`, counted from 0."""
        return share_of_peak(
            step,
            max_steps,
            warmup=self.warmup(max_steps),
            decay=self.decay,
            decay_share=self.decay_share,
        )


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """Settings of the training loop."""

    max_steps: PositiveInt = 1_000_000
    """Total number of optimizer steps."""
    max_hours: PositiveFinite | None = None
    """Wall-clock limit in hours. Where the hours are further along than the steps, the schedule
    follows them and ends with them. Time between an interruption and the resumption does not count.
    Such a run is not exactly reproducible."""
    precision: Precision = "bf16"
    """`bf16` runs matrix products in bfloat16 with autocast; weights and losses stay fp32."""
    seed: NonNegativeInt = 0
    """Seed of initial weights and dropout."""
    compile: bool = False
    """Whether to compile the encoder with `torch.compile`: takes minutes at the start, then steps
    are faster on a GPU. The kernels depend on the first shapes seen, so a resumed run may differ in
    the last digits."""
    activation_checkpointing: bool = False
    """Whether to recompute layers in the backward pass: a third more compute, far less memory."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="loop.")

    def place(self, steps: int, elapsed_s: float) -> float:
        """Return the run's progress in steps of `max_steps`: by its steps, or by its hours if those
        are further along."""
        if self.max_hours is None:
            return steps
        return max(steps, elapsed_s / (3600 * self.max_hours) * self.max_steps)
