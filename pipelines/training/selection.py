"""Which weights of a training are taken, by rows that it does without."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from bert_core.checks import NonNegativeInt, PositiveFloat, ShareBelowOne, check_fields
from bert_core.errors import ConfigError
from tracking.metric_names import LOSS, TASK, measured_on

if TYPE_CHECKING:
    from bert_core.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Which weights of a training are taken: by training rows that it does without."""

    share: ShareBelowOne = 0.0
    """Share of the training rows that is kept out, and measured on instead, to take the weights
    that do best on it; 0 trains on all and takes the last, as the paper does."""
    every_epochs: PositiveFloat = 1.0
    """Epochs between two measurements."""
    patience: NonNegativeInt = 0
    """Training ends after so many measurements in a row that found none better; 0 never does."""
    metric: str | None = None
    """What is best; the task's own metric where this is not given, `loss` for the loss."""
    seed: int = 0
    """Which rows: the same for every seed of the training."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="selection.")
        if self.patience and not self.share:
            raise ConfigError(
                f"selection.patience: wanted 0 without rows to measure on, got {self.patience}: "
                "give selection.share, 0.1 for a tenth of the training rows"
            )

    def sign(self, task: "type[Task]") -> int:
        """What the metric is multiplied by, so that a lower number is better."""
        return 1 if self.metric == LOSS or self.metric in task.lower_is_better else -1

    def cost(self, task: "Task") -> Callable[[dict[str, float]], float]:
        """What is lower for better weights, of what `measure` of the worker gives."""
        if self.metric == LOSS:
            return itemgetter(LOSS)

        def of(measured: dict[str, float]) -> float:
            scores = measured_on(TASK, measured)
            metric = self.metric or task.main_metric(scores)
            if metric not in scores:
                names = ", ".join(scores)
                raise ConfigError(f"selection.metric: wanted one of loss, {names}, got {metric!r}")
            return self.sign(type(task)) * scores[metric]

        return of


@dataclass(frozen=True)
class Measurement:
    """What a model in training came to on the rows that select."""

    seed: int
    """Which of the seeds it is of, by its place."""
    number: int
    """Which of this seed's measurements it is, from 1."""
    step: int
    """Of this seed."""
    share: float
    """How much of the whole training is behind it."""
    cost: float
    """The lowest is best."""
