"""Defines the trials of a sweep: which fields of fine-tuning they vary, and over which values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np

from bert_core.checks import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    base_type,
    check_fields,
)
from bert_core.errors import ConfigError
from bert_core.wording import nearest
from pipelines.runtime.stage_config import operational_fields
from pipelines.training.config import LabelledTrainingConfig

Method = Literal["grid", "random", "asha"]
SEARCHED: dict[str, Any] = {
    item.name: base_type(item.type)
    for item in fields(LabelledTrainingConfig)
    if base_type(item.type) in (int, float)
    and item.name not in operational_fields(LabelledTrainingConfig)
}
"""Fields that trials may vary, and their types."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Which trials to run. Default: the grid of Devlin et al. 2019, appendix A.3."""

    method: Method = "grid"
    """`grid` tries all combinations; `random` draws some; `asha` draws some and stops those early
    that do worse than others at the same point (Li et al. 2020)."""
    space: dict[str, Any] = field(
        default_factory=lambda: {
            "batch_size": [16, 32],
            "lr": [5e-5, 3e-5, 2e-5],
            "epochs": [2.0, 3.0, 4.0],
        }
    )
    """Field of fine-tuning → the values to try or draw from, `{lr = [5e-5, 3e-5]}`; for `random`
    and `asha` also a range, `{lr = {low = 1e-5, high = 1e-3, log = true}}`."""
    num_samples: PositiveInt = 16
    """Number of trials drawn by `random` and `asha`."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""
    grace_epochs: PositiveFloat = 1.0
    """Epochs before `asha` may stop a trial."""
    reduction_factor: Annotated[float, Range(above=1)] = 3.0
    """At each rung `asha` continues one trial in this many; the first rung is after the grace
    epochs, each next one after this many times as long."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="search.")
        if not self.space:
            raise ConfigError("search.space: wanted at least one field to vary, got none")
        for name, values in self.space.items():
            if name not in SEARCHED:
                raise ConfigError(
                    f"search.space: wanted fields among {', '.join(SEARCHED)}, got {name!r}"
                    f"{nearest(name, SEARCHED)}"
                )
            if isinstance(values, Mapping):
                self._check_range(f"search.space.{name}", values)
            elif not isinstance(values, list | tuple) or not values:
                raise ConfigError(
                    f"search.space.{name}: wanted a list of values, or a range of low and high, "
                    f"got {values!r}"
                )
            _check_numbers(name, values)

    def _check_range(self, where: str, values: Mapping[str, Any]) -> None:
        if self.method == "grid":
            raise ConfigError(
                f"{where}: wanted a list of values for a grid, got a range: give a list, or "
                'search.method = "random"'
            )
        if not {"low", "high"} <= values.keys() <= {"low", "high", "log"}:
            raise ConfigError(
                f"{where}: wanted a range of low and high, and log to draw on a logarithmic scale, "
                f"got {', '.join(values) or 'nothing'}"
            )
        if not isinstance(values.get("log", False), bool):
            raise ConfigError(f"{where}.log: wanted true or false, got {values['log']!r}")

    def trials(self) -> list[dict[str, int | float]]:
        """Return the varied fields of each trial, with their values; the same at every call."""
        if self.method == "grid":
            # Sorted, since a resumed run may name them in another order.
            names = sorted(self.space)
            return [
                {name: SEARCHED[name](value) for name, value in zip(names, point, strict=True)}
                for point in product(*(self.space[name] for name in names))
            ]
        return [
            {
                name: _drawn(name, self.space[name], rng)
                for rng in [np.random.default_rng([self.seed, number])]
                for name in sorted(self.space)
            }
            for number in range(self.num_samples)
        ]


def _check_numbers(name: str, values: Any) -> None:
    kind, where = SEARCHED[name], f"search.space.{name}"
    ends = isinstance(values, Mapping)
    for value in [values["low"], values["high"]] if ends else values:
        is_number = isinstance(value, int if kind is int else (int, float))
        if isinstance(value, bool) or not is_number or not math.isfinite(value):
            wanted = "whole numbers" if kind is int else "finite numbers"
            raise ConfigError(f"{where}: wanted {wanted}, got {value!r}")
    if ends and not values["low"] < values["high"]:
        raise ConfigError(
            f"{where}: wanted low below high, got {values['low']} and {values['high']}"
        )
    if ends and values.get("log", False) and not values["low"] > 0:
        raise ConfigError(f"{where}: wanted low above 0 with log, got {values['low']}")


def _drawn(name: str, values: Any, rng: np.random.Generator) -> int | float:
    kind = SEARCHED[name]
    if not isinstance(values, Mapping):
        return kind(values[rng.integers(len(values))])
    low, high = values["low"], values["high"]
    if values.get("log", False):
        number = math.exp(rng.uniform(math.log(low), math.log(high)))
        return kind(min(max(round(number) if kind is int else number, low), high))
    return int(rng.integers(low, high + 1)) if kind is int else float(rng.uniform(low, high))
