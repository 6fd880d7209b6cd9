"""Bundle + labelled rows → the best of many fine-tunings, on Ray Tune.

Every trial is a `finetune` stage in a separate folder, without held-out rows. This module defines
the trials and handles the best one; `training.trials` runs them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bert_core import files
from bert_core.checks import PositiveInt
from bert_core.data.splits import SELECTION
from bert_core.errors import ConfigError, RaybertError
from bert_core.manifest import BUNDLE, Manifest, Output, read_manifest
from pipelines import finetune
from pipelines.corpus.config import DOCSTRINGS
from pipelines.corpus.labelled import LabelledConfig, labelled_files
from pipelines.finetune import FinetuneConfig
from pipelines.runtime import cluster
from pipelines.runtime.description import MODEL_PAGE, TRIAL_FOLDERS, published_page
from pipelines.runtime.result import SPREAD, Counts, Result, spread
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import REMARK, StageConfig, with_absolute_paths
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.labelled_sets import inputs_of, read_sets
from pipelines.training.selection import Measurement
from pipelines.training.sweep import SweepConfig
from tracking.models.hub import PREFIX
from tracking.models.registry import check_name
from tracking.runs.story import score
from tracking.store.server import tracking_uri

if TYPE_CHECKING:
    from pipelines.training.trials import Outcome

FORMAT_VERSION = 1
TRIALS = "trials.json"
EVALUATION, PUBLICATION = "evaluate", "publish"
"""Subfolders of the sweep for the two stages that the best trial goes through."""
PICTURE = "plots/parallel_coordinates.png"


@dataclass(frozen=True, kw_only=True)
class TuneConfig(LabelledTrainingConfig):
    """The settings that all trials share, the fields that vary, and what happens to the best trial.

    With `num_workers` 0 trials run in this process, one after the other.
    """

    search: SweepConfig = field(default_factory=SweepConfig)
    """Which trials to run."""
    max_concurrent: PositiveInt | None = field(default=None, metadata=REMARK)
    """Maximum number of trials at a time; by default as many as the CPUs, or GPUs, allow."""
    name: str | None = None
    """Name to register the best model under; unset does not register it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.selection.share:
            raise ConfigError(
                "selection.share: wanted above 0, got 0: trials are compared on rows kept out of "
                "training, 0.1 takes a tenth"
            )
        if self.prices_usd:
            raise ConfigError(
                "usd_per_hour, usd_per_node_hour: wanted none for a sweep, whose trials share the "
                "cluster: give a price to a run that has it to itself"
            )
        if self.name is not None:
            check_name(self.name)
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
        """Return the config of each trial; `changes` apply to all.

        Raises: ConfigError if a value of the space is out of range.
        """
        names = [field.name for field in fields(LabelledTrainingConfig)]
        shared = {name: getattr(self, name) for name in names}
        shared |= {"held_out": None, "num_workers": 0, "force": False, "wait": True} | changes
        trials = []
        for number, varied in enumerate(self.search.trials()):
            output = files.join(self.output, TRIAL_FOLDERS, f"{number:03d}")
            try:
                trials.append(FinetuneConfig(**shared | varied | {"output": output}))
            except ConfigError as error:
                raise ConfigError(f"search.space: {error}") from None
        return trials


@dataclass(frozen=True, kw_only=True)
class TuneCounts(Counts):
    trials: int
    states: Mapping[str, int] = field(metadata=SPREAD)
    """Trials by how they ended."""
    best: int
    """Number of the best trial."""
    parameters: Mapping[str, float]
    """Parameters of the best trial."""
    metric: str
    score: float
    """Score of the best trial on the selection rows."""
    held_out: Mapping[str, Any] = field(metadata=spread("held_out_{}"))
    """Metrics of the best trial on held-out rows, if there are any."""
    version: str | None = None
    """In the registry, as what follows; None if the best was not registered."""
    is_champion: bool | None = None
    why: str | None = None

    def entries(self) -> dict[str, Any]:
        counts = super().entries()
        return {f"{SELECTION}_{counts.pop('metric')}": counts.pop("score")} | counts

    @property
    def line(self) -> str:
        chosen = ", ".join(f"{name} {value:g}" for name, value in self.parameters.items())
        return f"best of {self.trials}: {score(self.metric, self.score)}, {chosen}"

    @property
    def sentence(self) -> str:
        return f"Trial {self.best} is the {self.line}."


def run(config: TuneConfig) -> Manifest:
    """Train every trial, and take the one that does best on the selection rows."""
    folder, inputs = inputs_of(config)
    # A trial may run on a machine that has to fetch a model of the hub for itself.
    [source] = [PREFIX + each.source for each in inputs if each.asked] or [str(folder.absolute())]
    digests = {each.name: each.digest for each in inputs}
    return run_stage("tune", config, inputs, lambda _: _tune(config, folder, source, digests))


