"""Shards → pretrained bundle, from fresh weights or from those of another bundle."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core import files
from bert_core.checks import NonNegativeInt, PositiveFloat, PositiveInt, check_fields
from bert_core.data.shards import ShardSet
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError
from bert_core.manifest import BUNDLE, Manifest, read_manifest
from bert_core.metrics.language_model import unigram_baseline
from bert_core.model.config import EncoderConfig
from bert_core.model.variants import VARIANTS
from bert_core.tasks.digests import NO_ROWS
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from pipelines.runtime.progress import say
from pipelines.runtime.stage import INPUT, REMARK, Result, input_digest, run_stage
from pipelines.training.config import TrainingConfig
from pipelines.training.driver import curves, fit, write_bundle
from pipelines.training.objectives import check_names, objectives_of
from pipelines.training.records import CHECKPOINTS, Report, median_speed, read_records
from pipelines.training.shard_batches import CACHE, batches, check_rows
from tracking import metric_names as names
from tracking.metric_names import LOSS, MLM_LOSS
from tracking.runs import DatasetInput

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.objectives.base import ObjectiveModel

UNIGRAM_ROWS = 100_000
DEFAULT_VARIANT = "bert-base"


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """The last steps of a run, on other rows: BERT sees 512 tokens in a tenth of its steps."""

    shards: str = field(metadata=INPUT)
    """Folder or URI of `raybert prepare`, of the same vocabulary and with the same label."""
    steps: PositiveInt
    """How many of the run's steps these are."""
    global_batch_size: PositiveInt | None = None
    """Rows of an optimizer step; unset takes the run's."""
    lr: PositiveFloat | None = None
    """Peak of a schedule of their own, which then begins here, as the run's ends here; unset goes
    on with the run's."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which a learning rate of their own climbs."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="then.")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(TrainingConfig):
    """Which encoder to train on which shards. Defaults: Devlin et al. 2019, appendix A.2."""

    shards: str = field(metadata=INPUT)
    """Folder or URI of `raybert prepare`."""
    tokenizer: str = field(metadata=INPUT)
    """Folder of the vocabulary that the shards were made with."""
    variant: str | None = None
    """Name of an encoder; `raybert list variants` shows those there are. Unset is bert-base, or the
    encoder of `model`."""
    sizes_of: str | None = None
    """Another encoder whose number of layers, widths and heads it takes, for a small machine."""
    model: str | None = field(default=None, metadata=INPUT)
    """Bundle of the same vocabulary to go on from: a folder, a URI, or models:/name@alias; unset
    begins with fresh weights."""
    objectives: tuple[str, ...] | None = None
    """What is learned: `mlm` (masked words; as DeBERTa does, `emd_mlm` or `rtd`), `nsp` and `sop`
    (what two segments are to each other), `span_boundary` (words of a span by what stands beside
    it). Unset is masked words, and what the rows' label says."""
    hidden_dropout_prob: float | None = None
    """Dropout of embeddings and of what each sub-layer adds; unset takes the variant's own."""
    attention_probs_dropout_prob: float | None = None
    """Dropout of attention probabilities; 0 lets the fused attention run, unset as above."""
    global_batch_size: PositiveInt = 256
    """Rows of an optimizer step, over all workers."""
    window_shards: PositiveInt = 8
    """Rows are permuted within so many shards; a worker needs only these."""
    evaluate_every_steps: NonNegativeInt = field(default=0, metadata=REMARK)
    """Steps between two evaluations on held-out rows, each with a checkpoint; 0 evaluates at the
    beginning and the end."""
    held_out_rows: PositiveInt = 8192
    """Most held-out rows that the model is measured on, before and after."""
    loop: LoopConfig = field(default_factory=lambda: LoopConfig(max_steps=1_000_000))
    """Length, precision and seed."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """How weights are moved, and the peak learning rate."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate of every step."""
    then: PhaseConfig | None = None
    """The last steps, where they see other rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("variant", "sizes_of"):
            given = getattr(self, name)
            if given is not None and given not in VARIANTS:
                raise ConfigError(f"{name}: wanted one of {', '.join(VARIANTS)}, got {given!r}")
            if given is not None and self.model is not None:
                raise ConfigError(
                    f"{name}: wanted none beside model = {self.model!r}, whose encoder is trained "
                    f"as it is, got {given!r}: leave one of the two out"
                )
        check_names(self.objectives)
        for name, phase in zip(("", "then."), self.phases, strict=False):
            if phase.global_batch_size < self.most_workers:
                raise ConfigError(
                    f"{name}global_batch_size: wanted at least a row for each of "
                    f"{self.most_workers} workers, got {phase.global_batch_size}"
                )
        if self.then is not None and self.loop.max_hours is not None:
            raise ConfigError(
                "then: wanted no loop.max_hours beside it, as its steps are counted from the last "
                "one, which hours leave open: leave one of them out"
            )
        if self.then is not None and self.then.steps >= self.loop.max_steps:
            raise ConfigError(
                f"then.steps: wanted fewer than loop.max_steps = {self.loop.max_steps}, all steps "
                f"of the run, got {self.then.steps}"
            )

    @property
    def phases(self) -> "list[Phase]":
        """What is trained on, in the order of the run."""
        then, steps, size = self.then, self.loop.max_steps, self.global_batch_size
        if then is None:
            return [Phase(self.shards, steps, size)]
        return [
            Phase(self.shards, steps - then.steps, size),
            Phase(then.shards, then.steps, then.global_batch_size or size),
        ]

    def learning_rate(self, step: float) -> float:
        """Of a step, counted from 0."""
        then, steps, schedule = self.then, self.loop.max_steps, self.schedule
        if then is None or then.lr is None:
            return self.optimizer.lr * schedule.factor(step, steps)
        first = steps - then.steps
        if step < first:
            return self.optimizer.lr * schedule.factor(step, first)
        own = replace(schedule, warmup_steps=then.warmup_steps)
        return then.lr * own.factor(step - first, then.steps)

    def encoder(self, tokenizer: Tokenizer, parent: "Bundle | None") -> EncoderConfig:
        """The variant with this vocabulary, or the encoder of `parent`, with this dropout."""
        if parent is not None:
            known = parent.encoder_config
        else:
            known = VARIANTS[self.variant or DEFAULT_VARIANT].config.adapted(
                vocab_size=tokenizer.vocab_size,
                pad_token_id=tokenizer.pad_id,
                sizes_of=None if self.sizes_of is None else VARIANTS[self.sizes_of].config,
            )
        return known.adapted(
            hidden_dropout_prob=self.hidden_dropout_prob,
            attention_dropout=self.attention_probs_dropout_prob,
        )


@dataclass(frozen=True)
class Phase:
    """Steps of a run that see rows of one kind."""

    shards: str
    steps: PositiveInt
    global_batch_size: int


def run(config: PretrainConfig) -> Manifest:
    """Pretrain an encoder and write it as a bundle in Hugging Face layout."""
    tokenizer = Tokenizer.load(config.tokenizer)
    inputs = [DatasetInput("tokenizer", tokenizer.digest, config.tokenizer)]
    folder: Path | None = None
    parent: Bundle | None = None
    if config.model is not None:
        folder, parent = _parent(config, config.model, tokenizer)
        inputs.append(DatasetInput("model", parent.digest, config.model))
    labels = {}
    for name, phase in zip(("shards", "then"), config.phases, strict=False):
        shards = ShardSet.read(phase.shards)
        shards.check_tokenizer(tokenizer.digest, config.tokenizer)
        _check_shards(config, phase.shards, shards, config.encoder(tokenizer, parent))
        inputs.append(DatasetInput(name, input_digest(phase.shards, "prepare"), phase.shards))
        labels[name] = shards.label
    if len(set(labels.values())) > 1:
        raise ConfigError(
            f"then.shards: wanted rows with the label of shards, {labels['shards']}, they have "
            f"{labels['then']}: prepare both with the same pairs.kind"
        )
    return run_stage(
        "pretrain", config, inputs, lambda digest: _pretrain(config, shards, digest, folder)
    )


def _parent(config: PretrainConfig, model: str, tokenizer: Tokenizer) -> "tuple[Path, Bundle]":
    """Where the bundle to go on from lies on this machine, and what it holds.

    Raises: ConfigError if it has another vocabulary than the run.
    """
    from bert_core.bundle.format import load_bundle
    from tracking.resolve import resolve

    folder = resolve(model, uri=config.tracking_uri)
    parent = load_bundle(folder)
    if parent.tokenizer.digest != tokenizer.digest:
        raise ConfigError(
            f"{model} has vocabulary {parent.tokenizer.digest[:6]}, {config.tokenizer} has "
            f"{tokenizer.digest[:6]}: run `raybert prepare` with --tokenizer {folder} and give "
            "that folder here too, or leave model out to begin with fresh weights"
        )
    return folder, parent


def _check_shards(
    config: PretrainConfig, folder: str, shards: ShardSet, encoder: EncoderConfig
) -> None:
    import torch

    from bert_core.model.hf import architecture
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.objectives.catalog import PRETRAINING

    name = config.model or config.variant or DEFAULT_VARIANT
    check_rows(folder, shards, encoder, name)
    objectives = objectives_of(config.objectives, shards)
    try:
        with torch.device("meta"):
            model = ObjectiveModel(encoder, [PRETRAINING[each](encoder) for each in objectives])
        architecture(encoder, model.in_transformers)
    except ConfigError as error:
        if config.objectives is not None:
            raise
        raise ConfigError(
            f"{folder}: wanted rows that {name} can be trained on, they have {shards.label}, which "
            "no objective of it learns: prepare with another pairs.kind, or name the objectives"
        ) from error


def _pretrain(config: PretrainConfig, shards: ShardSet, digest: str, folder: Path | None) -> Result:
    """`shards` are those of the last phase, which the model is measured on; in `folder` lies the
    bundle that it goes on from."""
    from bert_core.bundle.format import load_bundle
    from bert_core.bundle.weights import fresh_parts

    tokenizer = Tokenizer.load(config.tokenizer)
    parent = None if folder is None else load_bundle(folder)
    build = partial(build_model, config, shards, tokenizer, parent)
    lineage: dict[str, Any] = {"stage": "pretrain", "data": _data(config, tokenizer)}
    origin: dict[str, list[str]] = {}
    if parent is not None:
        lineage |= {"parent": parent.digest, "parent_lineage": parent.lineage}
        origin["fresh_parts"] = sorted(fresh_parts(parent, build()))
        lacking = ", ".join(origin["fresh_parts"]) or "nothing"
        say(f"pretrain: going on from {config.model}, which lacks {lacking} of what is trained")
    fit(partial(worker, folder), config, digest, config.loop, "pretraining")
    records = read_records(config.local_folder)
    steps = max(step for step, numbers in records.items() if names.on(HELD_OUT, LOSS) in numbers)
    fresh, trained = (names.measured_on(HELD_OUT, records[step]) for step in (0, steps))
    counts = {
        **{names.before(name): value for name, value in fresh.items()},
        **{names.after(name): value for name, value in trained.items()},
        **_unigram(config, shards),
        "steps": steps,
        names.TOKENS_PER_S: median_speed(records),
        **origin,
    }
    outputs = write_bundle(
        config,
        digest,
        build(),
        tokenizer,
        metrics=trained,
        lineage=lineage,
        trained_rows=NO_ROWS if parent is None else parent.trained_rows,
    )
    say(
        f"pretrain: held-out MLM loss {fresh[MLM_LOSS]:.3f} → {trained[MLM_LOSS]:.3f} "
        f"(unigram baseline {counts[names.UNIGRAM_LOSS]:.3f}), "
        f"bundle in {files.join(config.output, BUNDLE)}"
    )
    return Result(outputs=outputs, counts=counts, artifacts=curves(config))


def _data(config: PretrainConfig, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The vocabulary, and the corpus and shards of each phase, for the lineage."""
    data: list[dict[str, Any]] = [
        {"name": "vocabulary", "digest": tokenizer.digest, "tokens": tokenizer.vocab_size}
    ]
    for phase in config.phases:
        made = read_manifest(phase.shards)
        counts = {
            name: {one: made.counts[one] for one in its if one in made.counts}
            for name, its in (("corpus", ("source", "documents", "tokens")), ("shards", ("rows",)))
        }
        data.append({"name": "corpus", "digest": made.inputs["corpus"], **counts["corpus"]})
        data.append({"name": "shards", "digest": made.digest, **counts["shards"]})
    return data


