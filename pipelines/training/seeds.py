"""Trains a task once per seed: shared by `finetune` and `distill`.

`learn` runs in the driver, `train_seeds` in each worker.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bert_core import files
from bert_core.data.splits import HELD_OUT, SELECTION, TRAIN
from bert_core.tasks.digests import Digests
from bert_core.train.config import LoopConfig, ScheduleConfig
from bert_core.wording import without_secrets
from pipelines.runtime.progress import SEEN, counted, say
from pipelines.runtime.result import SPREAD, Result, spread
from pipelines.training.classes import ClassesConfig, class_loss, class_order
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.decisions import Decisions, tell
from pipelines.training.driver import TrainingCounts, finished, fit, write_bundle
from pipelines.training.labelled_sets import LabelledSet, remarks_of, shown_rows, trained_rows
from pipelines.training.records import CHECKPOINTS, Records, Report, median_speed, read_records
from pipelines.training.selection import Measurement
from tracking.runs import metric_names as names
from tracking.runs.curves import records_per_seed
from tracking.runs.metric_names import TASK
from tracking.runs.story import figure, score

if TYPE_CHECKING:
    from bert_core.data.tokenizer import Tokenizer
    from bert_core.data.windows import Window
    from bert_core.model.config import EncoderConfig
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.objectives.class_loss import ClassLoss
    from bert_core.tasks.base import Task
    from pipelines.training.labelled_batches import LabelledRank

SMALL_LR = 1e-3
"""A learning rate that small encoders take."""
SELECTED_STEP = "selected_step"
"""Key in the record of a seed's result: the step whose weights were selected."""


@dataclass(frozen=True)
class TrainableTask:
    """A task and the model that learns it; every rank has a copy."""

    task: "Task"
    tokenizer: "Tokenizer"
    encoder_config: "EncoderConfig"
    build: Callable[[int], "ObjectiveModel"]
    """Builds the initial model of a seed."""
    trained_rows: Digests
    """Digests of the rows that these weights, and those of a teacher, have seen before."""
    loss: "ClassLoss | None" = None
    """The loss of its head, if its rows have classes; None is the usual one."""
    answers: bool = True
    """Whether its head learns; if not, the bundle is not for any task."""

    def weighing(self, classes: ClassesConfig, windows: "Sequence[Window]") -> "TrainableTask":
        """Return it with the loss for training on these windows. Raises: ConfigError or CorpusError
        if what `classes` asks for does not fit them."""
        if self.task.classes_in is None:
            return self
        class_order(classes, self.task, windows, 0)  # fails now rather than in a worker
        return replace(self, loss=class_loss(classes, self.task, windows))

    def check_frozen(self, config: LabelledTrainingConfig) -> None:
        """Raise ConfigError if the part of the encoder that `config` freezes cannot be frozen, or
        it cannot have the adapter that `config` asks for."""
        from bert_core.model.layers import without_values
        from bert_core.train.adapting import check_adapter
        from bert_core.train.freezing import check_frozen

        with without_values():
            objective = self.task.build_objective(self.encoder_config)
        check_frozen(self.encoder_config, config.freeze, config.freeze_layers, objective)
        if config.adapter is not None:
            check_adapter(self.encoder_config, config.adapter, objective)

    def built(self, seed: int, config: LabelledTrainingConfig) -> "ObjectiveModel":
        """Build the initial model of a seed, with its loss, its frozen parts and its adapter."""
        from bert_core.train.adapting import adapt
        from bert_core.train.freezing import freeze

        model = self.build(seed)
        freeze(model, config.freeze, config.freeze_layers)
        if config.adapter is not None:
            adapt(model, config.adapter)
        if self.loss is not None:
            for objective in model.objectives.values():
                setattr(objective, "loss", self.loss)  # noqa: B010  # not a module nor a tensor
        return model


