"""Bundle + labelled rows → fine-tuned bundle, on Ray Train, with as many seeds as are asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core import files
from bert_core.data.windows import cut_rows
from bert_core.errors import ConfigError, CorpusError
from bert_core.manifest import Manifest
from bert_core.train.config import LoopConfig, OptimizerConfig, Precision, ScheduleConfig
from pipelines.evaluate import CUT
from pipelines.report import say, tell_remarks
from pipelines.sources import LabelledConfig, labelled_input, read_labelled, rows_of
from pipelines.stage import INPUT, Result, run_stage
from pipelines.training import (
    BUNDLE,
    CHECKPOINTS,
    Records,
    Report,
    TrainingConfig,
    curves,
    fit,
    median_speed,
    read_records,
    write_bundle,
)
from tracking.runs import DatasetInput

TRAIN, SELECTION, HELD_OUT = "train", "selection", "held_out"
"""What the rows are for: to train on, to choose weights by, and to score them once."""
TASK = "task/"
"""Prefix of the task's metrics among the numbers of a measurement."""
STEPS = "steps_of_weights"
"""How many steps the weights have that were taken, in the record of a seed's result."""

if TYPE_CHECKING:
    from bert_core.bundle import Bundle
    from bert_core.data.windows import Window
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Which weights of a training are taken: by training rows that it does without."""

    share: float = 0.0
    """Share of the training rows that is kept out, and measured on instead, to take the weights
    that do best on it; 0 trains on all and takes the last, as the paper does."""
    every_epochs: float = 1.0
    """Epochs between two measurements."""
    patience: int = 0
    """Training ends after so many measurements in a row that found none better; 0 never does."""
    metric: str | None = None
    """What is best; the task's own metric where this is not given, `loss` for the loss."""
    seed: int = 0
    """Which rows: the same for every seed of the training."""

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"selection.share: wanted at least 0 and below 1, got {self.share}")
        if not self.every_epochs > 0:
            raise ConfigError(f"selection.every_epochs: wanted above 0, got {self.every_epochs}")
        if self.patience < 0:
            raise ConfigError(f"selection.patience: wanted 0 or more, got {self.patience}")
        if self.patience and not self.share:
            raise ConfigError(
                f"selection.patience: wanted 0 without rows to measure on, got {self.patience}: "
                "give selection.share, 0.1 for a tenth of the training rows"
            )

    def sign(self, task: "Task") -> int:
        """What the metric is multiplied by, so that a lower number is better."""
        return 1 if self.metric == "loss" or self.metric in task.lower_is_better else -1

    def cost(self, task: "Task") -> Callable[[dict[str, float]], float]:
        """What is lower for better weights, of what `measure` of the worker gives."""
        if self.metric == "loss":
            return itemgetter("loss")

        def of(measured: dict[str, float]) -> float:
            scores = _with_prefix(TASK, measured)
            metric = self.metric or task.main_metric(scores)
            if metric not in scores:
                names = ", ".join(scores)
                raise ConfigError(f"selection.metric: wanted one of loss, {names}, got {metric!r}")
            return self.sign(task) * scores[metric]

        return of


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(TrainingConfig):
    """What to fine-tune on which rows. Defaults: Devlin et al. 2019, appendix A.3."""

    model: str = field(metadata=INPUT)
    """Bundle to start from: a folder, a URI, or models:/name@alias."""
    from_scratch: bool = False
    """Start from fresh weights instead of the bundle's, to see what pretraining is worth."""
    task: str = "text-classification"
    """Name of the task; `raybert list tasks` shows those there are."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the task is told, by name: `{multi_label = true}`."""
    train: LabelledConfig = field(default_factory=LabelledConfig)
    """Rows to train on."""
    held_out: LabelledConfig | None = None
    """Rows to measure on, once, when training is done, where they are given; they select
    nothing."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Which weights are taken."""
    rows_per_class: int | None = None
    """Most training rows of a label, drawn at random; all where this is not given."""
    max_length: int = 128
    """Most tokens of a row, special ones included."""
    epochs: float = 3.0
    """How often every row is seen."""
    batch_size: int = 32
    """Rows of an optimizer step, over all workers."""
    lr: float = 5e-5
    """Peak learning rate."""
    warmup_share: float = 0.1
    """Share of the steps in which the learning rate climbs."""
    weight_decay: float = 0.01
    """Decoupled decay of weight matrices."""
    layer_decay: float = 1.0
    """A layer's learning rate is so many times that of the one above it (Howard and Ruder 2018); 1
    moves all alike."""
    precision: Precision = "bf16"
    """`bf16` runs matrix products in bfloat16; `fp32` is faster on CPUs without it."""
    seeds: tuple[int, ...] = (0,)
    """Fresh heads, order of rows and dropout; the bundle is that of the first seed."""
    most_rise: float = 0.0
    """As in pretraining; with few rows a loss may rise for no ill reason."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: wanted different numbers, at least one, got {self.seeds}")
        if not self.epochs > 0:
            raise ConfigError(f"epochs: wanted above 0, got {self.epochs}")
        if not self.lr > 0:
            raise ConfigError(f"lr: wanted above 0, got {self.lr}")
        if not 0 <= self.warmup_share <= 1:
            raise ConfigError(f"warmup_share: wanted 0 to 1, got {self.warmup_share}")
        if self.batch_size < max(1, self.most_workers):
            raise ConfigError(
                f"batch_size: wanted at least a row for each of {self.most_workers} workers, "
                f"got {self.batch_size}"
            )
        if self.max_length < 8:
            raise ConfigError(f"max_length: wanted at least 8, got {self.max_length}")
        if self.rows_per_class is not None and self.rows_per_class < 1:
            raise ConfigError(f"rows_per_class: wanted at least 1, got {self.rows_per_class}")
        self.optimizer  # noqa: B018 – checks what it is given

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            lr=self.lr, weight_decay=self.weight_decay, layer_decay=self.layer_decay
        )

    def steps(self, rows: int) -> int:
        """Optimizer steps of one seed."""
        return max(1, round(self.epochs * rows / self.batch_size))

    def steps_between(self, rows: int) -> int:
        """Steps between two measurements on the rows that select."""
        return max(1, round(self.selection.every_epochs * rows / self.batch_size))


@dataclass(frozen=True)
class Measurement:
    """What a model in training came to on the rows that select."""

    seed: int
    """Which of the seeds it is of, by its place."""
    number: int
    """Which of this seed's measurements it is, from 1."""
    step: int
    """Of this seed."""
    share: float
    """How much of the whole training is behind it."""
    cost: float
    """The lowest is best."""


