"""The configuration of training, shared by all processes of a run."""

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, ClassVar, TypedDict

from bert_core.checks import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFinite,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    ShareBelowOne,
)
from bert_core.errors import ConfigError
from bert_core.model.variants import VARIANTS
from bert_core.scores import Precision
from bert_core.train.config import AdapterConfig, Frozen, OptimizerConfig
from bert_core.wording import one_of
from pipelines.corpus.labelled import LabelledConfig
from pipelines.runtime.stage_config import INPUT, StageConfig
from pipelines.training.classes import ClassesConfig
from pipelines.training.selection import SelectionConfig
from tracking.runs.goodput import CLUSTER, DEFAULT


def check_variant(field_name: str, variant: str | None) -> None:
    """Raise ConfigError if there is no variant of this name."""
    if variant is not None and variant not in VARIANTS:
        raise ConfigError(f"{field_name}: wanted {one_of(VARIANTS)}, got {variant!r}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(StageConfig):
    """How training is run and watched; none of this changes what is trained."""

    operational: ClassVar[bool] = True

    micro_batch_tokens: PositiveInt = 16_384
    """Tokens per forward pass of a worker, padding included; a longer row gets a pass to itself.
    Gradients do not depend on it."""
    fsdp: bool = False
    """Shard weights and optimizer state over the workers instead of replicating them (FSDP2)."""
    log_every_steps: PositiveInt = 10
    """Steps between points of the training curves."""
    report_every_s: NonNegativeFloat = 2.0
    """Seconds between reports to the run; each has all points since the last one."""
    checkpoint_every_steps: PositiveInt = 200
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep; the one with the lowest held-out loss is kept too."""
    max_loss_rise: NonNegativeFloat = 2.0
    """Stop when the loss exceeds the median of the last 20 points by this much; 0 disables. It is
    the unweighted sum of the losses of all parts, averaged since the last point of the curve."""
    max_failures: Annotated[int, Range(least=-1)] = 3
    """How often lost workers are replaced before the stage fails, -1 without limit; nodes preempted
    with notice do not count."""
    resize_every_s: NonNegativeFloat = 60.0
    """If `num_workers` is a range: seconds between checks whether the cluster has room for more
    workers. After a change, training resumes from the newest checkpoint."""
    usd_per_hour: NonNegativeFloat | None = None
    """Price of the whole cluster, in USD per hour: the record then says what the run has cost."""
    usd_per_node_hour: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Prices of single nodes instead, in USD per hour, by a label of the node (such as its node
    group), its accelerator, or `default`: `{default = 0.4, H100 = 3.5}`. All nodes of the cluster
    count, while the run lasts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        prices = self.usd_per_node_hour
        if prices and self.usd_per_hour is not None:
            raise ConfigError(
                "usd_per_node_hour: wanted none with usd_per_hour, which is the price of all nodes "
                "together: leave one of the two out"
            )
        if prices and DEFAULT not in prices:
            raise ConfigError(
                f"usd_per_node_hour: wanted a price of `{DEFAULT}` too, for nodes of any other "
                f"kind, got only {', '.join(prices)}"
            )
        for kind, price in prices.items():
            if not 0 <= price < inf:
                raise ConfigError(f"usd_per_node_hour.{kind}: wanted at least 0, got {price}")

    @property
    def prices_usd(self) -> dict[str, float]:
        """Return the prices in USD per hour, by name; empty without prices."""
        if self.usd_per_hour is None:
            return self.usd_per_node_hour
        return {CLUSTER: self.usd_per_hour}


class Dropout(TypedDict):
    """Dropout as `EncoderConfig.adapted` takes it; None keeps the encoder's."""

    hidden_dropout_prob: float | None
    attention_dropout: float | None


@dataclass(frozen=True, kw_only=True)
class LabelledTrainingConfig(TrainingConfig):
    """Fine-tuning: the model, the task, the rows to learn from, and the hyperparameters.

    Defaults: Devlin et al. 2019, appendix A.3.
    """

    model: str = field(metadata=INPUT)
    """Bundle to start from: a folder, a URI, models:/name@alias, or owner/name or
    owner/name@revision of the Hugging Face hub, such as google-bert/bert-base-uncased."""
    task: str = "text-classification"
    """Name of the task; `raybert list tasks` lists them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, by name: `{multi_label = true}`."""
    train: LabelledConfig = field(default_factory=LabelledConfig)
    """Rows to train on."""
    held_out: LabelledConfig | None = None
    """Rows to measure on once, after training; never used for selection. By default none."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """How the final weights are selected."""
    classes: ClassesConfig = field(default_factory=ClassesConfig)
    """What is done about uneven classes, hard rows and uncertain labels."""
    rows_per_class: PositiveInt | None = None
    """Maximum number of training rows per label, drawn at random; all by default."""
    max_length: Annotated[int, Range(least=8)] = 128
    """Maximum number of tokens per row, special tokens included."""
    batch_size: PositiveInt = 32
    """Rows, or windows of long rows, per optimizer step, over all workers."""
    precision: Precision = "bf16"
    """`bf16` runs matrix products of the steps in bfloat16; `fp32` is faster on CPUs without it.
    Scores of held-out rows are computed in fp32."""

    from_scratch: bool = False
    """Start from random weights instead of the bundle's, to see what pretraining is worth."""
    epochs: PositiveFinite = 3.0
    """Passes over the training rows, or over all their windows."""
    lr: PositiveFloat = 5e-5
    """Peak learning rate."""
    warmup_share: ShareBelowOne = 0.1
    """Share of the steps over which the learning rate warms up."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of weight matrices."""
    hidden_dropout_prob: ShareBelowOne | None = None
    """Dropout on the embeddings and the output of each sub-layer; by default the bundle's. Try 0.1
    on few rows if the encoder was pretrained without dropout."""
    attention_probs_dropout_prob: ShareBelowOne | None = None
    """Dropout on attention probabilities; by default the bundle's. 0 enables fused attention."""
    freeze: Frozen = "nothing"
    """Part of the encoder that stays as it is: `embeddings`, or `encoder`, so that the head alone
    learns, with the pooler where there is one, or `weights`, so that the biases learn too (BitFit,
    Ben Zaken et al. 2022). Training then needs less time and memory, and models with the same
    frozen encoder share their passes in a server."""
    freeze_layers: NonNegativeInt = 0
    """Number of the first layers that stay as they are, with the embeddings below them."""
    adapter: AdapterConfig | None = None
    """Train a low-rank adapter and the head, and leave the encoder as it is: `{rank = 8}`. The
    bundle has it merged into its weights, and apart as a folder that peft reads."""
    layer_decay: PositiveShare = 1.0
    """Factor on a layer's learning rate relative to the layer above it (Howard and Ruder 2018); 1
    uses the same rate for all."""
    examples: Annotated[int, Range(least=0, most=20)] = 3
    """Held-out rows, or else selection rows, whose inputs the bundle stores and shows as examples,
    on its page and its card; 0 keeps all rows out of it."""
    seeds: tuple[NonNegativeInt, ...] = (0,)
    """Seeds of new heads, row order and dropout, one training each; the bundle is the first's."""
    max_loss_rise: NonNegativeFloat = 0.0
    """As in pretraining; off by default, since the loss on few rows may rise without harm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < self.most_workers:
            raise ConfigError(
                f"batch_size: wanted at least a row for each of {self.most_workers} workers, "
                f"got {self.batch_size}"
            )
        if self.adapter is not None and (
            self.freeze != "nothing" or self.freeze_layers or self.from_scratch
        ):
            raise ConfigError(
                "adapter: wanted neither freeze nor freeze_layers, since it leaves the whole "
                "encoder as it is, nor from_scratch, whose random weights say nothing, got one of "
                "them: leave the adapter or the others out"
            )
        if self.freeze in ("encoder", "weights") and (self.freeze_layers or self.from_scratch):
            other = "freeze_layers" if self.freeze_layers else "from_scratch"
            why = "which it includes" if self.freeze_layers else "whose random weights say nothing"
            raise ConfigError(
                f"freeze: wanted nothing or embeddings with {other}, {why}, got {self.freeze}: "
                "leave one of the two out"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: wanted different numbers, at least one, got {self.seeds}")

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=self.lr, weight_decay=self.weight_decay, layer_decay=self.layer_decay
        )

    @property
    def dropout(self) -> Dropout:
        """Return the dropout of the model that is trained."""
        return {
            "hidden_dropout_prob": self.hidden_dropout_prob,
            "attention_dropout": self.attention_probs_dropout_prob,
        }

    def steps(self, rows: int) -> int:
        """Return the optimizer steps per seed."""
        return max(1, round(self.epochs * rows / self.batch_size))

    def steps_between(self, rows: int) -> int:
        """Return the steps between measurements on the selection rows."""
        return max(1, round(self.selection.every_epochs * rows / self.batch_size))
