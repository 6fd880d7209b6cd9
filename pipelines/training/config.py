"""What training is told; every process of a run has it."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from bert_core.checks import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    Share,
)
from bert_core.errors import ConfigError
from bert_core.train.config import OptimizerConfig, Precision
from pipelines.corpus.labelled import LabelledConfig
from pipelines.runtime.stage import INPUT, StageConfig
from pipelines.training.selection import SelectionConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(StageConfig):
    """How training is carried out and watched; nothing of it changes what is trained."""

    operational: ClassVar[bool] = True

    micro_batch_tokens: PositiveInt = 16_384
    """Tokens per forward pass of a worker, padding included; a longer row goes alone. Gradients do
    not depend on it."""
    fsdp: bool = False
    """Shard weights and optimizer state over the workers instead of copying them (FSDP2)."""
    log_every_steps: PositiveInt = 10
    """Steps between points of the curves."""
    report_every_s: NonNegativeFloat = 2.0
    """Seconds between reports to the run; each carries all points since the last one."""
    checkpoint_every_steps: PositiveInt = 200
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep; the one with the lowest held-out loss is kept as well."""
    max_loss_rise: NonNegativeFloat = 2.0
    """Stop when the losses of all parts, unweighted and averaged since the last point of the curve,
    exceed the median of the 20 points before by this much; 0 disables."""
    max_failures: int = 3
    """Times that lost workers are replaced before the stage fails; nodes that were preempted with
    notice do not count."""
    resize_every_s: NonNegativeFloat = 60.0
    """Seconds between checks whether the cluster has room for more workers, where `num_workers` is
    a range. A changed number of workers goes on from the newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LabelledTrainingConfig(TrainingConfig):
    """A model, a task, the rows that teach it, and how.

    Defaults: Devlin et al. 2019, appendix A.3.
    """

    model: str = field(metadata=INPUT)
    """Bundle to start from: a folder, a URI, or models:/name@alias."""
    task: str = "text-classification"
    """Name of the task; `raybert list tasks` shows those there are."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the task is told, by name: `{multi_label = true}`."""
    train: LabelledConfig = field(default_factory=LabelledConfig)
    """Rows to train on."""
    held_out: LabelledConfig | None = None
    """Rows to measure on, once, when training is done, where they are given; they select
    nothing."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Which weights are taken."""
    rows_per_class: PositiveInt | None = None
    """Most training rows of a label, drawn at random; all where this is not given."""
    max_length: Annotated[int, Range(least=8)] = 128
    """Most tokens of a row, special ones included."""
    batch_size: PositiveInt = 32
    """Rows of an optimizer step, over all workers."""
    precision: Precision = "bf16"
    """`bf16` runs matrix products in bfloat16; `fp32` is faster on CPUs without it."""

    from_scratch: bool = False
    """Start from fresh weights instead of the bundle's, to see what pretraining is worth."""
    epochs: PositiveFloat = 3.0
    """How often every row is seen."""
    lr: PositiveFloat = 5e-5
    """Peak learning rate."""
    warmup_share: Share = 0.1
    """Share of the steps in which the learning rate climbs."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay of weight matrices."""
    layer_decay: PositiveShare = 1.0
    """A layer's learning rate is so many times that of the one above it (Howard and Ruder 2018); 1
    moves all alike."""
    seeds: tuple[int, ...] = (0,)
    """Fresh heads, order of rows and dropout; the bundle is that of the first seed."""
    max_loss_rise: NonNegativeFloat = 0.0
    """As in pretraining; off by default, since the loss of few rows may rise without harm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < self.most_workers:
            raise ConfigError(
                f"batch_size: wanted at least a row for each of {self.most_workers} workers, "
                f"got {self.batch_size}"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: wanted different numbers, at least one, got {self.seeds}")

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=self.lr, weight_decay=self.weight_decay, layer_decay=self.layer_decay
        )

    def steps(self, rows: int) -> int:
        """Optimizer steps of one seed."""
        return max(1, round(self.epochs * rows / self.batch_size))

    def steps_between(self, rows: int) -> int:
        """Steps between two measurements on the rows that select."""
        return max(1, round(self.selection.every_epochs * rows / self.batch_size))
