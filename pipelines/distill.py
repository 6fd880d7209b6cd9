"""Teacher + shards or labelled rows → a smaller bundle that answers alike, on Ray Train.

On shards the student learns what pretraining teaches (DistilBERT; TinyBERT's general stage), on
labelled rows a task, trained as in `finetune`. TinyBERT's intermediate and prediction stages are
two runs: the second takes the first one's bundle as its `model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bert_core import files
from bert_core.checks import NonNegativeInt, PositiveInt, default_of
from bert_core.data.shards import ShardSet
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.errors import ConfigError
from bert_core.manifest import Manifest, read_manifest
from bert_core.train.config import LoopConfig, ScheduleConfig
from bert_core.wording import one_of
from pipelines.corpus.labelled import labelled_input, usual_columns
from pipelines.runtime.inputs import bundle_input, input_digest
from pipelines.runtime.progress import counted, say
from pipelines.runtime.result import SPREAD, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT
from pipelines.training.config import LabelledTrainingConfig, check_variant
from pipelines.training.driver import BeforeAndAfter, finished, fit, write_bundle
from pipelines.training.labelled_sets import (
    LabelledSet,
    encoded,
    lineage_of,
    read_parts,
    trainable_task,
)
from pipelines.training.records import CHECKPOINTS, Report, median_speed, read_records
from pipelines.training.seeds import SeedsCounts, TrainableTask, learn
from pipelines.training.shard_batches import batches, check_rows
from pipelines.training.student import TEACHER, AugmentationConfig, LossesConfig, TeacherStudent
from tracking.runs import metric_names as names
from tracking.runs.metric_names import LOSS
from tracking.runs.recorder import DatasetInput
from tracking.runs.story import score

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.tasks.base import Options, Task

OF_ROWS = (
    *("task", "options", "train", "held_out", "selection", "classes"),
    *("freeze", "freeze_layers"),
    *("rows_per_class", "max_length", "examples", "augmentation"),
)
"""The fields that apply to labelled rows only."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(LabelledTrainingConfig):
    """Teacher, student, and the rows to learn from: labelled ones, or shards."""

    teacher: str = field(metadata=INPUT)
    """Bundle to learn from: a folder, a URI, models:/name@alias, or owner/name of the Hugging Face
    hub."""
    model: str = field(default=TEACHER, metadata=INPUT)
    """Bundle that the student starts from, with the teacher's vocabulary: `teacher`, or any
    reference that `teacher` takes."""
    task: str = TEACHER
    """Task of the labelled rows, one of `raybert list tasks`; `teacher` takes the teacher's."""
    layers: tuple[NonNegativeInt, ...] = ()
    """Layers of that bundle to keep in the student, counted from 0; by default every other layer of
    the teacher (DistilBERT, section 3), or all layers of another bundle."""
    variant: str | None = None
    """Encoder of a student with fresh weights, instead of `model`."""
    shards: str | None = field(default=None, metadata=INPUT)
    """Folder or URI written by `raybert prepare` to learn from, instead of labelled rows."""
    window_shards: PositiveInt = 8
    """Rows are permuted within this many shards, as in `pretrain`."""
    held_out_rows: PositiveInt = 8192
    """Maximum number of held-out rows of shards to measure the student on, before and after."""
    losses: LossesConfig = field(default_factory=LossesConfig)
    """Weights of the parts of the loss."""
    layer_map: tuple[NonNegativeInt, ...] = ()
    """The teacher layer that each layer of the student is compared with, counted from 0; by default
    the teacher is split into as many equal groups of layers, and the last of each is taken."""
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    """New rows made from the labelled training rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_variant("variant", self.variant)
        if self.variant is not None and self.layers:
            raise ConfigError(
                f"layers: wanted none with variant, since {self.variant} starts from fresh "
                f"weights, got {list(self.layers)}: leave one of them out"
            )
        if self.adapter is not None:
            raise ConfigError(
                "adapter: wanted none, since a student changes as a whole, got one: give it to "
                "raybert finetune, or leave it out"
            )
        self.optimizer.check_sharding(self.fsdp)
        of_rows = [
            setting.name
            for setting in fields(self)
            if setting.name in OF_ROWS and getattr(self, setting.name) != default_of(setting)
        ]
        if self.shards and of_rows:
            raise ConfigError(
                f"shards: wanted no {', '.join(of_rows)} with it, which apply to labelled rows "
                "only: leave one or the other out"
            )
        of_loss = [name for name in self.classes.changed if name != "sampling_power"]
        if of_loss and not self.losses.hard:
            raise ConfigError(
                f"classes.{of_loss[0]}: wanted the default with losses.hard = 0, since it is about "
                f"the loss of the labels, got {getattr(self.classes, of_loss[0])!r}: give "
                "losses.hard a weight, or leave it out"
            )
        if self.layer_map and not self.losses.of_layers:
            raise ConfigError(
                "layer_map: wanted none when no layers are compared, got "
                f"{list(self.layer_map)}: give losses.hidden or losses.attention a weight, or "
                "leave it out"
            )
        if self.shards and len(self.seeds) > 1:
            raise ConfigError(f"seeds: wanted one with shards, got {len(self.seeds)}")


@dataclass(frozen=True, kw_only=True)
class DistillCounts(SeedsCounts):
    """Counts of a student that learned on labelled rows."""

    how: ClassVar[str] = "Distilled from its teacher"

    sizes: Mapping[str, int] = field(metadata=SPREAD)
    """Parameters of teacher and student."""
    augmented_rows: int | None = None
    """Training rows made from others; None without augmentation."""
    against_teacher: Mapping[str, float] = field(metadata=SPREAD)
    """The teacher's metrics on the held-out rows, and the share of the main one that is kept."""

    @property
    def given_rows(self) -> int:
        return self.train_rows - (self.augmented_rows or 0)