@dataclass(frozen=True, kw_only=True)
class SeedsCounts(TrainingCounts):
    """Counts of a stage that trains a model per seed on labelled rows."""

    how: ClassVar[str] = "Fine-tuned"

    remarks: Mapping[str, int | str] = field(metadata=SPREAD)
    """Rows that were changed, left out or seen before."""
    train_rows: int
    selection_rows: int | None = None
    held_out_rows: int | None = None
    labels: int
    seeds: list[dict[str, float]]
    """Metrics of each seed."""
    primary_metric: str | None = None
    """None if the head was not trained."""
    means: Mapping[str, float] = field(metadata=spread("{}_mean"))
    """Over the seeds; those of metrics on selection rows begin with `selection_`."""
    deviations: Mapping[str, float] = field(metadata=spread("{}_std"))
    baseline: Mapping[str, float] = field(metadata=spread("baseline_{}"))
    """Metrics of the best answer that ignores the input, as far as the task has them."""

    @property
    def steps_per_seed(self) -> int | None:
        return self.steps if len(self.seeds) > 1 else None

    @property
    def given_rows(self) -> int:
        """Return the number of training rows that people labelled."""
        return self.train_rows

    def _score(self, prefix: str) -> str | None:
        """Word the main metric on some rows, with its deviation; None if it was not measured."""
        key = f"{prefix}{self.primary_metric}"
        if self.primary_metric is None or key not in self.means:
            return None
        value = score(self.primary_metric, self.means[key])
        if len(self.seeds) == 1:
            return value
        return f"{value} ± {figure(self.primary_metric, self.deviations[key])}"

    @property
    def line(self) -> str:
        seeds = f", {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        if (held_out := self._score("")) is not None:
            return f"{held_out}{seeds}"
        if (selected := self._score(f"{SELECTION}_")) is not None:
            return f"{selected} on the selection rows{seeds}"
        return f"{counted(self.steps, 'step')} on {counted(self.train_rows, 'row')}{seeds}"

    @property
    def sentence(self) -> str:
        trained = f"{self.how} on {counted(self.given_rows, 'labelled row')}"
        over = f" over {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        if (held_out := self._score("")) is not None:
            main, than = str(self.primary_metric), ""
            if main in self.baseline:
                than = f" (without reading the text: {figure(main, self.baseline[main])})"
            held_out_rows = self.held_out_rows or 0
            rows = f"{counted(held_out_rows, 'row')} it has not seen"
            if seen := self.remarks.get(f"{HELD_OUT}_{SEEN}"):
                rows = f"{counted(held_out_rows, 'held-out row')}, {seen:,} of which it has seen"
            return f"{trained}, it reaches {held_out}{over} on {rows}{than}."
        if (selected := self._score(f"{SELECTION}_")) is not None:
            return f"{trained}, it reaches {selected}{over} on the rows that selected it."
        return f"{trained}; no rows were kept to measure it on."


