"""Reads the curves in a run's record, for all code that draws them.

The seeds of a fine-tuning run are trained one after the other, and their steps follow each other in
the record. Here the seeds are laid over each other, each from its step 0.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from bert_core.data.splits import TRAIN
from tracking.runs.metric_names import CURVES, SYSTEM, is_of_training, on

RECORDS_BESIDE_STEPS = 2
"""Records that a seed has besides those of its steps: before the first, and its result."""
SMOOTH_BEYOND = 100
"""Above this many points a curve is drawn pale, with its running mean over 2 % of them on top."""


@dataclass(frozen=True)
class Curve:
    """A metric over the steps of a run, for each of its seeds."""

    kind: str
    """A kind in `metric_names.CURVES`."""
    name: str
    seeds: list[Float[np.ndarray, "_ 2"]]
    """Steps and values."""

    @property
    def metric(self) -> str:
        """The name of the metric, without the rows it was measured on."""
        return self.name.rpartition("/")[2]

    @property
    def is_of_training(self) -> bool:
        return is_of_training(self.name)

    @property
    def mean(self) -> Float[np.ndarray, "points 2"]:
        """The mean over the seeds, at the steps that all seeds have."""
        steps = set.intersection(*({*seed[:, 0]} for seed in self.seeds))
        kept = [seed[np.isin(seed[:, 0], sorted(steps))] for seed in self.seeds]
        return np.mean(kept, axis=0) if steps else self.seeds[0]

    @property
    def drawn(self) -> tuple[Float[np.ndarray, "points 2"], list[Float[np.ndarray, "_ 2"]]]:
        """The line to draw, and the pale lines behind it: the seeds that it is the mean of, or the
        points that it smooths."""
        mean = self.mean
        # A schedule has no noise to smooth.
        is_smoothed = self.kind != "learning_rate" and len(mean) > SMOOTH_BEYOND
        behind = self.seeds if is_smoothed or len(self.seeds) > 1 else []
        return smoothed(mean) if is_smoothed else mean, behind


def records_per_seed(steps: int) -> int:
    """Return how many steps of the record belong to a seed of `steps` optimizer steps."""
    return steps + RECORDS_BESIDE_STEPS


def steps_done(record: int, steps: int) -> int:
    """Return the optimizer steps up to a record, if each seed has `steps` of them."""
    seed, step = divmod(record, records_per_seed(steps))
    return seed * steps + min(step, steps)


def read_curves(metrics: str | Path, steps_per_seed: int | None = None) -> list[Curve]:
    """Return the curves of a `metrics.jsonl`, in the order in which they are drawn.

    Args:
        steps_per_seed: optimizer steps of each seed, for a run that trained several seeds.
    Raises: FileNotFoundError without `metrics`.
    """
    with open(metrics) as lines:
        return curves_of(
            ((line["step"], line["metrics"]) for line in map(json.loads, lines)), steps_per_seed
        )


def curves_of(
    records: Iterable[tuple[int, Mapping[str, float]]], steps_per_seed: int | None = None
) -> list[Curve]:
    """Return the curves of records in the order of their steps; otherwise as `read_curves`."""
    per_seed = math.inf if steps_per_seed is None else records_per_seed(steps_per_seed)
    points_of: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
    for record, metrics in records:
        seed, step = (0, record) if math.isinf(per_seed) else divmod(record, int(per_seed))
        for name, value in metrics.items():
            kind = _kind(name)
            if kind is not None and math.isfinite(value):
                by_seed = points_of.setdefault((kind, name), defaultdict(list))
                by_seed[seed].append((step, value))
    curves = [
        Curve(kind, name, _seeds(list(by_seed.values())))
        for (kind, name), by_seed in points_of.items()
    ]
    return [curve for kind in CURVES for curve in _shown([c for c in curves if c.kind == kind])]


def smoothed(points: Float[np.ndarray, "points 2"]) -> Float[np.ndarray, "points 2"]:
    """Return the running mean: over fewer points at the left, so that it starts where training
    did."""
    steps, values = points.T
    high = np.arange(1, len(points) + 1)
    low = np.maximum(high - max(len(points) // 50, 5), 0)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.stack([steps, (sums[high] - sums[low]) / (high - low)], axis=1)


def _seeds(points: list[list[tuple[float, float]]]) -> list[Float[np.ndarray, "_ 2"]]:
    """Return the points of each seed; a single result that the stage records at its end is not a
    seed."""
    longest = max(map(len, points))
    return [np.array(each, dtype=float) for each in points if len(each) > 1 or longest == 1]


def _kind(name: str) -> str | None:
    if name.startswith(SYSTEM):  # a node's name may contain anything
        return None
    return next((kind for kind, (_, part) in CURVES.items() if part in name), None)


def _shown(curves: list[Curve]) -> list[Curve]:
    """Return the curves to draw: without duplicates (training metrics also come without a prefix),
    and without final results, which are single points."""
    known = {curve.name for curve in curves}
    longest = max((len(seed) for curve in curves for seed in curve.seeds), default=0)
    shown: list[Curve] = []
    for curve in sorted(curves, key=lambda curve: curve.name.rpartition("/")[::-2]):
        is_longer = longest == 1 or max(map(len, curve.seeds)) > 1
        is_new = not any(_same(curve, other) for other in shown)
        if on(TRAIN, curve.name) not in known and is_longer and is_new:
            shown.append(curve)
    return shown


def _same(a: Curve, b: Curve) -> bool:
    """Whether two curves have the same points, as a loss and its only part do."""
    return len(a.seeds) == len(b.seeds) and all(map(np.array_equal, a.seeds, b.seeds))