def _tune(config: TuneConfig, folder: Path, model: str, digests: Mapping[str, str]) -> Result:
    from bert_core.tasks.catalog import TASKS
    from tracking.models.hub import load_bundle

    if config.held_out is not None:
        # The trials do not read these rows, so an error in them would appear only at the end.
        first = config.trials()[0]
        read_sets(replace(first, held_out=config.held_out), load_bundle(folder))
    if config.num_workers:
        cluster.connect(  # before Ray is imported
            address=config.address,
            num_cpus=config.cpus,
            allow_open_cluster=config.allow_open_cluster,
        )
    from pipelines.training import trials
    from tracking.runs.plots import plot_parallel_coordinates
    from tracking.runs.spool import read_run

    recorded = read_run(config.local_folder)
    parent = recorded.run_id if recorded else None
    # Trials run later and in other folders, so their inputs are fixed here.
    absolute = with_absolute_paths(config)
    trial_configs = absolute.trials(
        model=model,
        train=_settled(config.train),
        tracking_uri=tracking_uri(config.tracking_uri),
        parent_run=parent,
    )
    sign = config.selection.sign(TASKS[config.task])
    outcomes = trials.run_trials(
        partial(_train_trial, digests),
        trial_configs,
        config.search,
        output=absolute.output,
        on_ray=config.num_workers != 0,
        max_concurrent=config.max_concurrent,
        title="best score",
        sign=sign,
    )
    best = _best(outcomes)
    trained = read_manifest(trial_configs[best].output)
    metric = config.selection.named(_selected_by(trained.counts)) or str(
        trained.counts["primary_metric"]
    )
    table = _table(config, outcomes, sign)
    outputs = _copy_bundle(trial_configs[best].output, config.output)
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
    states = [row["state"] for row in table]
    counts = TuneCounts(
        trials=len(table),
        states={state: states.count(state) for state in get_args(trials.State)},
        best=best,
        parameters=table[best]["parameters"],
        metric=metric,
        score=table[best]["score"],
        held_out={},
    )
    if config.held_out is not None:
        counts = _measured(config, parent, counts)
    pages = {}
    if config.name is not None and counts.version is not None:
        pages[MODEL_PAGE] = published_page(config.name, counts.version)
    return Result(
        outputs={TRIALS: Output.of(path), **outputs},
        counts=counts,
        artifacts=[picture],
        pages=pages,
    )


def _selected_by(counts: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics on the selection rows, from the counts of a trial."""
    first, last = f"{SELECTION}_", "_mean"
    names = [name for name in counts if name.startswith(first) and name.endswith(last)]
    return [name.removeprefix(first).removesuffix(last) for name in names]


def _train_trial(
    digests: Mapping[str, str], trial: FinetuneConfig, watch: Callable[[Measurement], None]
) -> None:
    """Train a trial, if the inputs are still those that the sweep began with.

    Raises: RaybertError if they have changed since: trials would be compared on different rows.
    """
    for each in inputs_of(trial)[1]:
        if each.digest != digests[each.name]:
            raise RaybertError(
                f"{each.source}: wanted the same contents for every trial, it has changed since "
                "the sweep began: put the old contents back and run the same command again, give "
                "another output, or --force to start over"
            )
    finetune.run(trial, watch)


def _settled(rows: LabelledConfig) -> LabelledConfig:
    """Return the training rows' config with absolute paths, for trials that run in another
    folder."""
    if rows.source == DOCSTRINGS:
        [path] = labelled_files(rows, "train")
        return replace(rows, source=files.absolute(path), split=None)
    return replace(rows, source=files.absolute(rows.source))


def _table(config: TuneConfig, outcomes: "Sequence[Outcome]", sign: int) -> list[dict[str, Any]]:
    return [
        {
            "trial": number,
            "parameters": varied,
            "state": outcome.state,
            "score": None if outcome.cost is None else sign * outcome.cost,
            "steps": outcome.steps,
        }
        for number, (varied, outcome) in enumerate(
            zip(config.search.trials(), outcomes, strict=True)
        )
    ]


def _best(outcomes: "Sequence[Outcome]") -> int:
    """Return the number of the best trial among those that finished; ties go to the first.

    Raises: RaybertError if there is none.
    """
    finished = [number for number, trial in enumerate(outcomes) if trial.state == "finished"]
    if not any(outcomes[number].cost is not None for number in finished):
        raise RaybertError(
            f"tune: wanted a trial with a score, got none of {len(outcomes)}: lower the learning "
            "rates in search.space.lr"
        )
    costs = {number: outcomes[number].cost for number in finished}
    return min(finished, key=lambda number: math.inf if (c := costs[number]) is None else c)


def _copy_bundle(trial: str, output: str) -> dict[str, Output]:
    """Copy the bundle from the output of a trial to that of the sweep."""
    files.remove(files.join(output, BUNDLE))  # left by a run that was killed after writing
    outputs = {}
    for name in read_manifest(trial).outputs:
        if name.startswith(f"{BUNDLE}/"):
            copy = files.join(output, name)
            files.write_bytes(copy, files.read_bytes(files.join(trial, name)))
            outputs[name] = Output.of(copy)
    return outputs


def _measured(config: TuneConfig, parent: str | None, counts: TuneCounts) -> TuneCounts:
    """Measure the best model once on the held-out rows, and register it if configured."""
    from pipelines import evaluate, publish

    assert config.held_out is not None
    shared = {field.name: getattr(config, field.name) for field in fields(StageConfig)}
    shared |= {"model": files.join(config.output, BUNDLE), "parent_run": parent, "force": False}
    shared |= {"wait": True}  # a killed run's lease must expire first
    evaluation = files.join(config.output, EVALUATION)
    scored = evaluate.run(
        evaluate.EvaluateConfig(**shared | {"output": evaluation, "held_out": config.held_out})
    ).counts
    held_out = {name: value for name, value in scored.items() if name != "seconds"}
    counts = replace(counts, held_out=held_out)
    if config.name is None:
        return counts
    output = files.join(config.output, PUBLICATION)
    published = publish.run(
        publish.PublishConfig(
            **shared | {"output": output, "evaluation": evaluation, "name": config.name}
        )
    ).counts
    registered = {name: published[name] for name in ("version", "is_champion", "why")}
    return replace(counts, **registered)
