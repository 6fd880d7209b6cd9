"""Shards → pretrained bundle, from fresh weights or from those of another bundle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core import files
from bert_core.checks import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ShareBelowOne,
    check_fields,
)
from bert_core.data.pairs import LABELS
from bert_core.data.shards import ShardSet
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError
from bert_core.manifest import Headline, Manifest, is_complete, read_manifest
from bert_core.metrics.language_model import unigram_baseline
from bert_core.model.config import AngleBase, EncoderConfig
from bert_core.model.variants import VARIANTS
from bert_core.tasks.digests import NO_ROWS
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from pipelines.runtime.inputs import bundle_input, input_digest, tokenizer_input
from pipelines.runtime.progress import say
from pipelines.runtime.result import Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, REMARK
from pipelines.training.config import TrainingConfig, check_variant
from pipelines.training.driver import BeforeAndAfter, finished, fit, write_bundle
from pipelines.training.objectives import check_names, objectives_of
from pipelines.training.records import CHECKPOINTS, Report, median_speed
from pipelines.training.shard_batches import batches, check_rows
from tracking.cache import local_cache
from tracking.models.references import Reference
from tracking.runs import metric_names as names
from tracking.runs.metric_names import MLM_ACCURACY, MLM_LOSS
from tracking.runs.recorder import DatasetInput
from tracking.runs.story import percent

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.objectives.base import ObjectiveModel

UNIGRAM_ROWS = 100_000
DEFAULT_VARIANT = "bert-base"


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """The last steps of a run, on other rows: BERT sees 512 tokens in a tenth of its steps."""

    shards: str = field(metadata=INPUT)
    """Folder or URI written by `raybert prepare`, with the same vocabulary and label."""
    steps: PositiveInt
    """Number of the run's steps in this phase."""
    global_batch_size: PositiveInt | None = None
    """Rows per optimizer step; by default the run's."""
    lr: PositiveFloat | None = None
    """Peak learning rate of a separate schedule for this phase; the run's schedule then ends where
    the phase begins. By default the run's schedule continues."""
    warmup_steps: NonNegativeInt = 0
    """Warm-up steps of the separate schedule."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="then.")
        if self.warmup_steps and self.lr is None:
            raise ConfigError(
                "then.warmup_steps: wanted then.lr with it, the peak of a separate schedule, got "
                f"{self.warmup_steps} alone: give then.lr, or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class BatchWarmupConfig:
    """Batches that grow to `global_batch_size` in the first steps of a run, by equal amounts
    (ModernBERT, Warner et al. 2024, section 2.2.2)."""

    rows: PositiveInt
    """Rows of the first step."""
    steps: PositiveInt
    """Number of steps until a batch has `global_batch_size` rows."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="batch_warmup.")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainingConfig):
    """Which encoder to train on which shards. Defaults: Devlin et al. 2019, appendix A.2."""

    shards: str = field(metadata=INPUT)
    """Folder or URI written by `raybert prepare`."""
    tokenizer: str = field(metadata=INPUT)
    """Folder of the vocabulary that the shards were made with."""
    variant: str | None = None
    """Encoder, one of `raybert list variants`; by default bert-base, or the encoder of `model`."""
    sizes_of: str | None = None
    """Another encoder to take the number of layers, widths and heads from, for a small machine."""
    model: str | None = field(default=None, metadata=INPUT)
    """Bundle with the same vocabulary to continue from: a folder, a URI, models:/name@alias, or
    owner/name of the Hugging Face hub; by default training starts from fresh weights."""
    optimizer_from: str | None = field(default=None, metadata=INPUT)
    """Output of the pretraining that made `model`, with its checkpoints: training goes on with its
    optimizer's means of gradients; by default with a fresh optimizer."""
    objectives: tuple[str, ...] | None = None
    """Objectives to train: `mlm` (masked words; MPNet's way is `permuted_mlm`, DeBERTa's are
    `emd_mlm` and `rtd`, which is ELECTRA's too), `nsp` and `sop` (how two segments relate),
    `span_boundary` (words of a span from the tokens next to it). By default `mlm` and the objective
    of the rows' label, if they have one."""
    hidden_dropout_prob: ShareBelowOne | None = None
    """Dropout on the embeddings and the output of each sub-layer; by default the variant's."""
    attention_probs_dropout_prob: ShareBelowOne | None = None
    """Dropout on attention probabilities; by default the variant's. 0 enables fused attention."""
    rope_theta: AngleBase | None = None
    """Base of the rotation angles in ModernBERT's global layers; by default the variant's 160,000,
    or that of `model`. Its authors begin with 10,000 and raise it for long rows."""
    global_batch_size: PositiveInt = 256
    """Rows per optimizer step, over all workers."""
    batch_warmup: BatchWarmupConfig | None = None
    """Smaller batches at first."""
    window_shards: PositiveInt = 8
    """Rows are permuted within this many shards; a worker needs only these at a time."""
    evaluate_every_steps: NonNegativeInt = field(default=0, metadata=REMARK)
    """Steps between evaluations on held-out rows, each with a checkpoint; 0 evaluates only at the
    beginning and the end."""
    held_out_rows: PositiveInt = 8192
    """Maximum number of held-out rows to measure the model on."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Length, precision and seed."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate over the steps."""
    then: PhaseConfig | None = None
    """A last phase on other rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("variant", "sizes_of"):
            variant = getattr(self, name)
            check_variant(name, variant)
            if variant is not None and self.model is not None:
                raise ConfigError(
                    f"{name}: wanted none with model = {self.model!r}, whose encoder is trained "
                    f"as it is, got {variant!r}: leave one of the two out"
                )
        if self.optimizer_from is not None and self.model is None:
            raise ConfigError(
                "optimizer_from: wanted model with it, the bundle that the run there made, got "
                f"{self.optimizer_from!r} alone: give both, or leave it out"
            )
        check_names(self.objectives)
        self.optimizer.check_sharding(self.fsdp)
        for name, phase in zip(("", "then."), self.phases, strict=False):
            if phase.global_batch_size < self.most_workers:
                raise ConfigError(
                    f"{name}global_batch_size: wanted at least a row for each of "
                    f"{self.most_workers} workers, got {phase.global_batch_size}"
                )
        if self.then is not None and self.loop.max_hours is not None:
            raise ConfigError(
                "then: wanted no loop.max_hours with it, since its steps are counted back from the "
                "last step, which max_hours leaves open: leave one of them out"
            )
        if self.then is not None and self.then.steps >= self.loop.max_steps:
            raise ConfigError(
                f"then.steps: wanted fewer than loop.max_steps = {self.loop.max_steps}, the steps "
                f"of the whole run, got {self.then.steps}"
            )
        if self.batch_warmup is not None:
            self._check_batch_warmup(self.batch_warmup)
        self.schedule.check_warmup(self.schedule_steps)
        if self.then is not None and self.then.lr is not None:
            self._separate(self.then).check_warmup(self.then.steps, name="then.warmup_steps")

    def _check_batch_warmup(self, warmup: BatchWarmupConfig) -> None:
        if not self.most_workers <= warmup.rows < self.global_batch_size:
            raise ConfigError(
                "batch_warmup.rows: wanted at least a row for each of "
                f"{self.most_workers} workers, and fewer than global_batch_size = "
                f"{self.global_batch_size}, got {warmup.rows}"
            )
        if warmup.steps >= (steps := self.phases[0].steps):
            raise ConfigError(
                f"batch_warmup.steps: wanted fewer than the {steps:,} steps on these shards, got "
                f"{warmup.steps:,}: lower it, or train for more steps"
            )

    @property
    def schedule_steps(self) -> int:
        """Return the steps that `schedule` covers: all, or those before a phase with its own
        schedule."""
        separate = self.then is not None and self.then.lr is not None
        return self.phases[0].steps if separate else self.loop.max_steps

    def _separate(self, then: PhaseConfig) -> ScheduleConfig:
        """Return the schedule of a phase that has its own."""
        return replace(self.schedule, warmup_steps=then.warmup_steps)

    @property
    def phases(self) -> "list[Phase]":
        """Return the phases of the run, in order."""
        then, steps, size = self.then, self.loop.max_steps, self.global_batch_size
        if then is None:
            return [Phase(self.shards, steps, size)]
        return [
            Phase(self.shards, steps - then.steps, size),
            Phase(then.shards, then.steps, then.global_batch_size or size),
        ]

    def rows_drawn(self) -> "list[tuple[Phase, int]]":
        """Return each phase and how many rows its steps draw, counted again in every epoch."""
        drawn = [(phase, phase.steps * phase.global_batch_size) for phase in self.phases]
        if (warmup := self.batch_warmup) is not None:
            phase, rows = drawn[0]
            missing = self.global_batch_size - warmup.rows
            drawn[0] = phase, rows - missing * (warmup.steps + 1) // 2
        return drawn

    def learning_rate(self, step: float) -> float:
        """Return the learning rate of a step, counted from 0."""
        then, first = self.then, self.schedule_steps
        if then is None or then.lr is None or step < first:
            return self.optimizer.lr * self.schedule.factor(step, first)
        return then.lr * self._separate(then).factor(step - first, then.steps)

    def encoder(self, tokenizer: Tokenizer, parent: "Bundle | None") -> EncoderConfig:
        """Return the variant with this vocabulary, or the encoder of `parent`; dropout as
        configured."""
        if parent is not None:
            encoder = parent.encoder_config
        else:
            encoder = VARIANTS[self.variant or DEFAULT_VARIANT].config.adapted(
                vocab_size=tokenizer.vocab_size,
                pad_token_id=tokenizer.pad_id,
                sizes_of=None if self.sizes_of is None else VARIANTS[self.sizes_of].config,
            )
        return encoder.adapted(
            hidden_dropout_prob=self.hidden_dropout_prob,
            attention_dropout=self.attention_probs_dropout_prob,
            rope_theta=self.rope_theta,
        )


@dataclass(frozen=True, kw_only=True)
class PretrainCounts(BeforeAndAfter):
    unigram_loss: float
    """In nats, of predicting masked words by how frequent they are."""
    unigram_accuracy: float
    fresh_parts: list[str] | None = None
    """Parts that the continued model lacked; None for a run from fresh weights."""

    @property
    def line(self) -> str:
        losses = f"held-out MLM loss {self.before[MLM_LOSS]:.2f} → {self.after[MLM_LOSS]:.2f}"
        if MLM_ACCURACY not in self.after:
            return losses
        return f"{losses}, {percent(self.after[MLM_ACCURACY])} of masked words right"

    @property
    def sentence(self) -> str:
        losses = (
            "The loss on masked words of held-out text was "
            f"{self.before[MLM_LOSS]:.2f} nats before pretraining and {self.after[MLM_LOSS]:.2f} "
            "after"
        )
        if MLM_ACCURACY not in self.after:
            return f"{losses}."
        return (
            f"{losses}: the model now predicts {percent(self.after[MLM_ACCURACY])} of them "
            f"correctly ({percent(self.unigram_accuracy)} for always guessing the most frequent "
            "word)."
        )

    @property
    def headline(self) -> Headline | None:
        if MLM_ACCURACY not in self.after:
            return None
        return Headline(
            label="masked words right",
            value=percent(self.after[MLM_ACCURACY]),
            beside=f"most frequent word {percent(self.unigram_accuracy)}",
        )


@dataclass(frozen=True)
class Phase:
    """Consecutive steps of a run on the same shards."""

    shards: str
    steps: PositiveInt
    global_batch_size: int


def run(config: PretrainConfig) -> Manifest:
    """Pretrain an encoder and write it as a bundle in Hugging Face layout."""
    place, tokenizer, vocabulary = tokenizer_input(config, config.tokenizer)
    config, inputs = replace(config, tokenizer=place), [vocabulary]
    folder: Path | None = None
    parent: Bundle | None = None
    if config.model is not None:
        folder, parent, source = _parent(config, config.model, tokenizer)
        inputs.append(source)
    labels = {}
    for name, phase in zip(("shards", "then"), config.phases, strict=False):
        shards = ShardSet.read(phase.shards)
        shards.check_tokenizer(tokenizer.digest, config.tokenizer)
        _check_shards(config, phase.shards, shards, config.encoder(tokenizer, parent))
        inputs.append(DatasetInput(name, input_digest(phase.shards, "prepare"), phase.shards))
        labels[name] = shards.label
    if config.optimizer_from is not None and parent is not None:
        _check_optimizer(config, config.optimizer_from, parent, shards)
    if len(set(labels.values())) > 1:
        raise ConfigError(
            f"then.shards: wanted rows with the label of shards, {labels['shards']}, got "
            f"{labels['then']}: prepare both with the same pairs.kind"
        )
    return run_stage(
        "pretrain", config, inputs, lambda digest: _pretrain(config, shards, digest, folder)
    )


def _parent(
    config: PretrainConfig, model: str, tokenizer: Tokenizer
) -> "tuple[Path, Bundle, DatasetInput]":
    """Return the local folder of the bundle to continue from, the bundle, and the bundle as an
    input.

    Raises: ConfigError if its vocabulary is not the run's.
    """
    from tracking.models.hub import load_bundle

    folder, source = bundle_input(config, model)
    parent = load_bundle(folder)
    if parent.tokenizer.digest != tokenizer.digest:
        raise ConfigError(
            f"{model} has vocabulary {parent.tokenizer.digest[:6]}, {config.tokenizer} has "
            f"{tokenizer.digest[:6]}: run `raybert prepare` with --tokenizer {folder} and give "
            "that folder here too, or leave model out to start from fresh weights"
        )
    return folder, parent, source


def _check_optimizer(
    config: PretrainConfig, folder: str, parent: "Bundle", shards: ShardSet
) -> None:
    """Check that the optimizer of the run in `folder` can train `parent`.

    Raises: ConfigError if the run made another bundle, kept no checkpoint, or trained by another
        optimizer or for other objectives.
    """
    from bert_core.train.checkpoint import latest_checkpoint

    way_out = "leave optimizer_from out to begin with a fresh optimizer"
    checkpoint = latest_checkpoint(files.join(folder, CHECKPOINTS))
    made = read_manifest(folder) if checkpoint and is_complete(folder) else None
    if made is None or made.stage != "pretrain":
        raise ConfigError(
            "optimizer_from: wanted the output of a finished `raybert pretrain` with its "
            f"checkpoints, {folder} is none: {way_out}"
        )
    if made.bundle != parent.digest:
        raise ConfigError(
            f"optimizer_from: wanted the run that made {config.model}, {folder} made another "
            f"bundle: give that run, or {way_out}"
        )
    labels = [name for name in LABELS if f"{name}_loss_after" in made.counts]
    name, trained = made.config["optimizer"]["name"], made.config["objectives"] or ["mlm", *labels]
    now = objectives_of(config.objectives, shards)
    if [*trained] != now or name != config.optimizer.name:
        raise ConfigError(
            f"optimizer_from: wanted {config.optimizer.name} that trained {', '.join(now)}, that "
            f"of {folder} is {name} for {', '.join(trained)}: train with those, or {way_out}"
        )


def _check_shards(
    config: PretrainConfig, folder: str, shards: ShardSet, encoder: EncoderConfig
) -> None:
    from bert_core.model.hf import architecture
    from bert_core.model.layers import without_values
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.objectives.catalog import PRETRAINING

    name = config.model or config.variant or DEFAULT_VARIANT
    check_rows(folder, shards, encoder, name)
    objectives = objectives_of(config.objectives, shards)
    try:
        with without_values():
            model = ObjectiveModel(encoder, [PRETRAINING[key](encoder) for key in objectives])
        architecture(encoder, model.in_transformers)
    except ConfigError as error:
        if config.objectives is not None:
            raise
        raise ConfigError(
            f"{folder}: wanted rows that {name} can be trained on, got rows with "
            f"{shards.label}, which none of its objectives learns: prepare with another "
            "pairs.kind, or set objectives"
        ) from error


def _pretrain(config: PretrainConfig, shards: ShardSet, digest: str, folder: Path | None) -> Result:
    """Pretrain, and measure the model before and after.

    Args:
        shards: those of the last phase, on which the model is measured.
        folder: of the bundle to continue from; None starts from fresh weights.
    """
    from bert_core.bundle.weights import fresh_parts
    from bert_core.train.checkpoint import latest_checkpoint, read_points
    from tracking.models.hub import load_bundle

    tokenizer = Reference.parse(config.tokenizer).tokenizer()
    parent = None if folder is None else load_bundle(folder)
    build = partial(build_model, config, shards, tokenizer, parent)
    lineage: dict[str, Any] = {"stage": "pretrain", "data": _data(config.phases, tokenizer)}
    lacking: list[str] | None = None
    if parent is not None:
        lineage |= {"parent": parent.digest, "parent_lineage": parent.lineage}
        lacking = sorted(fresh_parts(parent, build()))
        parts = ", ".join(lacking) or "nothing"
        say(f"pretrain: continuing from {config.model}; it lacks, and starts fresh: {parts}")
    for phase, rows in config.rows_drawn():
        train = sum(info.rows for info in ShardSet.read(phase.shards).split(TRAIN))
        say(f"pretrain: {rows / train:.3g} passes over the {train:,} rows of {phase.shards}")
    fit(partial(worker, folder), config, digest, config.loop, "pretraining")
    # Not from the record: if a run loses steps, and its hours end before it has redone them,
    # the record keeps the points of the lost steps.
    checkpoint = latest_checkpoint(files.join(config.output, CHECKPOINTS))
    assert checkpoint is not None  # the last step wrote one
    steps, records = checkpoint.step, dict(read_points(checkpoint))
    fresh, trained = (names.measured_on(HELD_OUT, records[step]) for step in (0, steps))
    unigram_loss, unigram_accuracy = _unigram(shards)
    counts = PretrainCounts(
        before=fresh,
        after=trained,
        unigram_loss=unigram_loss,
        unigram_accuracy=unigram_accuracy,
        steps=steps,
        tokens_per_s=median_speed(records),
        fresh_parts=lacking,
    )
    outputs = write_bundle(
        config,
        digest,
        build(),
        tokenizer,
        metrics=trained,
        lineage=lineage,
        trained_rows=NO_ROWS if parent is None else parent.trained_rows,
        checkpoint=checkpoint,
    )
    if little := learnt_little(config, fresh[MLM_LOSS], trained[MLM_LOSS], unigram_loss):
        say(f"pretrain: {little}")
    return finished(config, "pretrain", outputs, counts)


def learnt_little(config: PretrainConfig, before: float, after: float, unigram: float) -> str:
    """Describe the signs that little was learnt, and what to try; empty if there are none.

    Args:
        before, after: loss of masked words on held-out rows, before and after the run.
        unigram: the same loss of the unigram baseline.
    """
    if after >= unigram:
        why = f"word frequencies alone have a loss of {unigram:.3f}"
    elif before - after < 0.001 * before:
        why = f"the loss began at {before:.3f}"
    else:
        return ""
    return (
        f"{why}, so little was learnt: try more steps than {config.loop.max_steps:,} "
        f"(--loop.max_steps), or a higher peak than {config.optimizer.lr:g} (--optimizer.lr)"
    )


def _data(phases: Sequence[Phase], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the vocabulary, and the corpus and shards of each phase, for the lineage."""
    data: list[dict[str, Any]] = [
        {"name": "vocabulary", "digest": tokenizer.digest, "tokens": tokenizer.vocab_size}
    ]
    for phase in phases:
        manifest = read_manifest(phase.shards)
        counts = {
            name: {key: manifest.counts[key] for key in keys if key in manifest.counts}
            for name, keys in (("corpus", ("source", "documents", "tokens")), ("shards", ("rows",)))
        }
        data.append({"name": "corpus", "digest": manifest.inputs["corpus"], **counts["corpus"]})
        data.append({"name": "shards", "digest": manifest.digest, **counts["shards"]})
    return data