@dataclass(frozen=True, kw_only=True)
class ShardsCounts(BeforeAndAfter):
    """Counts of a student that learned on shards."""

    sizes: Mapping[str, int] = field(metadata=SPREAD)
    """Parameters of teacher and student."""

    @property
    def line(self) -> str:
        return f"held-out loss {self.before[LOSS]:.3g} → {self.after[LOSS]:.3g}"

    @property
    def sentence(self) -> str:
        return (
            "Distilled from its teacher on unlabelled text: its loss on held-out rows was "
            f"{self.before[LOSS]:.3g} before and is {self.after[LOSS]:.3g} now."
        )


def run(config: DistillConfig) -> Manifest:
    """Train a student on its teacher, and write it as a bundle in Hugging Face layout."""
    folders: dict[str, Path] = {}
    inputs = []
    for name, reference in (
        ("teacher", config.teacher),
        ("model", config.model),
        ("augmentation", config.augmentation.model),
    ):
        if name == "teacher" or reference != TEACHER:
            folders[name], source = bundle_input(config, reference, name=name)
            inputs.append(source)
    if config.variant is not None and "model" in folders:
        raise ConfigError(
            f"model: wanted none with variant, since {config.variant} starts from fresh weights, "
            f"got {config.model}: leave one of them out"
        )
    if config.shards:
        shards = input_digest(config.shards, "prepare")
        inputs.append(DatasetInput("shards", shards, config.shards))
        return run_stage(
            "distill", config, inputs, lambda digest: _on_shards(config, folders, digest)
        )
    if config.task == TEACHER:  # same output as if the task was given
        config = replace(config, task=_task_of(config.teacher, folders["teacher"]))
    inputs.append(labelled_input("train", config.train, "train"))
    if config.held_out is not None:
        inputs.append(labelled_input("held_out", config.held_out, "held_out"))
    return run_stage(
        "distill", config, inputs, lambda digest: _on_labelled_rows(config, folders, inputs, digest)
    )


def _teacher_student(config: DistillConfig, folders: Mapping[str, Path]) -> TeacherStudent:
    return TeacherStudent(
        names={"teacher": config.teacher, "model": config.model},
        teacher=folders["teacher"],
        student=folders.get("model"),
        variant=config.variant,
        layers=config.layers,
        layer_map=config.layer_map,
        losses=config.losses,
        from_scratch=config.from_scratch,
        dropout=config.dropout,
    )


def _task_of(teacher: str, folder: Path) -> str:
    """Return the name of the teacher's task. Raises: ConfigError if it has none."""
    from bert_core.tasks.catalog import TASKS
    from tracking.models.hub import load_bundle

    task = load_bundle(folder).task
    if task is None:
        raise ConfigError(
            f"task: wanted {one_of(TASKS)}, since the teacher {teacher} was only "
            "pretrained, got none: give --task"
        )
    return task.name


