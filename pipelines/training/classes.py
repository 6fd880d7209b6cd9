"""How training treats classes that are uneven: what the user asks for, checked against the rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from bert_core.checks import (
    NonNegativeFloat,
    PositiveFinite,
    Share,
    ShareBelowOne,
    check_fields,
    default_of,
)
from bert_core.data.order import GlobalOrder, Order
from bert_core.errors import ConfigError, CorpusError
from bert_core.objectives.class_weights import Weighting, class_weights, positive_weights
from bert_core.wording import nearest, some_of
from pipelines.runtime.progress import say

if TYPE_CHECKING:
    from bert_core.data.windows import Window
    from bert_core.objectives.class_loss import ClassLoss
    from bert_core.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class ClassesConfig:
    """What training does about uneven classes, hard rows and uncertain labels.

    The defaults do nothing: plain cross-entropy over rows as they are.
    """

    weighting: Weighting = "equal"
    """How classes are weighted in the loss by their numbers of training rows (words, for tags):
    `balanced`, in inverse proportion, as in scikit-learn; `effective_number` (Cui et al. 2019),
    between that and `equal`. With several labels per row, it weighs the rows that have a label
    against those that lack it."""
    beta: ShareBelowOne = 0.999
    """Of `effective_number`: the closer to 1, the closer to `balanced`."""
    weights: dict[str, PositiveFinite] = field(default_factory=dict)
    """Weights that you give instead, by label: `{spam = 5.0}`; those of other labels are 1."""
    focal_gamma: NonNegativeFloat = 0.0
    """Focal loss: rows count by (1 − p)^gamma, where p is the probability of the right label, so
    that easy rows count less; Lin et al. 2017 take 2."""
    label_smoothing: ShareBelowOne = 0.0
    """Share of the target that is spread evenly over all labels (Szegedy et al. 2016, who take
    0.1)."""
    sampling_power: Share = 1.0
    """How often rows of a label are drawn: in proportion to its number of rows to this power. 1
    takes every row once per epoch, 0 all labels equally often, 0.5 between (Kang et al. 2020). An
    epoch has as many rows as ever. With several labels per row, its rarest counts."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="classes.")
        for label, weight in self.weights.items():
            if not 0 < weight < np.inf:
                raise ConfigError(
                    f"classes.weights: wanted finite numbers above 0, got {weight} for {label!r}: "
                    "to leave a label out, remove its rows"
                )
        if self.weights and self.weighting != "equal":
            raise ConfigError(
                f"classes.weights: wanted none with classes.weighting = {self.weighting!r}, which "
                f"computes them, got {self.weights}: leave one of the two out"
            )
        if self.focal_gamma and self.label_smoothing:
            raise ConfigError(
                "classes.focal_gamma: wanted 0 with classes.label_smoothing, under which no single "
                f"label is right, got {self.focal_gamma:g}: leave one of the two out"
            )

    @property
    def changed(self) -> list[str]:
        """Return the names of the fields that are not at their defaults."""
        return [one.name for one in fields(self) if getattr(self, one.name) != default_of(one)]

    @property
    def is_weighted(self) -> bool:
        return bool(self.weights) or self.weighting != "equal"

    def check_task(self, task: "type[Task]") -> None:
        """Raise ConfigError if a task has no classes to which this could apply."""
        if self.changed and task.classes_in is None:
            raise ConfigError(
                f"classes.{self.changed[0]}: wanted the default for {task.name}, whose rows have "
                f"no classes, got {getattr(self, self.changed[0])!r}: leave it out"
            )


def class_loss(config: ClassesConfig, task: "Task", windows: "Sequence[Window]") -> "ClassLoss":
    """Return the loss for training on these windows, and say the weights.

    Raises: ConfigError for the weight of a label that does not exist; CorpusError if a weight has
        no row that it could apply to.
    """
    from bert_core.objectives.class_loss import ClassLoss

    weights: tuple[float, ...] = ()
    if config.is_weighted:
        weights = _weights(config, task, windows)
        heaviest = sorted(zip(task.labels, weights, strict=True), key=lambda pair: -pair[1])
        shown = some_of([f"{label} {weight:.3g}" for label, weight in heaviest])
        say(f"weights of labels: {shown}")
    return ClassLoss(
        weights=weights,
        focal_gamma=config.focal_gamma,
        label_smoothing=config.label_smoothing,
    )