def _unigram(shards: ShardSet) -> tuple[float, float]:
    """Return the loss and accuracy of a baseline that predicts held-out tokens by frequency.

    The frequency is how often the training shards mask each token or, if masks are drawn at
    training time, how often it occurs.
    """
    cache = local_cache()

    def labels(split: str) -> Iterator[np.ndarray]:
        rows = 0
        for info in shards.split(split):
            if rows < UNIGRAM_ROWS:
                rows += info.rows
                opened = shards.open(info, cache)
                if shards.masker is None:
                    yield opened.masked_labels
                else:
                    yield opened.input_ids[~np.isin(opened.input_ids, shards.special_ids)]

    return unigram_baseline(labels(TRAIN), labels(HELD_OUT), shards.vocab_size)


def build_model(
    config: PretrainConfig, shards: ShardSet, tokenizer: Tokenizer, parent: "Bundle | None"
) -> "ObjectiveModel":
    """Build the model to train, with the weights of `parent`, or with fresh weights drawn with the
    seed."""
    import torch

    from bert_core.bundle import weights
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.objectives.catalog import PRETRAINING

    encoder = config.encoder(tokenizer, parent)
    torch.manual_seed(config.loop.seed)
    names = objectives_of(config.objectives, shards)
    objectives = [PRETRAINING[name](encoder) for name in names]
    if parent is None:
        return ObjectiveModel(encoder, objectives)
    return weights.build_model(replace(parent, encoder_config=encoder), objectives)


