"""Selects the weights of a training run by rows that are kept out of training."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from bert_core.checks import (
    NonNegativeInt,
    PositiveFinite,
    PositiveShare,
    ShareBelowOne,
    check_fields,
)
from bert_core.errors import ConfigError
from bert_core.metrics import Calibration
from bert_core.wording import one_of
from tracking.runs.metric_names import LOSS, TASK, measured_on

if TYPE_CHECKING:
    from bert_core.tasks.base import Task


def metric_in_full(field: str, name: str, metrics: Collection[str]) -> str:
    """Return the full name of the metric that a user means.

    Args:
        field: the config's field that names it.
    Raises: ConfigError if the name matches no metric, or several.
    """
    if name in metrics:
        return name
    of_labels = [each for each in metrics if each.startswith(f"{name}_of_")]
    if len(of_labels) == 1:
        return of_labels[0]
    why = ", which is of one label: name it, or set options.positive_label" if of_labels else ""
    raise ConfigError(f"{field}: wanted {one_of(metrics)}, got {name!r}{why}")


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """How weights are selected: by training rows that are kept out of training."""

    share: ShareBelowOne = 0.0
    """Share of the training rows to keep out and measure on, to select the weights that do best on
    them; 0 trains on all rows and takes the last weights, as the paper does."""
    every_epochs: PositiveFinite = 1.0
    """Epochs between measurements."""
    patience: NonNegativeInt = 0
    """Stop after this many measurements in a row without improvement; 0 disables."""
    metric: str | None = None
    """Metric to select by; by default the task's main metric; `loss` selects by the loss."""
    calibrate: Calibration = "none"
    """What is fitted to the scores of the selected weights on these rows, so that of answers given
    0.8 eight in ten are right: `temperature`, one scale (Guo et al. 2017); `per_label` also a shift
    per label, as weights of classes call for, and with several labels per row a scale per label
    (Platt 1999). It becomes part of the head. For text classification."""
    thresholds: bool = False
    """Whether to choose thresholds by these rows, for the best F1 of each label: with several
    labels per row, or of the positive one of two. The bundle keeps them."""
    abstain_precision: PositiveShare | None = None
    """Choose the score below which the bundle abstains, so that this share of its other answers is
    right on these rows; by default it never abstains."""
    seed: NonNegativeInt = 0
    """Seed that draws the selection rows; they are the same for all training seeds."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="selection.")
        if self.patience and not self.share:
            raise ConfigError(
                f"selection.patience: wanted 0 without rows to measure on, got {self.patience}: "
                "set selection.share, 0.1 for a tenth of the training rows"
            )
        if self.decides and not self.share:
            raise ConfigError(
                f"selection.{self.decides[0]}: wanted the default without selection rows, since "
                "rows that were trained on decide too favourably: set selection.share, 0.1 for a "
                "tenth of the training rows"
            )

    @property
    def decides(self) -> list[str]:
        """Return the names of the fields by which the rows decide more than the weights."""
        asked = {
            "calibrate": self.calibrate != "none",
            "thresholds": self.thresholds,
            "abstain_precision": self.abstain_precision is not None,
        }
        return [name for name, is_asked in asked.items() if is_asked]

    def sign(self, task: "type[Task]") -> int:
        """Return the factor that turns the metric into a cost, where lower is better."""
        return 1 if self.metric == LOSS or self.metric in task.lower_is_better else -1

    def named(self, scores: Collection[str]) -> str | None:
        """Return the full name of the metric to select by: `f1` becomes `f1_of_spam` if that is the
        only F1.

        Args:
            scores: names of the task's metrics; empty if they are not known yet.
        Raises: ConfigError unless the metric is among `scores`, or is the loss.
        """
        if not scores or self.metric in (None, LOSS, *scores):
            return self.metric
        return metric_in_full("selection.metric", str(self.metric), [LOSS, *scores])

    def cost(self, task: "Task") -> Callable[[dict[str, float]], float]:
        """Return a function from a worker's `measure` results to a cost, where lower is better."""
        if self.metric == LOSS:
            return itemgetter(LOSS)

        def of(measured: dict[str, float]) -> float:
            scores = measured_on(TASK, measured)
            return self.sign(type(task)) * scores[self.named(scores) or task.main_metric(scores)]

        return of


@dataclass(frozen=True)
class Measurement:
    """The result of measuring a model on the selection rows during training."""

    seed: int
    """Index of the seed."""
    number: int
    """Number of the measurement within this seed, from 1."""
    step: int
    """Step within this seed."""
    share: float
    """Share of the whole training that is done."""
    cost: float
    """Lower is better."""
