"""Every stage says itself what it came to."""

import importlib
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields
from inspect import isabstract
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from bert_core.manifest import Manifest, read_manifest, write_manifest
from pipelines.configure import STAGES
from pipelines.corpus.docstrings import DocstringsCounts
from pipelines.distill import DistillCounts, ShardsCounts
from pipelines.evaluate import EvaluateCounts
from pipelines.export import ExportCounts
from pipelines.extract import ExtractCounts
from pipelines.glue import GlueCounts
from pipelines.predict import PredictCounts
from pipelines.prepare import PrepareCounts
from pipelines.pretrain import PretrainCounts
from pipelines.publish import PublishCounts
from pipelines.runtime.result import Counts
from pipelines.search import SearchCounts
from pipelines.training.seeds import SeedsCounts
from pipelines.tune import TuneCounts
from pipelines.vocab import VocabCounts

MODULES = {word: importlib.import_module(stage.module) for word, stage in STAGES.items()}
METRICS = ("accuracy", "selection_accuracy", "loss", "mlm_loss", "mlm_accuracy")


def _kinds(of: type[Counts] = Counts) -> Iterator[type[Counts]]:
    for kind in of.__subclasses__():
        if not isabstract(kind):
            yield kind
        yield from _kinds(kind)


KINDS = sorted(set(_kinds()), key=lambda kind: kind.__name__)