def _on_labelled_rows(
    config: DistillConfig, folders: Mapping[str, Path], inputs: list[DatasetInput], digest: str
) -> Result:
    """Train a student for a task."""
    from bert_core.bundle.weights import require_weights
    from tracking.models.hub import load_bundle

    kind = trainable_task(config.task)
    teacher = require_weights(load_bundle(folders["teacher"]))
    answers = config.losses.of_answers or kind.headless
    if not answers:
        _check_unscored(config)
    options = _options(config, teacher)
    learned = teacher.task is not None and teacher.task.name == config.task and not kind.headless
    known = kind(teacher.task.labels, options) if learned and teacher.task is not None else None
    parts = read_parts(config, kind, options, known, usual_columns(teacher, config.task))
    if known is not None and "max_length" in kind.options.own_names:
        _tell_other_windows(config.max_length, teacher.task)
    pair = _teacher_student(config, folders)
    student = pair.load_student(teacher)
    task = parts.task.adapted(student.state)
    pair = replace(pair, task=task)
    pair.build(config.seeds[0])  # fails on a mismatch before workers start
    new_rows = _augmented(config, folders, task, parts.rows[TRAIN])
    parts.rows[TRAIN] += new_rows
    both = [(teacher, config.teacher), (student, config.variant or config.model)]
    shorter, name = min(both, key=lambda each: each[0].encoder_config.max_length)
    # Either may be without segments, and ignores those of a pair then: the other reads them, as the
    # student will when it answers.
    reader = student if student.encoder_config.embeddings.type_vocab_size > 1 else teacher
    sets = encoded(config, replace(shorter, tokenizer=reader.tokenizer), name, task, parts)
    trained_rows = pair.trained_rows(teacher, student)
    trainable = TrainableTask(
        task, student.tokenizer, student.encoder_config, pair.build, trained_rows, answers=answers
    )
    lineage = {
        **pair.lineage(teacher, student),
        "data": lineage_of(config, student.tokenizer, inputs, sets),
    }
    result = learn(config, trainable, sets, lineage, digest)
    counts = DistillCounts(
        **vars(result.counts),
        sizes=pair.sizes(teacher),
        augmented_rows=len(new_rows) or None,
        against_teacher=_against_teacher(pair, teacher, sets, result.counts),
    )
    return replace(result, counts=counts)


def _tell_other_windows(length: int, teachers: "Task | None") -> None:
    longest = None if teachers is None else teachers.max_length
    if longest not in (None, length):
        say(
            f"distill: windows of {length} tokens, but the teacher was trained on {longest}: "
            f"--max_length {longest} gives the student the same"
        )


def _check_unscored(config: DistillConfig) -> None:
    """Raise ConfigError if the config asks to score a head that learns nothing."""
    why = "since losses.soft and losses.hard are 0 and the head learns nothing"
    if config.held_out is not None:
        raise ConfigError(f"held_out: wanted none, {why}: score the run that trains the head")
    if config.selection.share and config.selection.metric != LOSS:
        raise ConfigError(
            f"selection.metric: wanted loss, {why}, got {config.selection.metric}: set it, or "
            "selection.share to 0"
        )


def _options(config: DistillConfig, teacher: "Bundle") -> "Options":
    """Return the options of the task. The defaults are the teacher's if it has the same task,
    except for those about its own sizes.

    Raises: ConfigError if an option that a head depends on differs from the teacher's.
    """
    from bert_core.tasks.catalog import TASKS

    kind = TASKS[config.task]
    kind.options.check_given(config.options)
    if teacher.task is None or teacher.task.name != config.task:
        return kind.options_of(config.options)
    inherited = teacher.task.record["options"]
    options = kind.options_of(
        {name: value for name, value in inherited.items() if name not in kind.options.own_names}
        | config.options
    )

    def of_head(options: "Options") -> dict[str, Any]:
        return {
            name: one for name, one in vars(options).items() if name not in kind.options.free_names
        }

    if not kind.headless and of_head(options) != of_head(teacher.task.chosen):
        raise ConfigError(
            f"options: wanted those that the teacher {config.teacher} was trained with, "
            f"{teacher.task.record['options']}, got {config.options}: leave them out"
        )
    return options