def learn(
    config: LabelledTrainingConfig,
    trainable: TrainableTask,
    sets: dict[str, LabelledSet],
    lineage: dict[str, Any],
    digest: str,
    watch: Callable[[Measurement], None] | None = None,
) -> Result[SeedsCounts]:
    """Train one model per seed, and write the bundle of the first.

    Args:
        lineage: that of the bundle; its `stage` names the stage that made it.
    """
    from bert_core.train.checkpoint import checkpoint_at

    task, stage = trainable.task, lineage["stage"]
    trainable = trainable.weighing(config.classes, sets[TRAIN].windows)
    trainable.check_frozen(config)
    trained_on = np.union1d(trainable.trained_rows, trained_rows(task, sets))
    remarks = remarks_of(stage, config, task, sets, trained_on)
    steps = config.steps(len(sets[TRAIN].windows))
    total = _records_before(len(config.seeds), steps)
    fit(
        partial(train_seeds, trainable, sets),
        config,
        digest,
        LoopConfig(max_steps=total),
        stage,
        steps,
        None if watch is None else partial(_show, config, task, len(sets[TRAIN].windows), watch),
    )
    records = read_records(config.local_folder)
    seeds = [_measured(records, index, steps) for index in range(len(config.seeds))]
    if not trainable.answers:  # its head was not trained
        seeds = [{"steps": seed["steps"]} for seed in seeds]
    selected_step = round(seeds[0]["steps"])
    values = {name: np.array([seed[name] for seed in seeds]) for name in seeds[0]}
    main = task.main_metric({name.removeprefix(f"{SELECTION}_") for name in values})
    decisions = Decisions()
    if config.selection.decides:
        decisions = Decisions.read(files.join(config.output, _decisions(0)))
        tell(stage, decisions)
        task = decisions.of(task)
    outputs = write_bundle(
        config,
        digest,
        trainable.built(config.seeds[0], config),
        trainable.tokenizer,
        finish=decisions.scale,
        task=task if trainable.answers else None,
        metrics={name: value for name, value in seeds[0].items() if name != "steps"},
        lineage=lineage,
        trained_rows=trained_on,
        examples=shown_rows(task, sets, config.examples) if trainable.answers else (),
        checkpoint=checkpoint_at(files.join(config.output, _checkpoints(0)), selected_step),
        base=without_secrets(config.model),
    )
    baseline = task.baseline(sets[HELD_OUT].rows) if HELD_OUT in sets else {}
    for name in (main, task.error_metric):
        blind = None if name is None else baseline.get(name)
        if name is None or blind is None:
            continue
        if name == task.error_metric:
            say(
                f"{stage}: {score(name, values[name].mean())}, in the unit of the rows; always "
                f"giving their mean has {figure(name, blind)}"
            )
        if not _has_learnt_little(task, name, float(values[name].mean()), blind):
            continue
        say(
            f"{stage}: an answer that ignores the input has {score(name, blind)}, so little was "
            f"learnt: try more epochs than {config.epochs:g}, or "
            + (
                f"a higher lr than {config.lr:g} (small encoders take {SMALL_LR:g})"
                if config.lr < SMALL_LR
                else f"another lr than {config.lr:g}, or more rows"
            )
        )
    rows = {name: len(labelled.rows) for name, labelled in sets.items()}
    counts = SeedsCounts(
        remarks=remarks,
        train_rows=rows[TRAIN],
        selection_rows=rows.get(SELECTION),
        held_out_rows=rows.get(HELD_OUT),
        labels=len(task.labels),
        steps=steps,
        seeds=[{"seed": seed} | each for seed, each in zip(config.seeds, seeds, strict=True)],
        tokens_per_s=median_speed(records),
        primary_metric=main if trainable.answers else None,
        means={name: float(per_seed.mean()) for name, per_seed in values.items()},
        deviations={
            name: float(per_seed.std(ddof=1)) if len(per_seed) > 1 else 0.0
            for name, per_seed in values.items()
        },
        baseline=baseline,
    )
    return finished(config, stage, outputs, counts)


