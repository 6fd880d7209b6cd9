"""Which labels a text is assigned, by its scores: thresholds, and scores too low to decide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from bert_core.errors import ConfigError
from bert_core.wording import nearest, some_of

USUAL_THRESHOLD = 0.5
"""Score from which a label is assigned, unless another threshold was chosen."""


@dataclass(frozen=True)
class Decided:
    """What is decided on the labels of some texts."""

    assigned: Bool[np.ndarray, "rows labels"]
    """Whether a text is assigned the label."""
    chosen: Bool[np.ndarray, "rows labels"]
    """With one label per text, the one that is assigned, or would be if the model did not abstain;
    nothing with several."""


@dataclass(frozen=True)
class Decider:
    """Decides on labels by their scores."""

    thresholds: Float[np.ndarray, "labels"]
    abstain_below: float | None
    several: bool
    """Whether a text has any number of labels, rather than one."""

    @classmethod
    def of(
        cls,
        labels: Sequence[str],
        *,
        thresholds: Mapping[str, float],
        abstain_below: float | None,
        several: bool,
    ) -> "Decider | None":
        """Return what decides for a task with these options; None if it decides as usual.

        Raises: ConfigError if the options do not fit the labels.
        """
        if not thresholds and abstain_below is None:
            return None
        check_labels("thresholds", thresholds, labels)
        for label, threshold in thresholds.items():
            if not 0 <= threshold <= 1:
                raise ConfigError(
                    f"options.thresholds: wanted scores from 0 to 1, got {threshold} for {label!r}"
                )
        if abstain_below is not None and (several or not 0 <= abstain_below <= 1):
            why = "none with multi_label, where a text may have no label" if several else "0 to 1"
            raise ConfigError(f"options.abstain_below: wanted {why}, got {abstain_below}")
        if several:
            values = np.array([thresholds.get(label, USUAL_THRESHOLD) for label in labels])
            return cls(values, abstain_below, several)
        return cls(_of_two(labels, thresholds), abstain_below, several)

    def decide(self, shares: Float[np.ndarray, "rows labels"]) -> Decided:
        """Decide by probabilities: of several labels each by itself, or the best of all."""
        if self.several:
            return Decided(shares >= self.thresholds, np.zeros(shares.shape, dtype=bool))
        # Of two, p ≥ t is p / t ≥ (1 - p) / (1 - t); products also hold where a threshold is 0.
        best = (
            (shares * self.thresholds[::-1]).argmax(1) if len(self.thresholds) else shares.argmax(1)
        )
        chosen = np.arange(shares.shape[1]) == best[:, None]
        if self.abstain_below is None:
            return Decided(chosen, chosen)
        return Decided(chosen & (shares >= self.abstain_below), chosen)


def check_labels(option: str, of_labels: Mapping[str, object], labels: Sequence[str]) -> None:
    """Raise ConfigError if an option has a value for a label that there is not; with labels that
    are not known yet, never."""
    unknown = next((label for label in of_labels if labels and label not in labels), None)
    if unknown is not None:
        raise ConfigError(
            f"options.{option}: wanted labels of the model, got {unknown!r}"
            f"{nearest(unknown, labels)}: correct it, or leave it out"
        )


def _of_two(labels: Sequence[str], thresholds: Mapping[str, float]) -> Float[np.ndarray, "labels"]:
    """Return the thresholds of two labels of which a text has one: they add up to 1. Empty if none
    is given."""
    if not thresholds or not labels:
        return np.empty(0)
    [(label, threshold), *others] = thresholds.items()
    if len(labels) != 2 or others:
        raise ConfigError(
            "options.thresholds: wanted one for one of two labels, since a text has one label, got "
            f"{len(thresholds)} for {len(labels)} labels: leave them out, or set multi_label"
        )
    return np.array([threshold if each == label else 1 - threshold for each in labels])


def decision_notes(
    labels: Sequence[str],
    thresholds: Mapping[str, float],
    abstain_below: float | None,
    calibration: Mapping[str, Sequence[float]],
) -> list[str]:
    """Return sentences, without a full stop, that say how scores become decisions."""
    notes = []
    if calibration:
        scales, shifts = zip(*calibration.values(), strict=True)
        how = (
            "a scale per label" if len(set(scales)) > 1 else f"a temperature of {1 / scales[0]:.3g}"
        )
        how += " and shifts" if any(shifts) else ""
        notes.append(f"scores are calibrated on selection rows, by {how}, in the weights")
    if thresholds:
        shown = some_of([f"{label} {value:.3g}" for label, value in thresholds.items()])
        if len(labels) > 2 and len(thresholds) < len(labels):
            shown += f", others {USUAL_THRESHOLD:g}"
        notes.append(f"a label is assigned from its threshold on: {shown}")
    if abstain_below is not None:
        notes.append(f"it abstains where the best score is below {abstain_below:.3g}")
    return notes