def worker(folder: Path | None, config: PretrainConfig, digest: str, report: Report) -> None:
    """Train on one worker; `folder` has the bundle to continue from."""
    from bert_core.batches import Growth, PhasedBatches
    from bert_core.train.checkpoint import latest_checkpoint
    from bert_core.train.loop import evaluate
    from pipelines.training.worker import RankPlace, Training, train
    from tracking.models.hub import load_bundle

    place = RankPlace.here(config.threads_per_worker)
    tokenizer = Reference.parse(config.tokenizer).tokenizer()
    parent = None if folder is None else load_bundle(folder)
    encoder = config.encoder(tokenizer, parent)
    batches_of = partial(
        batches,
        place=place,
        encoder=encoder,
        loop=config.loop,
        pad_id=tokenizer.pad_id,
        micro_batch_tokens=config.micro_batch_tokens,
        window_shards=config.window_shards,
    )
    phases = config.phases
    shards = [ShardSet.read(phase.shards) for phase in phases]
    by_phase = [
        batches_of(rows, TRAIN, global_batch_size=phase.global_batch_size)
        for rows, phase in zip(shards, phases, strict=True)
    ]
    if (warmup := config.batch_warmup) is not None:
        growth = Growth(warmup.rows, config.global_batch_size, warmup.steps)
        by_phase[0] = replace(by_phase[0], growth=growth)
    held_out = batches_of(shards[-1], HELD_OUT, global_batch_size=phases[-1].global_batch_size)

    train(
        Training(
            config=config,
            place=place,
            model=build_model(config, shards[-1], tokenizer, parent),
            batches=by_phase[0]
            if len(by_phase) == 1
            else PhasedBatches(by_phase[0], phases[0].steps, by_phase[1]),
            measure=lambda model: evaluate(model, held_out.once(config.held_out_rows), config.loop),
            measure_every_steps=config.evaluate_every_steps,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            loop=config.loop,
            digest=digest,
            checkpoints=files.join(config.output, CHECKPOINTS),
            carried=None
            if config.optimizer_from is None
            else latest_checkpoint(files.join(config.optimizer_from, CHECKPOINTS)),
        ),
        report,
    )