def _show(
    config: LabelledTrainingConfig,
    task: "Task",
    rows: int,
    watch: Callable[[Measurement], None],
    records: Records,
) -> None:
    """Pass each measurement on the selection rows to `watch`."""
    steps, between = config.steps(rows), config.steps_between(rows)
    cost = config.selection.cost(task)
    for record, numbers in records:
        if selecting := names.measured_on(SELECTION, numbers):
            seed, step = divmod(record, _records_before(1, steps))
            share = (seed * steps + step) / (len(config.seeds) * steps)
            watch(Measurement(seed, -(-step // between), step, share, cost(selecting)))


def _has_learnt_little(task: "Task", main: str, value: float, blind: float) -> bool:
    """Whether a model is less than a tenth of the way from the best answer that ignores the input
    to a perfect answer; for a metric where lower is better, whether it is no better than the
    former."""
    if main in task.lower_is_better:
        return value >= blind
    return value - blind < 0.1 * (1 - blind)


def _records_before(index: int, steps: int) -> int:
    """Return how many record steps precede those of a seed. Each seed has an extra step at its end,
    for its result."""
    return index * records_per_seed(steps)


def _measured(records: dict[int, dict[str, float]], index: int, steps: int) -> dict[str, float]:
    """Return the result of a seed: the task's metrics, the `steps` of the selected weights, and
    their metrics on the selection rows."""
    result = records[_records_before(index + 1, steps) - 1]
    selected = records[_records_before(index, steps) + round(result[SELECTED_STEP])]
    selecting = names.measured_on(names.on(SELECTION, TASK), selected)
    return {
        "steps": result[SELECTED_STEP],
        **names.measured_on(names.on(HELD_OUT, TASK), result),
        **{f"{SELECTION}_{name}": value for name, value in selecting.items()},
    }


def _checkpoints(index: int) -> str:
    return f"{CHECKPOINTS}/{index}"


def _decisions(index: int) -> str:
    return f"{CHECKPOINTS}/decisions-{index}.json"


def train_seeds(
    trainable: TrainableTask,
    sets: dict[str, LabelledSet],
    config: LabelledTrainingConfig,
    digest: str,
    report: Report,
) -> None:
    """Train the seeds one after another, as one rank."""
    from bert_core.train.checkpoint import load_weights
    from bert_core.train.clock import Clock
    from bert_core.train.words import train_read_words
    from pipelines.training.labelled_batches import LabelledRank
    from pipelines.training.worker import RankPlace, Training, chosen_checkpoint, time_spent, train

    place, task, clock = RankPlace.here(config.threads_per_worker), trainable.task, Clock()
    rank = LabelledRank(
        config, place, trainable.encoder_config, trainable.tokenizer.pad_id, task, sets
    )
    rows = len(sets[TRAIN].windows)
    steps = config.steps(rows)
    schedule = ScheduleConfig(warmup_steps=round(config.warmup_share * steps))
    for index, seed in enumerate(config.seeds):
        loop = LoopConfig(max_steps=steps, precision=config.precision, seed=seed)
        checkpoints = files.join(config.output, _checkpoints(index))
        first_record = _records_before(index, steps)
        model = trainable.built(seed, config)
        if not config.fsdp:  # FSDP checkpoints hold all words, to resume with any number of workers
            train_read_words(model, rank.shown, rank.pad_id)
        train(
            Training(
                config=config,
                place=place,
                model=model,
                batches=rank.batches(TRAIN, seed),
                measure=partial(rank.measure, SELECTION, loop) if SELECTION in sets else None,
                measured_as=SELECTION,
                measure_before=False,
                measure_every_steps=config.steps_between(rows),
                cost=config.selection.cost(task),
                patience=config.selection.patience,
                optimizer=config.optimizer,
                learning_rate=schedule.learning_rate(config.lr, steps),
                loop=loop,
                digest=digest,
                checkpoints=checkpoints,
                clock=clock,
                first_record=first_record,
            ),
            report,
        )
        selected = chosen_checkpoint(checkpoints, place.rank)
        model = trainable.built(seed, config)
        load_weights(selected, model, run_digest=digest)
        model.to(place.device)
        with clock.during("measuring"):
            decided = _decided(rank, model, files.join(config.output, _decisions(index)))
            scored = decided.measure(HELD_OUT, loop, model) if HELD_OUT in sets else {}
        result = names.on_all(HELD_OUT, scored) | {SELECTED_STEP: float(selected.step)}
        report([(first_record + steps + 1, result | time_spent(clock))], True)


def _decided(rank: "LabelledRank", model: "ObjectiveModel", path: str) -> "LabelledRank":
    """Return the rank with a task that answers as the selection rows decide, and scale the model's
    scores. Rank 0 writes the decisions. Collective."""
    if not rank.config.selection.decides:
        return rank
    decisions = rank.decide(model)
    decisions.scale(model)
    if rank.place.rank == 0:
        decisions.write(path)
    return replace(rank, task=decisions.of(rank.task))
