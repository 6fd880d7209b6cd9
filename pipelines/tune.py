"""Bundle + labelled rows → the best of many fine-tunings, on Ray Tune.

Every trial is a `finetune` stage in a folder of its own, without held-out rows. This module says
which trials there are and what becomes of the best; `pipelines.training.trials` runs them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from bert_core import files
from bert_core.errors import ConfigError, RaybertError
from bert_core.manifest import BUNDLE, Manifest, Output, read_manifest
from pipelines.corpus.sources import LabelledConfig, labelled_files
from pipelines.finetune import FinetuneConfig
from pipelines.runtime import cluster
from pipelines.runtime.config_errors import nearest
from pipelines.runtime.progress import say
from pipelines.runtime.stage import (
    REMARK,
    Result,
    StageConfig,
    operational_fields,
    run_stage,
    with_absolute_paths,
)
from pipelines.training.labelled_sets import inputs_of
from tracking.runs import tracking_uri

if TYPE_CHECKING:
    from pipelines.training.trials import Outcome

FORMAT_VERSION = 1
TRIALS = "trials.json"
EVALUATION, PUBLICATION = "evaluate", "publish"
"""Folders of the two stages that the best trial goes through, in that of the sweep."""
PICTURE = "plots/parallel_coordinates.png"

Method = Literal["grid", "random", "asha"]
SEARCHED: dict[str, Any] = {
    one.name: one.type
    for one in fields(FinetuneConfig)
    if one.type in (int, float) and one.name not in operational_fields(FinetuneConfig)
}
"""Fields that trials may differ in, and their types."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Which trials there are. Default: the grid of Devlin et al. 2019, appendix A.3."""

    method: Method = "grid"
    """`grid` tries all combinations; `random` draws some; `asha` draws and ends those early that do
    worse than others did by then (Li et al. 2020)."""
    space: dict[str, Any] = field(
        default_factory=lambda: {
            "batch_size": [16, 32],
            "lr": [5e-5, 3e-5, 2e-5],
            "epochs": [2.0, 3.0, 4.0],
        }
    )
    """Field of fine-tuning → the values to try, or to draw from: `{lr = [5e-5, 3e-5]}`; where they
    are drawn also a range, `{lr = {low = 1e-5, high = 1e-3, log = true}}`."""
    num_samples: int = 16
    """How many trials are drawn."""
    seed: int = 0
    """Of the draws."""
    grace_epochs: float = 1.0
    """No trial ends earlier by `asha`."""
    reduction_factor: float = 3.0
    """`asha` lets one of so many go on, after the grace and whenever they have trained for so many
    times as long."""

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            wanted = ", ".join(get_args(Method))
            raise ConfigError(f"search.method: wanted one of {wanted}, got {self.method!r}")
        if self.num_samples < 1:
            raise ConfigError(f"search.num_samples: wanted at least 1, got {self.num_samples}")
        if not self.grace_epochs > 0:
            raise ConfigError(f"search.grace_epochs: wanted above 0, got {self.grace_epochs}")
        if not self.reduction_factor > 1:
            raise ConfigError(
                f"search.reduction_factor: wanted above 1, got {self.reduction_factor}"
            )
        if not self.space:
            raise ConfigError("search.space: wanted a field to vary at least, got none")
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
                f"{where}: wanted a range of low and high, and log where it is to be drawn by "
                f"magnitude, got {', '.join(values) or 'nothing'}"
            )
        if not isinstance(values.get("log", False), bool):
            raise ConfigError(f"{where}.log: wanted true or false, got {values['log']!r}")

    def trials(self) -> list[dict[str, int | float]]:
        """The fields in which each trial differs from what all share; the same at every call."""
        if self.method == "grid":
            return [
                {name: SEARCHED[name](value) for name, value in zip(self.space, each, strict=True)}
                for each in product(*self.space.values())
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
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            wanted = "whole numbers" if kind is int else "numbers"
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


@dataclass(frozen=True, kw_only=True)
class TuneConfig(FinetuneConfig):
    """What all trials share, in which fields they differ, and what becomes of the best.

    With `num_workers` 0 trials run in this process, one after the other.
    """

    search: SearchConfig = field(default_factory=SearchConfig)
    """Which trials there are."""
    max_concurrent: int | None = field(default=None, metadata=REMARK)
    """Most trials at a time; as many as there are CPUs, or GPUs, for where this is not given."""
    name: str | None = None
    """The best model is registered by this name, where it is given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.selection.share:
            raise ConfigError(
                "selection.share: wanted above 0, got 0: trials are compared on training rows "
                "that are kept out, 0.1 takes a tenth"
            )
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ConfigError(f"max_concurrent: wanted at least 1, got {self.max_concurrent}")
        if self.name is not None and self.held_out is None:
            raise ConfigError(
                f"name: wanted held_out too, whose rows decide whether {self.name} is the "
                "champion: give it, or leave the name out"
            )
        longest = max(trial.epochs for trial in self.trials())
        if self.search.method != "asha":
            return
        if not self.search.grace_epochs < longest:
            raise ConfigError(
                f"search.grace_epochs: wanted below the {longest:g} epochs of the longest trial, "
                f"got {self.search.grace_epochs:g}"
            )
        if len(self.seeds) > 1:
            raise ConfigError(f"seeds: wanted one with asha, got {len(self.seeds)}")
        if self.num_workers == 0:
            raise ConfigError("num_workers: wanted at least 1 with asha, got 0")

    def trials(self, **changes: Any) -> list[FinetuneConfig]:
        """The training of each trial, with fields changed that are alike in all.

        Raises: ConfigError if a value of the space is out of range.
        """
        shared = {one.name: getattr(self, one.name) for one in fields(FinetuneConfig)}
        shared |= {"held_out": None, "num_workers": 0, "force": False} | changes
        trials = []
        for number, varied in enumerate(self.search.trials()):
            output = files.join(self.output, "trials", f"{number:03d}")
            try:
                trials.append(FinetuneConfig(**shared | varied | {"output": output}))
            except ConfigError as error:
                raise ConfigError(f"search.space: {error}") from None
        return trials


def run(config: TuneConfig) -> Manifest:
    """Train every trial, and take the one that does best on training rows kept out of all."""
    folder, inputs = inputs_of(config)
    return run_stage("tune", config, inputs, lambda _: _tune(config, folder))


def _tune(config: TuneConfig, folder: Path) -> Result:
    from bert_core.tasks.registry import TASKS

    if config.num_workers:
        cluster.connect(  # before Ray is imported
            address=config.address,
            num_cpus=config.cpus,
            allow_open_cluster=config.allow_open_cluster,
        )
    from pipelines.training import trials
    from tracking.plots import plot_parallel_coordinates
    from tracking.spool import read_run

    own = read_run(config.local_folder)
    parent = own.run_id if own else None
    # Trials run in other folders, and later: what they read is settled here.
    absolute = with_absolute_paths(config)
    made = absolute.trials(
        model=str(folder.absolute()),
        train=_settled(config.train),
        tracking_uri=tracking_uri(config.tracking_uri),
        parent_run=parent,
    )
    sign = config.selection.sign(TASKS[config.task])
    outcomes = trials.run_trials(made, absolute, "best score", sign)
    best = _best(outcomes)
    trained = read_manifest(made[best].output)
    metric = config.selection.metric or str(trained.counts["primary_metric"])
    table = _table(config, outcomes, sign)
    outputs = _copy_bundle(made[best], config)
    path = files.join(config.output, TRIALS)
    written = {"format_version": FORMAT_VERSION, "metric": metric, "best": best, "trials": table}
    files.write_json(path, written)
    measured = [row for row in table if row["score"] is not None]
    picture = plot_parallel_coordinates(
        {name: [row["parameters"][name] for row in measured] for name in config.search.space}
        | {metric: [row["score"] for row in measured]},
        config.local_folder / PICTURE,
        lower_is_better=sign > 0,
    )
    chosen, score = table[best]["parameters"], table[best]["score"]
    say(
        f"tune: trial {best} of {len(table)} is the best, {metric} {score:.4g} on training rows "
        f"that all did without: {', '.join(f'{name} {value:g}' for name, value in chosen.items())}"
    )
    states = [row["state"] for row in table]
    counts = {
        "trials": len(table),
        **{state: states.count(state) for state in get_args(trials.State)},
        "best": best,
        "parameters": chosen,
        f"selection_{metric}": score,
        **_score(config, parent),
    }
    return Result(outputs={TRIALS: Output.of(path), **outputs}, counts=counts, artifacts=[picture])


def _settled(rows: LabelledConfig) -> LabelledConfig:
    """The same training rows, whatever folder a trial runs in."""
    paths = labelled_files(rows, "train")
    if len(paths) == 1:
        return replace(rows, source=files.absolute(paths[0]), split=None)
    return replace(rows, source=files.absolute(rows.source))


def _table(config: TuneConfig, outcomes: "Sequence[Outcome]", sign: int) -> list[dict[str, Any]]:
    return [
        {
            "trial": number,
            "parameters": varied,
            "state": one.state,
            "score": None if one.cost is None else sign * one.cost,
            "steps": one.steps,
        }
        for number, (varied, one) in enumerate(zip(config.search.trials(), outcomes, strict=True))
    ]


def _best(outcomes: "Sequence[Outcome]") -> int:
    """Which trial is taken: the best of those that trained to their end, the first of equals.

    Raises: RaybertError if there is none.
    """
    finished = [number for number, one in enumerate(outcomes) if one.state == "finished"]
    if not any(outcomes[number].cost is not None for number in finished):
        raise RaybertError(
            f"tune: wanted a trial that comes to a score, none of {len(outcomes)} did: lower the "
            "learning rates of search.space.lr"
        )
    costs = {number: outcomes[number].cost for number in finished}
    return min(finished, key=lambda number: math.inf if (c := costs[number]) is None else c)


def _copy_bundle(trial: FinetuneConfig, config: TuneConfig) -> dict[str, Output]:
    files.remove(files.join(config.output, BUNDLE))  # of a run that was killed after writing it
    outputs = {}
    for name in read_manifest(trial.output).outputs:
        if name.startswith(f"{BUNDLE}/"):
            copy = files.join(config.output, name)
            files.write_bytes(copy, files.read_bytes(files.join(trial.output, name)))
            outputs[name] = Output.of(copy)
    return outputs


def _score(config: TuneConfig, parent: str | None) -> dict[str, Any]:
    """Measure the best model on the held-out rows, once, and register it; each where asked for."""
    from pipelines import evaluate, publish

    if config.held_out is None:
        return {}
    shared = {one.name: getattr(config, one.name) for one in fields(StageConfig)}
    shared |= {"model": files.join(config.output, BUNDLE), "parent_run": parent, "force": False}
    evaluation = files.join(config.output, EVALUATION)
    scored = evaluate.run(
        evaluate.EvaluateConfig(**shared | {"output": evaluation, "held_out": config.held_out})
    ).counts
    counts = {f"held_out_{name}": value for name, value in scored.items() if name != "seconds"}
    if config.name is None:
        return counts
    output = files.join(config.output, PUBLICATION)
    published = publish.run(
        publish.PublishConfig(
            **shared | {"output": output, "evaluation": evaluation, "name": config.name}
        )
    ).counts
    return counts | {name: published[name] for name in ("version", "is_champion", "why")}