def value_of(hint: Any, *, full: bool) -> Any:
    """A value of the type; of an optional one, None unless `full`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if types.NoneType in inner and not full:
            return None
        return value_of(inner[0], full=full)
    if origin is tuple:
        return (0.25, 0.75)
    if origin is list:
        return [value_of(inner[0], full=full)] * (2 if full else 1)
    if origin in (dict, Mapping):
        return {name: value_of(inner[1], full=full) for name in METRICS}
    return {str: "accuracy", int: 1200, float: 0.5, bool: True, Any: 0.5}[hint]


def example(kind: type[Counts], *, full: bool) -> Counts:
    hints = get_type_hints(kind)
    return kind(**{one.name: value_of(hints[one.name], full=full) for one in fields(kind)})


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_stages_result_is_in_its_manifest(kind: type[Counts], full: bool, tmp_path: Path) -> None:
    counts = example(kind, full=full)
    assert counts.line
    assert counts.line == counts.line.strip()
    assert "\n" not in counts.line
    assert not counts.sentence[0].islower()
    assert counts.sentence.endswith(".")
    assert counts.headline is None or (counts.headline.label and counts.headline.value)
    manifest = Manifest(
        stage="x",
        digest="d",
        config={},
        counts=json.loads(json.dumps(counts.entries())),
        line=counts.line,
        sentence=counts.sentence,
        headline=counts.headline,
    )
    write_manifest(str(tmp_path), manifest)
    assert read_manifest(str(tmp_path)) == manifest


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_counts_with_words(stage: str) -> None:
    known = [value for value in vars(MODULES[stage]).values() if isinstance(value, type)]
    assert {*KINDS} & {*known}


SEEDS: dict[str, Any] = {
    "remarks": {}, "train_rows": 2700, "held_out_rows": 2463, "labels": 2, "steps": 40,
    "tokens_per_s": 9.0, "primary_metric": "accuracy", "baseline": {"accuracy": 0.2},
}  # fmt: skip
ONE_SEED = SEEDS | {"seeds": [{"seed": 0}], "deviations": {"accuracy": 0.0, "steps": 0.0}}
ONE_SEED |= {"means": {"accuracy": 0.8, "steps": 40.0}}
PARTS: dict[str, Any] = {
    "rows": 1200, "rejected": 0, "reasons": {}, "remarks": {}, "parts": 1, "tokens_per_s": 9.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "line", "sentence"),
    [
        (
            DocstringsCounts(
                modules=1000, held_out_modules=80, characters=24_400_000, duplicates_left_out=1,
                labelled_train=1, labelled_held_out=1,
            ),
            "24.4 M characters in 1,000 modules",
            "The text is 24.4 M characters of prose from 1,000 modules, 80 of which no training "
            "sees.",
        ),
        (
            VocabCounts(
                vocab_size=4000, tokenizer_digest="d", documents=1114, words=1_100_000,
                words_per_s=1.0, corpus_bytes=1,
            ),
            "4,000 word pieces from 1.1 M words",
            "The vocabulary has 4,000 word pieces, learnt from 1.1 M words of 1,114 documents.",
        ),
        (
            PrepareCounts(
                source="s", read={}, written={}, documents=9, tokens=7_400_000, rows=143_695,
                corpus_bytes=1, peak_memory_bytes=1, tokenizer_digest="d", vocab_size=1,
                max_length=64, layout={},
            ),
            "7.4 M tokens, 143,695 rows",
            "9 documents with 7.4 M tokens were cut into 143,695 rows of up to 64 tokens.",
        ),
        (
            PretrainCounts(
                before={"mlm_loss": 8.31}, after={"mlm_loss": 5.08, "mlm_accuracy": 0.202},
                unigram_loss=6.0, unigram_accuracy=0.05, steps=1, tokens_per_s=1.0,
            ),
            "held-out MLM loss 8.31 → 5.08, 20.2 % of masked words right",
            "The loss on masked words of held-out text was 8.31 nats before pretraining and 5.08 "
            "after: the model now predicts 20.2 % of them correctly (5.0 % for always guessing the "
            "most frequent word).",
        ),
        (
            SeedsCounts(**ONE_SEED),
            "accuracy 80.0 %",
            "Fine-tuned on 2,700 labelled rows, it reaches accuracy 80.0 % on 2,463 rows it has "
            "not seen (without reading the text: 20.0 %).",
        ),
        (
            SeedsCounts(**ONE_SEED | {"remarks": {"held_out_rows_seen_in_training": 63}}),
            "accuracy 80.0 %",
            "Fine-tuned on 2,700 labelled rows, it reaches accuracy 80.0 % on 2,463 held-out rows, "
            "63 of which it has seen (without reading the text: 20.0 %).",
        ),
        (
            SeedsCounts(
                **SEEDS | {"primary_metric": "mrr", "held_out_rows": None},
                seeds=[{"seed": 0}, {"seed": 1}], means={"selection_mrr": 0.5},
                deviations={"selection_mrr": 0.01},
            ),
            "mean reciprocal rank 0.5 ± 0.01 on the selection rows, 2 seeds",
            "Fine-tuned on 2,700 labelled rows, it reaches mean reciprocal rank 0.5 ± 0.01 over 2 "
            "seeds on the rows that selected it.",
        ),
        (
            DistillCounts(**ONE_SEED, sizes={}, augmented_rows=1700, against_teacher={}),
            "accuracy 80.0 %",
            "Distilled from its teacher on 1,000 labelled rows, it reaches accuracy 80.0 % on "
            "2,463 rows it has not seen (without reading the text: 20.0 %).",
        ),
        (
            ShardsCounts(
                before={"loss": 2.307}, after={"loss": 0.1473}, sizes={}, steps=1, tokens_per_s=1.0
            ),
            "held-out loss 2.31 → 0.147",
            "Distilled from its teacher on unlabelled text: its loss on held-out rows was 2.31 "
            "before and is 0.147 now.",
        ),
        (
            TuneCounts(
                trials=4, states={}, best=2, parameters={"lr": 1e-3}, metric="accuracy", score=0.9,
                held_out={},
            ),
            "best of 4: accuracy 90.0 %, lr 0.001",
            "Trial 2 is the best of 4: accuracy 90.0 %, lr 0.001.",
        ),
        (
            EvaluateCounts(
                source="s", rows=2000, primary_metric="f1", metrics={"f1": 0.5},
                intervals={"f1": (0.48, 0.52)}, baseline={}, remarks={}, tokens_per_s=1.0,
            ),
            "F1 50.0 % (48.0 % to 52.0 %), 2,000 rows",
            "Measured on 2,000 rows, the model has F1 50.0 %; the 95 % interval is 48.0 % to "
            "52.0 %.",
        ),
        (
            PublishCounts(version="3", is_champion=True, why="it is the first version"),
            "version 3, the champion",
            "In the registry, it is the first version.",
        ),
        (
            ExportCounts(
                size_bytes=24_600_000, fp32_bytes=1, largest_difference=3.1e-6, runs=[],
                measured={},
            ),
            "24.6 MB, scores within 3.1e-06 of the model's",
            "The exported graph is 24.6 MB; its scores differ from the model's by 3.1e-06 at most.",
        ),
        (PredictCounts(**PARTS), "1,200 rows", "The model answered 1,200 rows."),
        (PredictCounts(**PARTS | {"rows": 1}), "1 row", "The model answered 1 row."),
        (ExtractCounts(**PARTS), "1,200 rows", "Fields were extracted from 1,200 documents."),
        (
            SearchCounts(queries=3, rows=1200),
            "3 queries, 1,200 rows",
            "3 queries were compared with 1,200 rows.",
        ),
        (SearchCounts(queries=1, rows=1), "1 query, 1 row", "1 query was compared with 1 row."),
        (
            GlueCounts(rows=5463, filled_rows=277, scores={}),
            "5,463 rows",
            "The submission has answers to 5,463 rows of GLUE's test sets; 277 others are filled "
            "in.",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Counts) else "",
)  # fmt: skip
def test_a_line_and_a_sentence_state_the_result(counts: Counts, line: str, sentence: str) -> None:
    told = (counts.line, counts.sentence)
    assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in told] == [line, sentence]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (SeedsCounts, "accuracy_mean accuracy_std baseline_accuracy"),
        (PretrainCounts, "mlm_loss_before mlm_loss_after unigram_loss"),
        (EvaluateCounts, "accuracy accuracy_low accuracy_high baseline_accuracy"),
        (TuneCounts, "held_out_accuracy selection_accuracy"),
        (PredictCounts, "rejected_accuracy"),
    ],
)
def test_counts_keep_the_names_that_others_read(kind: type[Counts], names: str) -> None:
    assert {*names.split()} <= example(kind, full=True).entries().keys()
