"""What every pretraining recipe learns in a few minutes, when made small.

    python -m benchmarks.recipes --output FOLDER [--only NAME …] [--json FILE]

A recipe of `configs/pretrain/` followed by the configs for WikiText-2: its own objectives, rows,
masks and kind of encoder in the sizes of BERT-tiny, 2,000 steps on the text of the folder that
RAYBERT_DATA names. BioBERT's continues from a BERT trained on books, with that one's vocabulary. A
plot of the held-out losses is written next to the JSON. A killed run resumes in its folder.
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
from bert_core.manifest import Manifest
from pipelines import prepare, pretrain, vocab
from pipelines.configure import CONFIGS, parse
from pipelines.training.records import read_records

STAGES = {"vocab": vocab, "prepare": prepare, "pretrain": pretrain}
SMALL = "wikitext2"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The configs of a recipe; None uses those for WikiText-2 alone."""

    pretrain: str | None
    vocab: str | None = None
    prepare: str | None = None
    more: tuple[str, ...] = ()
    """Extra arguments for its training."""
    parent: str | None = None
    """The recipe whose bundle it continues from, with the same vocabulary."""

    @property
    def name(self) -> str:
        return self.pretrain or "bert"


RECIPES = (
    Recipe(pretrain="roberta_base", vocab="roberta", prepare="wikipedia_roberta"),
    Recipe(pretrain="albert_base", vocab="albert", prepare="wikipedia_albert"),
    Recipe(pretrain="spanbert_base", vocab="wikipedia_cased", prepare="wikipedia_spanbert"),
    Recipe(pretrain="deberta_base", vocab="roberta", prepare="wikipedia_deberta"),
    Recipe(pretrain="deberta_v3_base", vocab="deberta_v3", prepare="wikipedia_deberta_v3"),
    Recipe(
        pretrain="scibert", vocab="scibert", prepare="scibert_128", more=("--then", "null")
    ),
    Recipe(pretrain="electra_base", prepare="wikipedia_electra"),
    Recipe(pretrain="mpnet_base", vocab="roberta", prepare="wikipedia_mpnet"),
    Recipe(pretrain="xlmr_base", vocab="xlmr", prepare="xlmr"),
    Recipe(
        pretrain="modernbert_base", vocab="modernbert", prepare="modernbert_1024",
        more=("--batch_warmup", "null"),
    ),
    Recipe(pretrain="biobert", prepare="biobert", more=("--sizes_of", "null"), parent="bert"),
)  # fmt: skip
BERT = Recipe(pretrain=None)
ARTICLES, BOOKS = "wikitext2/train.txt", "classic_books/Charles Dickens"
"""Below the data folder."""


def stage(word: str, recipe: str | None, output: Path, *more: str) -> Manifest:
    """Run a stage of a recipe, made small by the stage's config for WikiText-2."""
    options: list[str] = []
    for name in (recipe, SMALL):
        options += [] if name is None else ["--config", str(CONFIGS / word / f"{name}.toml")]
    tracking = f"sqlite:///{output.parent}/mlflow.db"
    config = parse(word, [*options, "--output", str(output), "--tracking_uri", tracking, *more])
    return STAGES[word].run(config)


def learn(recipe: Recipe, folder: Path, text: Path) -> Manifest:
    """Run the whole recipe, into `folder`/<name>."""
    output = folder / recipe.name
    corpus = ["--corpus.source", str(text)]
    words, options = output / "vocab", list(recipe.more)
    if recipe.parent is None:
        stage("vocab", recipe.vocab, words, *corpus)
    else:
        words = folder / recipe.parent / "pretrain" / "bundle"
        options += ["--model", str(words)]
    stage("prepare", recipe.prepare, output / "prepare", *corpus, "--tokenizer", str(words))
    inputs = ["--shards", str(output / "prepare"), "--tokenizer", str(words)]
    return stage("pretrain", recipe.pretrain, output / "pretrain", *inputs, *options)


def benchmark(folder: Path, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A line of the table for each recipe."""
    data = Path(os.environ["RAYBERT_DATA"])
    for recipe in RECIPES:
        if only and recipe.name not in only:
            continue
        if recipe.parent is not None:
            learn(BERT, folder, data / BOOKS)
        began = time.monotonic()
        counts = learn(recipe, folder, data / ARTICLES).counts
        records = read_records(folder / recipe.name / "pretrain")
        yield {
            "name": recipe.name,
            "minutes": (time.monotonic() - began) / 60,
            **counts,
            "held_out_mlm_loss": {
                step: numbers["held_out/mlm_loss"]
                for step, numbers in records.items()
                if "held_out/mlm_loss" in numbers
            },
            "made": provenance(),
        }


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot every recipe's held-out loss of masked words by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        losses = line["held_out_mlm_loss"]
        axes.plot([int(step) for step in losses], losses.values(), marker="o", label=line["name"])
    axes.set(xlabel="step", ylabel="held-out loss of masked words (nats)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipes")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="*", default=[], help="names of recipes; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    chosen = parser.parse_args()
    results = []
    for line in benchmark(chosen.output.absolute(), chosen.only):
        parts = [name.removesuffix("_loss_after") for name in line if name.endswith("_loss_after")]
        losses = (
            f"{part} {line[f'{part}_loss_before']:.3f} → {line[f'{part}_loss_after']:.3f}"
            for part in parts
        )
        print(f"{line['name']:<18}{', '.join(losses)}; {line['minutes']:.1f} minutes", flush=True)
        results.append(line)
        if chosen.json:  # after every line
            chosen.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
            draw(results, chosen.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
