"""What a user can set, and how far it moves the point where a run stops scaling. Likely values."""

from dataclasses import dataclass, replace

from benchmarks.scaling.inputs import Values
from benchmarks.scaling.training import (
    GPU_COUNTS,
    RECIPES,
    Recipe,
    failures_of,
    ideal_s,
    training_s,
)

BATCHES = (256, 1_024, 4_096, 16_384, 65_536)
SLOW_NETWORK_BYTES_PER_S = 100e9 / 8 / 8
"""Per GPU, where eight share 100 Gbit/s, as on most machines that are not sold as a cluster."""
INTERVALS_S = (60, 300, 1_800)
INTERVAL_GPUS = (8, 64, 256, 1_024)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How many GPUs a global batch keeps busy."""

    variant: str
    rows: int
    gpus_at_80: int
    """Most GPUs, of powers of two, that reach 80 % of the ideal speed."""
    gpus_at_50: int
    gpus_at_80_slow_network: int


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Goodput by the time between two checkpoints of BERT-large."""

    gpus: int
    spot: bool
    best_s: float
    best: float
    """With checkpoints `best_s` apart."""
    fixed: dict[int, float]
    """Seconds between checkpoints → goodput."""


def efficiency(recipe: Recipe, gpus: int, values: Values) -> float:
    """The ideal time over the time without failures."""
    return ideal_s(recipe, gpus, values) / training_s(recipe, gpus, values)


def batches() -> list[Batch]:
    """BERT-base and large, by the rows of a global batch of both phases."""
    likely = Values()
    slow = replace(likely, network_bytes_per_s=SLOW_NETWORK_BYTES_PER_S)
    return [
        Batch(
            variant=variant,
            rows=rows,
            gpus_at_80=_most(variant, rows, 0.8, likely),
            gpus_at_50=_most(variant, rows, 0.5, likely),
            gpus_at_80_slow_network=_most(variant, rows, 0.8, slow),
        )
        for variant in ("bert-base", "bert-large")
        for rows in BATCHES
    ]


def _most(variant: str, rows: int, share: float, values: Values) -> int:
    recipe = RECIPES[variant].with_batch(rows)
    return max(
        (gpus for gpus in GPU_COUNTS if efficiency(recipe, gpus, values) >= share), default=0
    )


def intervals() -> list[Interval]:
    """On demand and on spot machines."""
    rows = []
    for spot in (False, True):
        for gpus in INTERVAL_GPUS:
            best = failures_of("bert-large", gpus, Values(), spot=spot)
            rows.append(
                Interval(
                    gpus=gpus,
                    spot=spot,
                    best_s=best.interval_s,
                    best=best.goodput,
                    fixed={each: replace(best, interval_s=each).goodput for each in INTERVALS_S},
                )
            )
    return rows