def _augmented(
    config: DistillConfig, folders: Mapping[str, Path], task: "Task", rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return new rows made from the training rows."""
    from bert_core.inference.augmentation import Candidates, augmented

    how = config.augmentation
    if not how.copies:
        return []
    if not task.replaceable:
        raise ConfigError(
            f"augmentation.copies: wanted 0 for {task.name}, where other words would change the "
            f"answers, got {how.copies}"
        )
    fill = "augmentation" in folders
    source = Candidates(
        folders["augmentation" if fill else "teacher"], count=how.candidates, fill_masks=fill
    )
    new_rows = augmented(
        rows, task.replaceable, source, copies=how.copies, share=how.share, seed=how.seed
    )
    say(f"distill: {counted(len(new_rows), 'row')} with replaced words added to {len(rows):,}")
    return new_rows


def _against_teacher(
    pair: TeacherStudent,
    teacher: "Bundle",
    sets: Mapping[str, LabelledSet],
    counts: SeedsCounts,
) -> dict[str, float]:
    """Return the teacher's metrics on the held-out rows, read as `raybert evaluate` reads them, and
    the share of its main metric that the student keeps. Empty without held-out rows, or if the
    student does not learn from the teacher's scores."""
    from bert_core.collation import longest_row
    from bert_core.torch_scores import scores_of

    if HELD_OUT not in sets or not pair.losses.soft:
        return {}
    assert pair.task is not None
    task, rows = pair.task, sets[HELD_OUT].rows
    if teacher.task is not None and teacher.task.name == task.name:
        own = {name: getattr(teacher.task.chosen, name) for name in task.options.own_names}
        task = type(task)(task.labels, replace(task.chosen, **own))
    longest = longest_row(teacher.encoder_config.max_length)
    windows = task.encode(rows, teacher.tokenizer, longest)
    model = pair.build_teacher(teacher, scored=True).eval()
    scores = scores_of(model, windows, teacher.tokenizer.pad_id)
    metrics = task.metrics(task.compare(rows, task.decode(rows, windows, scores)))
    main = counts.primary_metric
    assert main is not None  # scores are learned
    figures = {f"teacher_{name}": value for name, value in metrics.items()}
    if metrics[main] > 0:
        kept = figures[f"kept_{main}"] = counts.means[main] / metrics[main]
        say(f"distill: {kept:.1%} of the teacher's {score(main, metrics[main])}")
    return figures


def _on_shards(config: DistillConfig, folders: Mapping[str, Path], digest: str) -> Result:
    """Train a student on shards; it learns to predict masked words if the losses include
    answers."""
    from bert_core.bundle.weights import require_weights
    from bert_core.tasks.fill_mask import FillMask
    from tracking.models.hub import load_bundle

    teacher = require_weights(load_bundle(folders["teacher"]))
    pair = _teacher_student(config, folders)
    student = pair.load_student(teacher)
    if config.losses.of_answers:
        pair = replace(pair, task=FillMask().adapted(student.state))
    assert config.shards is not None
    shards = ShardSet.read(config.shards)
    shards.check_tokenizer(teacher.tokenizer.digest, config.teacher)
    for name, bundle in (("the teacher", teacher), ("the student", student)):
        check_rows(config.shards, shards, bundle.encoder_config, name)
    pair.build(config.seeds[0])  # fails on a mismatch before workers start
    steps = config.steps(sum(info.rows for info in shards.split(TRAIN)))
    loop = LoopConfig(max_steps=steps, precision=config.precision, seed=config.seeds[0])
    fit(partial(train_on_shards, pair, loop), config, digest, loop, "distill")
    records = read_records(config.local_folder)
    fresh, trained = (names.measured_on(HELD_OUT, records[step]) for step in (0, steps))
    prepared = read_manifest(config.shards)
    outputs = write_bundle(
        config,
        digest,
        pair.build(config.seeds[0]),
        student.tokenizer,
        metrics=trained,
        lineage={
            **pair.lineage(teacher, student),
            "data": [
                {"name": "vocabulary", "digest": student.tokenizer.digest}
                | {"tokens": student.tokenizer.vocab_size},
                {"name": "shards", "digest": prepared.digest, "rows": prepared.counts["rows"]},
            ],
        },
        trained_rows=pair.trained_rows(teacher, student),
    )
    counts = ShardsCounts(
        before=fresh,
        after=trained,
        sizes=pair.sizes(teacher),
        steps=steps,
        tokens_per_s=median_speed(records),
    )
    return finished(config, "distill", outputs, counts)


def train_on_shards(
    pair: TeacherStudent, loop: LoopConfig, config: DistillConfig, digest: str, report: Report
) -> None:
    """Train on shards, as one worker."""
    from bert_core.train.loop import evaluate
    from pipelines.training.worker import RankPlace, Training, train

    assert config.shards is not None
    place = RankPlace.here(config.threads_per_worker)
    shards = ShardSet.read(config.shards)
    model = pair.build(loop.seed)
    by_split = {
        split: batches(
            shards,
            split,
            place=place,
            encoder=model.encoder.config,
            loop=loop,
            pad_id=model.encoder.config.embeddings.pad_token_id,
            global_batch_size=config.batch_size,
            micro_batch_tokens=config.micro_batch_tokens,
            window_shards=config.window_shards,
        )
        for split in (TRAIN, HELD_OUT)
    }
    schedule = ScheduleConfig(warmup_steps=round(config.warmup_share * loop.max_steps))
    train(
        Training(
            config=config,
            place=place,
            model=model,
            batches=by_split[TRAIN],
            measure=lambda model: evaluate(
                model, by_split[HELD_OUT].once(config.held_out_rows), loop
            ),
            optimizer=config.optimizer,
            learning_rate=schedule.learning_rate(config.lr, loop.max_steps),
            loop=loop,
            digest=digest,
            checkpoints=files.join(config.output, CHECKPOINTS),
        ),
        report,
    )