def _weights(config: ClassesConfig, task: "Task", windows: "Sequence[Window]") -> tuple[float, ...]:
    classes = _classes(task, windows)
    several = classes.ndim == 2
    counts = classes.sum(0) if several else _counts(classes, len(task.labels))
    unknown = [label for label in config.weights if label not in task.labels]
    if unknown:
        raise ConfigError(
            f"classes.weights: wanted labels of the training rows, got {unknown[0]!r}"
            f"{nearest(unknown[0], task.labels)}; they are: {some_of(task.labels)}"
        )
    named = dict(zip(task.labels, counts.tolist(), strict=True))
    _check_rows(config, task, named, len(classes) if several else None)
    if config.weights:
        return tuple(config.weights.get(label, 1.0) for label in task.labels)
    present = counts > 0
    weights = np.ones(len(counts))
    if several:
        weights = positive_weights(config.weighting, counts, len(classes), config.beta)
    else:
        weights[present] = class_weights(config.weighting, counts[present], config.beta)
    return tuple(weights.tolist())


def _check_rows(
    config: ClassesConfig, task: "Task", counts: Mapping[str, int], rows: int | None
) -> None:
    """Raise CorpusError if a label that is to be weighted has no training row.

    Labels that follow from others (`Task.implies_labels`) need none, unless they are named.

    Args:
        rows: with several labels per row, the number of all rows.
    """
    absent = [
        label
        for label, count in counts.items()
        if count == 0 and (not task.implies_labels or label in config.weights)
    ]
    if absent:
        raise CorpusError(
            "classes: wanted at least one training row of every label, got none of "
            f"{some_of([*map(repr, absent)])}: add rows, lower selection.share if the selection "
            "rows have them all, or leave weights and sampling out"
        )
    always = [label for label, count in counts.items() if count == rows]
    if always and not config.weights:
        raise CorpusError(
            f"classes.weighting: wanted training rows without the label {always[0]!r}, to weigh "
            "those with it against them, got none: add such rows, or give classes.weights"
        )


def class_order(
    config: ClassesConfig, task: "Task", windows: "Sequence[Window]", seed: int
) -> Order:
    """Return the order in which windows are trained on.

    Raises: ConfigError if windows do not have one class each.
    """
    if config.sampling_power == 1.0:
        return GlobalOrder([len(windows)], seed=seed)
    from bert_core.data.class_order import ClassOrder

    return ClassOrder(
        sampled_classes(config, task, windows), power=config.sampling_power, seed=seed
    )


def sampled_classes(
    config: ClassesConfig, task: "Task", windows: "Sequence[Window]"
) -> Int[np.ndarray, "windows"]:
    """Return the class by which each window is sampled: its label, or the rarest of its labels,
    where having none is a class too.

    Raises: ConfigError if windows have many words with a class each; CorpusError if a label has no
        training row.
    """
    classes = _classes(task, windows)
    assert task.classes_in is not None
    if any(len(window.labels[task.classes_in]) != 1 for window in windows):
        raise ConfigError(
            f"classes.sampling_power: wanted 1 for {task.name}, whose texts have words of many "
            f"labels, so that none can be drawn alone, got {config.sampling_power:g}: leave it "
            "out, and set classes.weighting"
        )
    several = classes.ndim == 2
    counts = classes.sum(0) if several else _counts(classes, len(task.labels))
    _check_rows(ClassesConfig(), task, dict(zip(task.labels, counts.tolist(), strict=True)), None)
    if not several:
        return classes
    rarity = np.where(classes > 0, counts, len(classes) + 1)
    return np.where(classes.any(1), rarity.argmin(1), classes.shape[1])


def _classes(task: "Task", windows: "Sequence[Window]") -> Int[np.ndarray, "items *labels"]:
    """Return the class of each item, without ignored ones; with several labels per row, a 0 or 1
    for each."""
    from bert_core.objectives import IGNORE

    assert task.classes_in is not None
    classes = np.concatenate([window.labels[task.classes_in] for window in windows])
    return classes if classes.ndim == 2 else classes[classes != IGNORE]


def _counts(classes: Int[np.ndarray, "items"], labels: int) -> Int[np.ndarray, "labels"]:
    return np.bincount(classes, minlength=labels)
