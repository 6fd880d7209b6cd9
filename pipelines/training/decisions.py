"""What selection rows decide about a trained model besides its weights: the scale of its scores,
and the thresholds of its answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core import files
from bert_core.errors import ConfigError
from bert_core.metrics.calibration import reliability
from bert_core.metrics.decisions import best_threshold, threshold_of_precision
from bert_core.wording import some_of
from pipelines.runtime.progress import say
from tracking.runs.story import percent

if TYPE_CHECKING:
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.base import Task
    from bert_core.tasks.text_classification import TextClassification
    from bert_core.train.scaling import Scaling
    from pipelines.training.selection import SelectionConfig


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What was decided for the weights of one seed."""

    calibration: dict[str, list[float]] = field(default_factory=dict)
    """The scale and the shift of each label's scores."""
    thresholds: dict[str, float] = field(default_factory=dict)
    abstain_below: float | None = None
    says: list[str] = field(default_factory=list)
    """Sentences for the user."""

    @property
    def scaling(self) -> "Scaling":
        from bert_core.train.scaling import Scaling

        scale, shift = zip(*self.calibration.values(), strict=True)
        return Scaling(scale, shift)

    def scale(self, model: "ObjectiveModel") -> None:
        """Make the calibration part of the model's head, in place."""
        if self.calibration:
            head: Any = next(iter(model.objectives.values()))
            self.scaling.apply(head.head.linear)

    def of(self, task: "Task") -> "Task":
        """Return the task that answers by these decisions."""
        made: dict[str, Any] = {"calibration": self.calibration}
        if self.thresholds:
            made["thresholds"] = self.thresholds
        if self.abstain_below is not None:
            made["abstain_below"] = self.abstain_below
        return type(task)(task.labels, replace(task.chosen, **made))

    def write(self, path: str) -> None:
        files.write_json(path, asdict(self))

    @classmethod
    def read(cls, path: str) -> "Decisions":
        return cls(**files.read_json(path))


def decide(
    task: "TextClassification",
    rows: Sequence[Any],
    answers: Sequence[Any],
    config: "SelectionConfig",
) -> Decisions:
    """Return what these selection rows decide.

    Args:
        answers: those to the rows, with scores before softmax or sigmoid.
    """
    from bert_core.train.scaling import fitted

    labels = task.compare(rows, answers)["label"]
    scores = [{entry["label"]: entry["score"] for entry in answer} for answer in answers]
    logits = np.array([[each[label] for label in task.labels] for each in scores])
    scaling = fitted(logits, labels, config.calibrate)
    before, after = (
        task.decode(rows, [], list(each)) for each in (logits, scaling.applied(logits))
    )
    made, says = Decisions(), []
    if config.calibrate != "none":
        pairs = zip(scaling.scale, scaling.shift, strict=True)
        calibration = {name: [*pair] for name, pair in zip(task.labels, pairs, strict=True)}
        errors = [reliability(*claims_of(task, rows, each)) for each in (before, after)]
        was, now = (each.expected_calibration_error for each in errors)
        says.append(
            f"calibrated on {len(rows):,} selection rows: their expected calibration error is "
            f"{now:.3f}, it was {was:.3f}"
        )
        made = replace(made, calibration=calibration)
    if config.thresholds:
        thresholds, lacking = _thresholds(task, labels, after)
        if lacking:
            says.append(f"no selection row has {some_of(lacking)}: the threshold stays at 0.5")
        made = replace(made, thresholds=thresholds)
    if config.abstain_precision is not None:
        answered = made.of(task).decode(rows, [], list(scaling.applied(logits)))
        below, said = _abstain_below(task, rows, answered, config.abstain_precision)
        made, says = replace(made, abstain_below=below), [*says, said]
    return replace(made, says=[*says, *made.of(task).notes])


def claims_of(task: "Task", rows: Sequence[Any], answers: Sequence[Any]) -> tuple[Any, Any]:
    claims = task.claims(rows, answers)
    assert claims is not None
    return claims


def _thresholds(
    task: "TextClassification", labels: np.ndarray, answers: Sequence[Any]
) -> tuple[dict[str, float], list[str]]:
    """Return the threshold of each label that selection rows have, or of the positive one of two,
    and the labels that they lack."""
    scores = [{entry["label"]: entry["score"] for entry in answer} for answer in answers]
    asked = task.labels if task.chosen.multi_label else [positive_label(task)]
    chosen, lacking = {}, []
    for label in asked:
        place = task.labels.index(label)
        present = labels[:, place] > 0 if task.chosen.multi_label else labels == place
        best = best_threshold(np.array([each[label] for each in scores]), present)
        if best is None:
            lacking.append(label)
        else:
            chosen[label] = best
    return chosen, lacking


def _abstain_below(
    task: "TextClassification", rows: Sequence[Any], answers: Sequence[Any], precision: float
) -> tuple[float | None, str]:
    confidence, is_right = claims_of(task, rows, answers)
    below = threshold_of_precision(confidence, is_right, precision)
    if below is None:
        return None, (
            f"no threshold makes {percent(precision)} of the answers to the {len(rows):,} "
            "selection rows right, not even for the most confident ones: the model never abstains"
        )
    share = float(np.mean(confidence >= below))
    return below, (
        f"it answers {percent(share)} of the selection rows, at least {percent(precision)} of them "
        "correctly"
    )


def positive_label(task: "TextClassification") -> str:
    """Return the label whose F1 a threshold is chosen for, of two of which a row has one.

    Raises: ConfigError if it is not known.
    """
    from bert_core.metrics.classification import f1_names

    places = [*f1_names(task.labels, task.chosen.positive_label)]
    if len(task.labels) != 2 or len(places) != 1:
        if len(task.labels) == 2:
            raise ConfigError(
                f"selection.thresholds: wanted to know which of {' and '.join(task.labels)} is the "
                "positive label: set options.positive_label"
            )
        raise ConfigError(
            f"selection.thresholds: wanted two labels or options.multi_label, got "
            f"{len(task.labels)} labels: leave it out"
        )
    return task.labels[places[0]]


def check_decisions(config: "SelectionConfig", task: "Task") -> None:
    """Check that selection rows can decide what the config asks for.

    Raises: ConfigError if the task has no such scores, or if the options decide it already.
    """
    from bert_core.tasks.text_classification import TextClassification

    if not config.decides:
        return
    asked = config.decides[0]
    if not (task.decides and isinstance(task, TextClassification)):
        raise ConfigError(
            f"selection.{asked}: wanted the default for {task.name}, whose scores are not those of "
            "labels of a text: leave it out"
        )
    if config.abstain_precision is not None and task.chosen.multi_label:
        raise ConfigError(
            "selection.abstain_precision: wanted none with multi_label, where a text may have no "
            f"label, got {config.abstain_precision:g}: leave it out, and set selection.thresholds"
        )
    given = task.chosen.thresholds or task.chosen.abstain_below is not None
    if given:
        raise ConfigError(
            f"selection.{asked}: wanted the default with options.thresholds or "
            "options.abstain_below, which say what selection rows would decide, or were chosen "
            "for other scores: leave one or the other out"
        )
    if config.thresholds and not task.chosen.multi_label:
        positive_label(task)


def tell(stage: str, decisions: Decisions) -> None:
    """Print what was decided."""
    for text in decisions.says:
        say(f"{stage}: {text}")