def _unigram(config: PretrainConfig, shards: ShardSet) -> dict[str, float]:
    """Loss and accuracy of predicting held-out tokens by how often training shards mask them.

    Where masks are drawn at training time, by how often they stand there.
    """

    def labels(split: str) -> Iterator[np.ndarray]:
        rows = 0
        for info in shards.split(split):
            if rows < UNIGRAM_ROWS:
                rows += info.rows
                opened = shards.open(info, CACHE)
                if shards.masker is None:
                    yield opened.masked_labels
                else:
                    yield opened.input_ids[~np.isin(opened.input_ids, shards.special_ids)]

    loss, accuracy = unigram_baseline(labels(TRAIN), labels(HELD_OUT), shards.vocab_size)
    return {names.UNIGRAM_LOSS: loss, names.UNIGRAM_ACCURACY: accuracy}


def build_model(
    config: PretrainConfig, shards: ShardSet, tokenizer: Tokenizer, parent: "Bundle | None"
) -> "ObjectiveModel":
    """What is trained: with fresh weights, the same for the same seed, or those of `parent`."""
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
    """One rank; in `folder` lies the bundle that it goes on from."""
    from bert_core.batches import PhasedBatches
    from bert_core.bundle.format import load_bundle
    from bert_core.train.loop import evaluate
    from pipelines.training.worker import Place, Training, train

    place = Place.here(config)
    tokenizer = Tokenizer.load(config.tokenizer)
    parent = None if folder is None else load_bundle(folder)
    encoder = config.encoder(tokenizer, parent)
    some = partial(
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
    made = [
        some(rows, TRAIN, global_batch_size=phase.global_batch_size)
        for rows, phase in zip(shards, phases, strict=True)
    ]
    held_out = some(shards[-1], HELD_OUT, global_batch_size=phases[-1].global_batch_size)
    train(
        Training(
            config=config,
            place=place,
            model=build_model(config, shards[-1], tokenizer, parent),
            batches=made[0] if len(made) == 1 else PhasedBatches(made[0], phases[0].steps, made[1]),
            measure=lambda model: evaluate(model, held_out.once(config.held_out_rows), config.loop),
            measure_every_steps=config.evaluate_every_steps,
            optimizer=config.optimizer,
            learning_rate=config.learning_rate,
            loop=config.loop,
            digest=digest,
            checkpoints=files.join(config.output, CHECKPOINTS),
        ),
        report,
    )
