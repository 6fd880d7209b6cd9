"""`raybert continue`: goes on pretraining any model on one's own text, in one command.

It runs `prepare` and `pretrain` with the model's own vocabulary, or with one that has more tokens.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bert_core import files
from bert_core.checks import (
    NonNegativeInt,
    PositiveFinite,
    PositiveFloat,
    PositiveInt,
    Range,
    ShareBelowOne,
    check_fields,
)
from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import PairsConfig
from bert_core.data.shards import ShardSet
from bert_core.data.splits import TRAIN
from bert_core.errors import ConfigError
from bert_core.scores import Precision
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from pipelines import prepare, pretrain
from pipelines.corpus.config import CorpusConfig
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.progress import counted, say
from pipelines.runtime.stage_config import INPUT, StageConfig


@dataclass(frozen=True, kw_only=True)
class ContinueConfig(StageConfig):
    """Go on pretraining a model on other text; `output` gets the folders `start` (with new tokens
    only), `shards` and `pretrain`. Defaults: those of BERT's pretraining, on whole sentences."""

    model: str = field(metadata=INPUT)
    """Model to go on from: a bundle's folder, a URI, models:/name@alias, or owner/name of the
    Hugging Face hub."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """The text."""
    add_tokens: tuple[str, ...] = ()
    """Words that the vocabulary gets, as they are written; by default it stays as it is. Each
    begins as the mean of the pieces that it was cut into."""
    max_length: Annotated[int, Range(least=8)] = 128
    """Maximum number of tokens per row, special tokens included."""
    masked_share: ShareBelowOne = 0.15
    """Share of a row's tokens to predict, drawn afresh in every epoch."""
    epochs: PositiveFinite = 1.0
    """Passes over the text."""
    batch_size: PositiveInt = 32
    """Rows per optimizer step, over all workers."""
    micro_batch_tokens: PositiveInt = 16_384
    """Tokens per forward pass of a worker, padding included."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate; it falls to 0 at the end."""
    precision: Precision = "bf16"
    """`bf16` runs matrix products in bfloat16; `fp32` is faster on CPUs without it."""
    held_out_rows: PositiveInt = 8192
    """Maximum number of held-out rows to measure the model on."""
    seed: NonNegativeInt = 0
    """Seed of all random draws."""
    optimizer: Literal["fresh", "carried"] = "fresh"
    """`carried` goes on with the optimizer of the pretraining whose output `model` is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.optimizer == "carried" and self.add_tokens:
            raise ConfigError(
                "optimizer: wanted fresh with add_tokens, for whose rows there is nothing to carry "
                "on, got carried: leave one of the two out"
            )


def run(config: ContinueConfig) -> None:
    """Prepare the text, then pretrain on it.

    Raises: ConfigError for tokens that cannot be added, and what `prepare` and `pretrain` raise.
    """
    shared: dict[str, Any] = {
        each.name: getattr(config, each.name)
        for each in fields(StageConfig)
        if each.name != "output"
    }
    model = config.model
    if config.add_tokens:
        model = _started(config, files.join(config.output, "start"))
    rows = files.join(config.output, "shards")
    predicted = max(1, round(config.max_length * config.masked_share))
    prepare.run(
        prepare.PrepareConfig(
            output=rows,
            tokenizer=model,
            corpus=config.corpus,
            pairs=PairsConfig(kind="full_sentences", max_length=config.max_length, dupe_factor=1),
            masking=MaskingConfig(
                masked_lm_prob=config.masked_share, max_predictions_per_seq=predicted, dynamic=True
            ),
            seed=config.seed,
            **shared,
        )
    )
    count = sum(info.rows for info in ShardSet.read(rows).split(TRAIN))
    steps = max(1, round(config.epochs * count / config.batch_size))
    say(f"continue: {counted(steps, 'step')}, {config.epochs:g} times {counted(count, 'row')}")
    pretrain.run(
        pretrain.PretrainConfig(
            output=files.join(config.output, "pretrain"),
            model=model,
            tokenizer=model,
            optimizer_from=model if config.optimizer == "carried" else None,
            shards=rows,
            objectives=("mlm",),
            global_batch_size=min(config.batch_size, max(1, count)),
            micro_batch_tokens=config.micro_batch_tokens,
            held_out_rows=config.held_out_rows,
            loop=LoopConfig(max_steps=steps, precision=config.precision, seed=config.seed),
            optimizer=OptimizerConfig(lr=config.lr),
            schedule=ScheduleConfig(warmup_steps=steps // 10),
            **shared,
        )
    )


def _started(config: ContinueConfig, output: str) -> str:
    """Write the model with more tokens to a folder, unless it is there; return the folder.

    Raises: ConfigError if it would be a URI, if a token cannot be added, or if the folder has
        other tokens.
    """
    from bert_core.bundle.format import About, load_bundle
    from bert_core.bundle.new_words import widened, with_new_tokens
    from bert_core.bundle.writing import save_bundle

    folder = files.local_path(output)
    if folder is None:
        raise ConfigError(
            f"output: wanted a folder with add_tokens, got the URI {config.output}: write to a "
            "folder, and copy it"
        )
    place, source = bundle_input(replace(config, output=str(folder)), config.model)
    parent = load_bundle(place)
    tokenizer = with_new_tokens(parent.tokenizer, config.add_tokens)
    if Path(folder).exists():
        before = load_bundle(folder)
        if (
            before.tokenizer.digest == tokenizer.digest
            and before.lineage["parent"] == parent.digest
        ):
            return str(folder)
        raise ConfigError(
            f"{folder}: wanted the model with the tokens in add_tokens, it was made with others: "
            "use another output, or remove it"
        )
    pieces = [len(ids) for ids in parent.tokenizer.ids(config.add_tokens)]
    lineage = {"stage": "continue", "parent": parent.digest, "parent_lineage": parent.lineage}
    about = About(lineage=lineage, trained_rows=parent.trained_rows)
    save_bundle(folder, widened(parent, tokenizer), tokenizer, about)
    say(
        f"continue: {source.source or config.model} has {counted(len(pieces), 'new token')}, which "
        f"were {sum(pieces) / len(pieces):.1f} pieces each"
    )
    return str(folder)