def run(config: FinetuneConfig, watch: Callable[[Measurement], None] | None = None) -> Manifest:
    """Fine-tune a bundle for a task, and write the bundle of the first seed.

    Args:
        watch: shown every measurement on the rows that select; needs `num_workers` 0.
    """
    folder, inputs = inputs_of(config)
    return run_stage(
        "finetune", config, inputs, lambda digest: _finetune(config, folder, inputs, digest, watch)
    )


def inputs_of(config: FinetuneConfig) -> tuple[Path, list[DatasetInput]]:
    """Where the bundle to start from lies on this machine, and everything that is read."""
    from bert_core.bundle import bundle_digest
    from bert_core.tasks.registry import TASKS
    from tracking.resolve import resolve

    if config.task not in TASKS:
        raise ConfigError(f"task: wanted one of {', '.join(TASKS)}, got {config.task!r}")
    folder = resolve(config.model, uri=config.tracking_uri)
    inputs = [
        DatasetInput("model", bundle_digest(folder), config.model),
        labelled_input("train", config.train, "train"),
    ]
    if config.held_out is not None:
        inputs.append(labelled_input("held_out", config.held_out, "held_out"))
    return folder, inputs


def _finetune(
    config: FinetuneConfig,
    folder: Path,
    inputs: list[DatasetInput],
    digest: str,
    watch: Callable[[Measurement], None] | None,
) -> Result:
    from bert_core.bundle import load_bundle
    from bert_core.train.checkpoint import checkpoint_at

    bundle = load_bundle(folder)
    task, sets = _read(config, bundle)
    remarks = _remarks(config, task, sets)
    steps = config.steps(len(sets[TRAIN].windows))
    total = _records_before(len(config.seeds), steps)
    between, cost = config.steps_between(len(sets[TRAIN].windows)), config.selection.cost(task)

    def measured(records: Records) -> None:
        assert watch is not None
        for record, numbers in records:
            if selecting := _with_prefix(f"{SELECTION}/", numbers):
                seed, step = divmod(record, _records_before(1, steps))
                share = (seed * steps + step) / (len(config.seeds) * steps)
                watch(Measurement(seed, -(-step // between), step, share, cost(selecting)))

    fit(
        partial(worker, folder, task, sets),
        config,
        digest,
        LoopConfig(max_steps=total),
        "fine-tuning",
        None if watch is None else measured,
    )
    records = read_records(config.local_folder)
    seeds = [_measured(records, index, steps) for index in range(len(config.seeds))]
    taken = round(seeds[0]["steps"])
    values = {name: np.array([each[name] for each in seeds]) for name in seeds[0]}
    main = task.main_metric({name.removeprefix(f"{SELECTION}_") for name in values})
    outputs = write_bundle(
        config,
        digest,
        build_model(config, bundle, task, config.seeds[0]),
        bundle.tokenizer,
        task=task,
        metrics={name: value for name, value in seeds[0].items() if name != "steps"},
        lineage={
            "stage": "finetune",
            "data": _data(config, bundle, inputs, sets),
            "parent": bundle.digest,
            "parent_lineage": bundle.lineage,
            "from_scratch": config.from_scratch,
        },
        checkpoint=checkpoint_at(files.join(config.output, _checkpoints(0)), taken),
    )
    say(f"finetune: {_came_to(main, sets, values)}bundle in {files.join(config.output, BUNDLE)}")
    counts = {
        **remarks,
        **{f"{name}_rows": len(each.rows) for name, each in sets.items()},
        "labels": len(task.labels),
        "steps": steps,
        "seeds": [{"seed": seed} | each for seed, each in zip(config.seeds, seeds, strict=True)],
        "tokens_per_s": median_speed(records),
        "primary_metric": main,
        **{f"{name}_mean": float(each.mean()) for name, each in values.items()},
        **{
            f"{name}_std": float(each.std(ddof=1)) if len(seeds) > 1 else 0.0
            for name, each in values.items()
        },
        **(
            {f"baseline_{k}": v for k, v in task.baseline(sets[HELD_OUT].rows).items()}
            if HELD_OUT in sets
            else {}
        ),
    }
    return Result(outputs=outputs, counts=counts, artifacts=curves(config))


def _came_to(main: str, sets: "dict[str, LabelledSet]", values: dict[str, np.ndarray]) -> str:
    """What there is to say of all seeds: on held-out rows, else on those that selected."""
    for name, key in ((HELD_OUT, main), (SELECTION, f"{SELECTION}_{main}")):
        if name in sets:
            seeds = f"{len(values[key])} seed{'s' if len(values[key]) > 1 else ''}"
            rows = f"{len(sets[name].rows):,} {name.replace('_', '-')} rows"
            return f"{main} {values[key].mean():.1%} on {rows}, mean of {seeds}, "
    return ""


def _data(
    config: FinetuneConfig,
    bundle: "Bundle",
    inputs: list[DatasetInput],
    sets: "dict[str, LabelledSet]",
) -> list[dict[str, Any]]:
    """The vocabulary and the labelled sets, for the lineage."""
    tokenizer, sources = bundle.tokenizer, {TRAIN: config.train, HELD_OUT: config.held_out}
    return [
        {"name": "vocabulary", "digest": tokenizer.digest, "tokens": tokenizer.vocab_size},
        *(
            {"name": each.name, "digest": each.digest, "source": source.source}
            | {"rows": len(sets[each.name].rows)}
            for each in inputs
            if (source := sources.get(each.name)) is not None
        ),
    ]


def _remarks(
    config: FinetuneConfig, task: "Task", sets: "dict[str, LabelledSet]"
) -> dict[str, int]:
    """What is odd in the rows that are trained on and in those held out, counted and told of."""
    remarks: dict[str, int] = {}
    for split, source in ((TRAIN, config.train), (HELD_OUT, config.held_out)):
        if source is not None:
            rows, windows = sets[split].rows, sets[split].windows
            found = task.remarks(rows) | {CUT: cut_rows(windows)}
            tell_remarks("finetune", found, source.source)
            remarks |= {f"{split}_{name}": count for name, count in found.items()}
    return remarks


@dataclass(frozen=True)
class LabelledSet:
    """Rows as they were read, and as an encoder takes them."""

    rows: list[dict[str, Any]]
    windows: "list[Window]"


def _read(config: FinetuneConfig, bundle: "Bundle") -> tuple["Task", dict[str, LabelledSet]]:
    """The task with the labels of the training rows, and the sets that there are.

    Raises: ConfigError or CorpusError naming what does not fit the task.
    """
    from bert_core.tasks.registry import TASKS

    kind = TASKS[config.task]
    options = kind.options_of(config.options)
    shapes = kind.shapes(options)
    read = few_per_class(read_labelled(config.train, "train", shapes), config.rows_per_class)
    with rows_of(config.train.source):
        task = kind.from_rows(read, options)
    parts = divided(read, config.selection)
    if config.held_out is not None:
        parts[HELD_OUT] = read_labelled(config.held_out, "held_out", shapes)
    if len(parts[TRAIN]) < config.batch_size:
        kept = f", of which {len(parts[SELECTION])} select" if SELECTION in parts else ""
        raise CorpusError(
            f"{config.train.source}: wanted at least batch_size = {config.batch_size} rows to "
            f"train on, got {len(read)}{kept}: lower batch_size, or add rows"
        )
    longest = _longest(config, bundle)
    sets = {}
    for name, rows in parts.items():
        source = config.held_out if name == HELD_OUT else config.train
        assert source is not None
        with rows_of(f"{source.source} ({name})"):
            windows = task.encode(rows, bundle.tokenizer, longest, labelled=True)
        sets[name] = LabelledSet(rows, windows)
    return task, sets


def divided(rows: list[dict], config: SelectionConfig) -> dict[str, list[dict]]:
    """The rows that are trained on, and those that select, where there are to be any."""
    if not config.share:
        return {TRAIN: rows}
    count = max(1, round(config.share * len(rows)))
    kept = np.zeros(len(rows), dtype=bool)
    kept[np.random.default_rng(config.seed).permutation(len(rows))[:count]] = True
    return {
        TRAIN: [row for row, out in zip(rows, kept, strict=True) if not out],
        SELECTION: [row for row, out in zip(rows, kept, strict=True) if out],
    }


def _records_before(index: int, steps: int) -> int:
    """Steps of the record before those of a seed, which has one after its last for its result."""
    return index * (steps + 2)


def _measured(records: dict[int, dict[str, float]], index: int, steps: int) -> dict[str, float]:
    """What a seed came to: the task's metrics, `steps` of the weights taken, and what they came to
    on the rows that selected them."""
    result = records[_records_before(index + 1, steps) - 1]
    selected = records[_records_before(index, steps) + round(result[STEPS])]
    return {
        "steps": result[STEPS],
        **_with_prefix(f"{HELD_OUT}/{TASK}", result),
        **{f"{SELECTION}_{k}": v for k, v in _with_prefix(f"{SELECTION}/{TASK}", selected).items()},
    }


def _with_prefix(prefix: str, record: dict[str, float]) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)}


def few_per_class(rows: list[dict[str, Any]], most: int | None, seed: int = 0) -> list[dict]:
    """At most `most` rows of each label, in their order; the same for every model compared."""
    if most is None:
        return rows
    if "label" not in rows[0]:
        raise ConfigError(
            f"rows_per_class: wanted rows that have one label each, theirs have "
            f"{', '.join(rows[0])}: leave it out for this task"
        )
    kept: list[int] = []
    rng = np.random.default_rng(seed)
    labels = np.array([row["label"] for row in rows])
    for label in sorted(set(labels)):
        places = np.flatnonzero(labels == label)
        kept.extend(rng.permutation(places)[:most].tolist())
    return [rows[place] for place in sorted(kept)]


def _longest(config: FinetuneConfig, bundle: "Bundle") -> int:
    from bert_core.batches import PAD_MULTIPLE  # batches are padded to whole multiples of it

    longest = bundle.encoder_config.max_length // PAD_MULTIPLE * PAD_MULTIPLE
    if config.max_length > longest:
        raise ConfigError(
            f"max_length: wanted at most {longest}, the positions that {config.model} has, "
            f"got {config.max_length}"
        )
    return config.max_length


def _checkpoints(index: int) -> str:
    return f"{CHECKPOINTS}/{index}"


def build_model(
    config: FinetuneConfig, bundle: "Bundle", task: "Task", seed: int
) -> "ObjectiveModel":
    """The encoder with a fresh head, both as the seed gives them."""
    import torch

    from bert_core import bundle as bundles
    from bert_core.objectives.base import ObjectiveModel

    torch.manual_seed(seed)
    bundle = replace(bundle, encoder_config=task.encoder_config(bundle.encoder_config))
    objective = task.build_objective(bundle.encoder_config)
    if config.from_scratch:
        return ObjectiveModel(bundle.encoder_config, [objective])
    return bundles.build_model(bundle, [objective])


def worker(
    folder: Path,
    task: "Task",
    sets: dict[str, LabelledSet],
    config: FinetuneConfig,
    digest: str,
    report: Report,
) -> None:
    """One rank: the seeds one after the other."""
    from bert_core.batches import RankBatches, WindowSource
    from bert_core.bundle import load_bundle
    from bert_core.data.order import GlobalOrder
    from bert_core.model.attention import packing
    from bert_core.train.checkpoint import load_weights
    from bert_core.train.loop import evaluate, evaluation_scores
    from pipelines.worker import Place, Training, chosen_checkpoint, train

    place = Place.here(config)
    bundle = load_bundle(folder)
    packed_from = packing(bundle.encoder_config, place.device, config.precision)

    def batches(split: str, seed: int) -> RankBatches:
        windows = sets[split].windows
        return RankBatches(
            source=WindowSource(windows, bundle.tokenizer.pad_id, packed_from),
            order=GlobalOrder([len(windows)], seed=seed),
            global_batch_size=config.batch_size if split == TRAIN else 256,
            micro_batch_tokens=config.micro_batch_tokens,
            rank=place.rank,
            world_size=place.world_size,
            group_rows=task.group_rows,
        )

    def measure(split: str, loop: LoopConfig, model: "ObjectiveModel") -> dict[str, float]:
        rows, windows = sets[split].rows, sets[split].windows
        scores = evaluation_scores(
            model,
            windows,
            bundle.tokenizer.pad_id,
            loop,
            budget_tokens=config.micro_batch_tokens,
            packed_from=packed_from,
        )
        metrics = task.metrics(task.compare(rows, task.decode(rows, windows, scores)))
        return evaluate(model, batches(split, 0).once(), loop) | {
            f"{TASK}{name}": value for name, value in metrics.items()
        }

    windows = len(sets[TRAIN].windows)
    steps = config.steps(windows)
    schedule = ScheduleConfig(warmup_steps=round(config.warmup_share * steps))
    for index, seed in enumerate(config.seeds):
        loop = LoopConfig(max_steps=steps, precision=config.precision, seed=seed)
        checkpoints = files.join(config.output, _checkpoints(index))
        first_record = _records_before(index, steps)
        train(
            Training(
                config=config,
                place=place,
                model=build_model(config, bundle, task, seed),
                batches=batches(TRAIN, seed),
                measure=partial(measure, SELECTION, loop) if SELECTION in sets else None,
                measured_as=SELECTION,
                measure_before=False,
                measure_every_steps=config.steps_between(windows),
                cost=config.selection.cost(task),
                patience=config.selection.patience,
                optimizer=config.optimizer,
                learning_rate=schedule.learning_rate(config.lr, steps),
                loop=loop,
                digest=digest,
                checkpoints=checkpoints,
                first_record=first_record,
            ),
            report,
        )
        taken = chosen_checkpoint(checkpoints, place.rank)
        model = build_model(config, bundle, task, seed)
        load_weights(taken, model, run_digest=digest)
        model.to(place.device)
        scored = measure(HELD_OUT, loop, model) if HELD_OUT in sets else {}
        result = {f"{HELD_OUT}/{name}": value for name, value in scored.items()}
        report([(first_record + steps + 1, result | {STEPS: float(taken.step)})], True)
