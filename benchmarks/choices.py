"""What each choice of a pretraining recipe is worth, all for the same time on this machine.

    python -m benchmarks.choices --output FOLDER --minutes MINUTES [--only NAME …] [--json FILE]
    python -m benchmarks.choices --output FOLDER --bundles NAME=FOLDER … [--json FILE]

Every choice is a recipe of its own: that of `configs/…/books.toml` (BERT-mini on WikiText-2 and
books) with some settings changed. RAYBERT_DATA names the folder of texts and labelled sets,
RAYBERT_BLIMP the `data` folder of BLiMP (67 files of pairs). A killed run resumes in its folder.

Each bundle is measured on what all of them share: masked words of held-out documents, pairs of
BLiMP, and SST-2 after fine-tuning on 1,000 rows with three seeds. The second form measures bundles
that were trained elsewhere, with the vocabulary of `FOLDER/vocab`.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import provenance
from bert_core.manifest import BUNDLE, Manifest
from pipelines import evaluate, finetune, prepare, pretrain, vocab
from pipelines.configure import CONFIGS, parse

STAGES = {
    "vocab": vocab,
    "prepare": prepare,
    "pretrain": pretrain,
    "finetune": finetune,
    "evaluate": evaluate,
}
BOOKS = "books"
PAIRS_PER_SET = 100
ROWS = 1_000
HELD_OUT_ROWS = 4_096
TEXTS = ("wikitext2/train.txt", "classic_books/")


@dataclass(frozen=True)
class Choice:
    """Settings that differ from those of the books: of preparation and of pretraining."""

    prepare: tuple[str, ...] = ()
    pretrain: tuple[str, ...] = ()
    tail: "Choice | None" = None
    """What the last part of the time is spent with, from the weights so far."""
    tail_share: float = 0.3

    def and_then(self, *, prepare: str = "", pretrain: str = "") -> "Choice":
        """The same with more settings, the last of which counts."""
        return Choice((*self.prepare, *prepare.split()), (*self.pretrain, *pretrain.split()))


BEST = Choice()
"""The books' recipe: rows of consecutive sentences (Liu et al. 2019), Muon, 30 % masks."""
FEWER_MASKS = "--masking.masked_lm_prob 0.15 --masking.max_predictions_per_seq 20"
MORE_MASKS = "--masking.masked_lm_prob 0.4 --masking.max_predictions_per_seq 30"
MUON = BEST.and_then(prepare=FEWER_MASKS)
SENTENCES = MUON.and_then(pretrain="--optimizer.name adamw")
BERT = SENTENCES.and_then(prepare="--pairs.kind nsp", pretrain="--schedule.warmup_steps 650")
"""Next sentences and AdamW (Devlin et al. 2019); warmup takes a tenth of an hour's steps."""
MODERN = BEST.and_then(pretrain="--variant modernbert-base --sizes_of bert-mini")
"""Normalization first, GeGLU, rotary positions, no biases (Warner et al. 2024)."""

CHOICES: dict[str, Choice] = {
    "bert": BERT,
    "full_sentences": SENTENCES,
    "full_sentences_long_warmup": SENTENCES.and_then(pretrain="--schedule.warmup_steps 650"),
    "muon": MUON,
    "modern_muon": MODERN.and_then(prepare=FEWER_MASKS),
    "muon_30_percent": BEST,
    "muon_40_percent": BEST.and_then(prepare=MORE_MASKS),
    "muon_40_then_15_percent": Choice(
        BEST.and_then(prepare=MORE_MASKS).prepare,
        ("--schedule.decay", "constant"),
        tail=Choice(MUON.prepare, ("--schedule.warmup_steps", "0")),
    ),
    "next_sentences": BEST.and_then(prepare="--pairs.kind nsp"),
    "whole_words": BEST.and_then(prepare="--masking.strategy whole_word"),
    "128_tokens": BEST.and_then(
        prepare="--pairs.max_length 128 --masking.max_predictions_per_seq 48",
        pretrain="--global_batch_size 32",
    ),
    "smaller_batches": BEST.and_then(pretrain="--global_batch_size 32"),
    "larger_batches": BEST.and_then(pretrain="--global_batch_size 128"),
    "half_the_rate": BEST.and_then(pretrain="--optimizer.lr 1e-3"),
    "twice_the_rate": BEST.and_then(pretrain="--optimizer.lr 4e-3"),
    "late_decay": BEST.and_then(pretrain="--schedule.decay_share 0.3"),
    "modern": MODERN,
}


