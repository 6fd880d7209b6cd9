"""Bootstrap: how much metrics would vary on other rows of the same kind, estimated by resampling
rows with replacement.

Source: Efron and Tibshirani 1993, chapter 13 (percentile intervals).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from bert_core.errors import ConfigError

Columns = Mapping[str, np.ndarray]
Metrics = Callable[[dict[str, np.ndarray]], dict[str, float]]

SAMPLES = 1000
CONFIDENCE = 0.95


def intervals(
    metrics: Metrics,
    columns: Columns,
    *,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Return the interval that contains the middle `confidence` of each metric's values over
    `samples` draws.

    Args:
        metrics: function that computes the metrics from columns with one entry per row.
    """
    drawn: dict[str, list[float]] = {}
    for rows in _draws(columns, samples, seed):
        for name, value in metrics(_rows_of(columns, rows)).items():
            drawn.setdefault(name, []).append(value)
    tail = (1 - confidence) / 2
    return {
        name: (float(np.quantile(values, tail)), float(np.quantile(values, 1 - tail)))
        for name, values in drawn.items()
    }


@dataclass(frozen=True)
class Verdict:
    """How a metric of a new model compares with the old model's on the same rows."""

    not_worse: bool
    metric: str
    difference: float
    """New − old."""
    low: float
    """Lower end of the confidence interval of the difference."""
    high: float
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.metric} {self.difference:+.4f} ({self.low:+.4f} to {self.high:+.4f} by paired "
            f"bootstrap on {self.rows:,} row{'' if self.rows == 1 else 's'})"
        )


def not_worse(
    metric: str,
    metrics: Metrics,
    new: Columns,
    old: Columns,
    *,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Verdict:
    """Compare a new model with an old one by paired bootstrap. The new model is worse if the whole
    confidence interval of the difference is below zero.

    So a difference that these rows cannot distinguish from zero counts as not worse: few rows let
    more models pass than many.

    Args:
        metric: name of the metric that decides; higher is better.
        metrics: function that computes the metrics from columns with one entry per row.
        new: columns of the new model.
        old: columns of the other model on the same rows, in the same order.
    Raises: ConfigError if there are no rows, if the models have different numbers of them, or if a
        model lacks the metric.
    """
    found = differences(metrics, new, old, samples=samples, confidence=confidence, seed=seed)
    if metric not in found:
        raise ConfigError(
            f"metric: wanted one that both models have on these rows, got {metric!r}: compare by "
            "another one"
        )
    difference, low, high = found[metric]
    rows = len(next(iter(new.values())))
    return Verdict(bool(high >= 0), metric, difference, low, high, rows)


def differences(
    metrics: Metrics,
    new: Columns,
    old: Columns,
    *,
    samples: int = SAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[str, tuple[float, float, float]]:
    """Return new − old of each metric that both models have, with the ends of its interval by
    paired bootstrap: each draw takes the same rows of both.

    Args: as those of `not_worse`.
    Raises: ConfigError if there are no rows, or if the models have different numbers of them.
    """
    counts = {len(column) for columns in (new, old) for column in columns.values()}
    if len(counts) != 1 or not max(counts):
        raise ConfigError(
            f"wanted answers of both models on the same rows, got {sorted(counts)} rows: "
            "score both on one set of rows"
        )

    def of(rows: np.ndarray) -> dict[str, float]:
        ours, theirs = metrics(_rows_of(new, rows)), metrics(_rows_of(old, rows))
        return {name: ours[name] - theirs[name] for name in ours if name in theirs}

    whole = of(np.arange(max(counts)))
    drawn: dict[str, list[float]] = {name: [] for name in whole}
    for sample in _draws(new, samples, seed):
        # A metric may be missing, as when no row of a rare kind is drawn.
        for name, value in of(sample).items():
            drawn.setdefault(name, []).append(value)
    tail = (1 - confidence) / 2
    found = {}
    for name, value in whole.items():
        if drawn[name]:
            low, high = np.quantile(drawn[name], [tail, 1 - tail])
            found[name] = value, float(low), float(high)
    return found


def _draws(columns: Columns, samples: int, seed: int) -> Iterator[np.ndarray]:
    rows = len(next(iter(columns.values())))
    rng = np.random.default_rng(seed)
    return (rng.integers(rows, size=rows) for _ in range(samples))


def _rows_of(columns: Columns, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in columns.items()}
