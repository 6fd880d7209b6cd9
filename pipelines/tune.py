"""Bundle + labelled rows → the best of many fine-tunings, on Ray Tune.

Every trial is a `finetune` stage in a folder of its own, without held-out rows. This module says
which trials there are and what becomes of the best; `training.trials` runs them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bert_core import files
from bert_core.checks import PositiveInt
from bert_core.errors import ConfigError, RaybertError
from bert_core.manifest import BUNDLE, Manifest, Output, read_manifest
from pipelines import finetune
from pipelines.corpus.labelled import LabelledConfig, labelled_files
from pipelines.finetune import FinetuneConfig
from pipelines.runtime import cluster
from pipelines.runtime.progress import say
from pipelines.runtime.stage import (
    REMARK,
    Result,
    StageConfig,
    run_stage,
    with_absolute_paths,
)
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.labelled_sets import inputs_of
from pipelines.training.sweep import SweepConfig
from tracking.server import tracking_uri

if TYPE_CHECKING:
    from pipelines.training.trials import Outcome

FORMAT_VERSION = 1
TRIALS = "trials.json"
EVALUATION, PUBLICATION = "evaluate", "publish"
"""Folders of the two stages that the best trial goes through, in that of the sweep."""
PICTURE = "plots/parallel_coordinates.png"


@dataclass(frozen=True, kw_only=True)
class TuneConfig(LabelledTrainingConfig):
    """What all trials share, in which fields they differ, and what becomes of the best.

    With `num_workers` 0 trials run in this process, one after the other.
    """

    search: SweepConfig = field(default_factory=SweepConfig)
    """Which trials there are."""
    max_concurrent: PositiveInt | None = field(default=None, metadata=REMARK)
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
        shared = {one.name: getattr(self, one.name) for one in fields(LabelledTrainingConfig)}
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
    from bert_core.tasks.catalog import TASKS

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
    outcomes = trials.run_trials(
        finetune.run,
        made,
        config.search,
        output=absolute.output,
        on_ray=config.num_workers != 0,
        max_concurrent=config.max_concurrent,
        title="best score",
        sign=sign,
    )
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