class Trials:
    """The folder in which all choices are tried, with what they share."""

    def __init__(self, folder: Path, hours: float) -> None:
        self.folder, self.hours = folder, hours
        self.data = Path(os.environ["RAYBERT_DATA"])
        texts = json.dumps([str(self.data / text) for text in TEXTS])
        self._corpus = ("--corpus.source", texts)
        self.run("vocab", folder / "vocab", *self._corpus)
        self._shared_rows = self.rows(MUON.prepare)
        self._pairs = self._some_pairs(Path(os.environ["RAYBERT_BLIMP"]))

    def run(self, word: str, output: Path, *options: str, config: str | None = BOOKS) -> Manifest:
        """Run a stage, unless it has been run."""
        known = [] if config is None else ["--config", str(CONFIGS / word / f"{config}.toml")]
        tracking = ("--tracking_uri", f"sqlite:///{self.folder}/mlflow.db")
        return STAGES[word].run(parse(word, [*known, "--output", str(output), *tracking, *options]))

    def rows(self, settings: Sequence[str]) -> Path:
        """Shards with these settings."""
        name = "_".join(settings).replace("--", "") or "as_in_books"
        output = self.folder / "shards" / name
        words = ("--tokenizer", str(self.folder / "vocab"))
        self.run("prepare", output, *self._corpus, *words, *settings)
        return output

    def learn(self, name: str, choice: Choice) -> Path:
        """Pretrain for the time there is. Returns: the folder of the bundle."""
        parts = [(choice, self.hours)]
        if choice.tail is not None:
            share = choice.tail_share
            parts = [(choice, (1 - share) * self.hours), (choice.tail, share * self.hours)]
        bundle: Path | None = None
        for number, (part, hours) in enumerate(parts):
            output = self.folder / "pretrain" / f"{name}-{number}"
            goes_on = () if bundle is None else ("--variant", "null", "--model", str(bundle))
            self.run(
                "pretrain",
                output,
                *("--shards", str(self.rows(part.prepare))),
                *("--tokenizer", str(self.folder / "vocab")),
                *("--loop.max_hours", str(hours)),
                *("--evaluate_every_steps", "0"),
                *part.pretrain,
                *goes_on,
            )
            bundle = output / BUNDLE
        assert bundle is not None
        return bundle

    def measure(self, name: str, bundle: Path) -> dict[str, float]:
        """What a bundle knows: of held-out words, of grammar, and with some labelled rows."""
        blimp = self.run(
            "evaluate",
            self.folder / "blimp" / name,
            *("--model", str(bundle), "--task", "minimal-pairs"),
            *("--held_out.source", str(self._pairs), "--num_workers", "2"),
            config=None,
        )
        tuned = self.run(
            "finetune",
            self.folder / "sst2" / name,
            *("--model", str(bundle), "--rows_per_class", str(ROWS // 2), "--epochs", "5"),
            *("--train.source", str(self.data / "sst2" / "train.tsv")),
            *("--held_out.source", str(self.data / "sst2" / "dev.tsv")),
            config="sst2",
        )
        return {
            **self._of_words(bundle),
            "blimp_accuracy": blimp.counts["accuracy"],
            "sst2_accuracy": tuned.counts["accuracy_mean"],
            "sst2_std": tuned.counts["accuracy_std"],
        }

    def _of_words(self, bundle: Path) -> dict[str, float]:
        """Loss and accuracy of a bundle on held-out words, 15 % of them masked."""
        import torch

        from bert_core.bundle.weights import build_model
        from bert_core.data.shards import ShardSet
        from bert_core.data.splits import HELD_OUT
        from bert_core.objectives.mlm import MaskedLanguageModeling
        from bert_core.train.config import LoopConfig
        from bert_core.train.loop import evaluate as mean_losses
        from pipelines.training.shard_batches import batches
        from pipelines.training.worker import RankPlace
        from tracking.models.hub import load_bundle

        loaded = load_bundle(bundle)
        model = build_model(loaded, [MaskedLanguageModeling(loaded.encoder_config)])
        loop = LoopConfig(max_steps=1)
        held_out = batches(
            ShardSet.read(str(self._shared_rows)),
            HELD_OUT,
            place=RankPlace(0, 1, torch.device("cpu")),
            encoder=loaded.encoder_config,
            loop=loop,
            pad_id=loaded.tokenizer.pad_id,
            global_batch_size=64,
            micro_batch_tokens=8_192,
            window_shards=8,
        )
        losses = mean_losses(model, held_out.once(HELD_OUT_ROWS), loop)
        return {name: losses[name] for name in ("mlm_loss", "mlm_accuracy")}

    def _some_pairs(self, blimp: Path) -> Path:
        """A file of the first pairs of every set of BLiMP."""
        path = self.folder / "blimp.jsonl"
        sets = sorted(blimp.glob("*.jsonl"))
        if len(sets) != 67:
            raise SystemExit(f"RAYBERT_BLIMP={blimp}: wanted the 67 sets of BLiMP, got {len(sets)}")
        lines = [line for each in sets for line in each.read_text().splitlines()[:PAIRS_PER_SET]]
        path.write_text("".join(f"{line}\n" for line in lines))
        return path


def benchmark(folder: Path, minutes: float, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line of the table for each choice."""
    trials = Trials(folder, minutes / 60)
    for name, choice in CHOICES.items():
        if only and name not in only:
            continue
        began = time.monotonic()
        bundle = trials.learn(name, choice)
        yield {
            "name": name,
            "minutes": minutes,
            "all_minutes": (time.monotonic() - began) / 60,
            **trials.measure(name, bundle),
            "made": provenance(),
        }


def measured(folder: Path, bundles: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line of the table for each bundle, given as `NAME=FOLDER`."""
    trials = Trials(folder, 0.0)
    for name, bundle in (each.split("=", 1) for each in bundles):
        yield {"name": name, **trials.measure(name, Path(bundle)), "made": provenance()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choices")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, per choice")
    parser.add_argument("--only", nargs="*", choices=CHOICES, default=[], metavar="NAME")
    parser.add_argument(
        "--bundles", nargs="*", default=[], metavar="NAME=FOLDER", help="measure these instead"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    chosen = parser.parse_args()
    results, folder = [], chosen.output.absolute()
    lines = benchmark(folder, chosen.minutes, chosen.only)
    for line in measured(folder, chosen.bundles) if chosen.bundles else lines:
        print(
            f"{line['name']:<28}MLM loss {line['mlm_loss']:.3f}, {line['mlm_accuracy']:.1%} right; "
            f"BLiMP {line['blimp_accuracy']:.1%}; SST-2 {line['sst2_accuracy']:.1%}",
            flush=True,
        )
        results.append(line)
        if chosen.json:  # after every line
            chosen.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
