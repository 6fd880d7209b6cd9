"""What each member's own idea is worth at a small size, beside a control that lacks it.

    python -m benchmarks.ideas --output FOLDER [--only NAME …] [--languages FOLDER] [--json FILE]

Each small recipe of `configs/pretrain/` and its control are trained with each seed, and fine-tuned
on SST-2, since losses of different objectives do not compare. XLM-R is measured by language
instead; `--languages` has a text file per language, as `configs/prepare/xlmr_languages.toml` names
them. A plot is written next to the JSON. Finished runs are not repeated.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.harness import provenance
from bert_core.data.shards import ShardSet
from bert_core.data.splits import HELD_OUT
from bert_core.manifest import Manifest
from pipelines import finetune, prepare, pretrain, vocab
from pipelines.configure import CONFIGS, parse
from pipelines.training.records import read_records
from pipelines.training.shard_batches import batches

STAGES = {"vocab": vocab, "prepare": prepare, "pretrain": pretrain, "finetune": finetune}
ARTICLES = "wikitext2/train.txt"
LANGUAGES = ("en", "de", "fr", "pl", "es", "ro")
HELD_OUT_LOSS = "held_out/mlm_loss"


@dataclass(frozen=True, kw_only=True)
class Idea:
    """A recipe, and the arguments that take its idea away."""

    name: str
    recipe: str
    """Its config of `prepare` and `pretrain`."""
    vocab: str
    control: str
    """What is without the idea."""
    without: tuple[str, ...] = ()
    """Arguments of its control's training."""
    prepared_without: tuple[str, ...] = ()
    """Arguments of its control's rows."""


IDEAS = (
    Idea(
        name="ELECTRA",
        recipe="electra_wikitext2",
        vocab="wikitext2",
        control="masked words",
        without=("--objectives", '["mlm"]'),
    ),
    Idea(
        name="MPNet",
        recipe="mpnet_wikitext2",
        vocab="bpe_wikitext2",
        control="no permutation",
        without=("--objectives", '["mlm"]'),
    ),
    Idea(
        name="ModernBERT",
        recipe="modernbert_wikitext2",
        vocab="bpe_wikitext2",
        control="RoBERTa's encoder",
        without=("--variant", "roberta-base"),
    ),
    Idea(
        name="ModernBERT's schedule",
        recipe="modernbert_wikitext2",
        vocab="bpe_wikitext2",
        control="linear from the warm-up on",
        without=("--schedule.decay", "linear", "--schedule.decay_share", "1"),
    ),
    Idea(
        name="XLM-R",
        recipe="xlmr_languages",
        vocab="xlmr_languages",
        control="exponent 1",
        prepared_without=("--corpus.exponent", "1"),
    ),
)


def stage(word: str, name: str, output: Path, *more: str) -> Manifest:
    """Run a stage by a config in this process, unless its output is finished."""
    options = ["--config", str(CONFIGS / word / f"{name}.toml"), "--output", str(output)]
    tracking = f"sqlite:///{output.parent}/mlflow.db"
    alone = ["--num_workers", "0", "--threads_per_worker", "1"]  # others use the machine too
    config = parse(word, [*options, "--tracking_uri", tracking, *alone, *more])
    return STAGES[word].run(config)


def trained(
    idea: Idea, folder: Path, corpus: Sequence[str], seeds: int, *, control: bool
) -> Iterator[Path]:
    """Yield the output of each seed."""
    words = folder / idea.vocab / "vocab"
    stage("vocab", idea.vocab, words, *corpus)
    rows = folder / idea.recipe / ("rows-without" if idea.prepared_without and control else "rows")
    more = idea.prepared_without if control else ()
    stage("prepare", idea.recipe, rows, *corpus, "--tokenizer", str(words), *more)
    inputs = ["--shards", str(rows), "--tokenizer", str(words), *(idea.without if control else ())]
    kind = f"{idea.name} without" if control else idea.recipe
    for seed in range(seeds):
        output = folder / kind.replace(" ", "-").replace("'", "") / f"seed-{seed}"
        stage("pretrain", idea.recipe, output, *inputs, "--loop.seed", str(seed))
        yield output


def sentiment(output: Path, data: Path) -> float:
    """Return the accuracy on SST-2's development rows after 3 passes over 6,000 training rows."""
    made = stage(
        "finetune",
        "sst2",
        output / "sst2",
        *("--model", str(output / "bundle"), "--seeds", "[0]", "--rows_per_class", "3000"),
        *("--epochs", "3", "--lr", "1e-3"),
        *("--train.source", str(data / "sst2/train.tsv"), "--precision", "fp32"),
        *("--held_out.source", str(data / "sst2/dev.tsv")),
    )
    return float(made.counts["accuracy_mean"])


def losses_by_language(output: Path, rows: Path) -> dict[str, float]:
    """Return the loss on masked words of held-out rows, by language.

    Args:
        rows: folders of rows of one language each.
    """
    import torch

    from bert_core.bundle.format import load_bundle
    from bert_core.bundle.weights import build_model
    from bert_core.objectives.mlm import MaskedLanguageModeling
    from bert_core.train.config import LoopConfig
    from bert_core.train.loop import evaluate
    from pipelines.training.worker import RankPlace

    bundle, loop = load_bundle(output / "bundle"), LoopConfig(precision="fp32")
    encoder = bundle.encoder_config
    model = build_model(bundle, [MaskedLanguageModeling(encoder)], require_heads=True)
    place = RankPlace(rank=0, world_size=1, device=torch.device("cpu"))
    found = {}
    for language in LANGUAGES:
        held_out = batches(
            ShardSet.read(str(rows / language)),
            HELD_OUT,
            place=place,
            encoder=encoder,
            loop=loop,
            pad_id=bundle.tokenizer.pad_id,
            global_batch_size=64,
            micro_batch_tokens=4096,
            window_shards=8,
        )
        found[language] = float(evaluate(model, held_out.once(512), loop)["mlm_loss"])
    return found


def measure(idea: Idea, folder: Path, data: Path, languages: Path, seeds: int) -> dict[str, Any]:
    """Return a line of the table: each list has a value per seed."""
    sources = [data / ARTICLES, *(languages / f"{name}.txt" for name in LANGUAGES[1:])]
    many = idea.name == "XLM-R"
    source = json.dumps([*map(str, sources)]) if many else str(sources[0])
    line: dict[str, Any] = {"name": idea.name, "control": idea.control, "made": provenance()}
    for key, control in (("with", False), ("without", True)):
        began, outputs = time.monotonic(), []
        for output in trained(idea, folder, ["--corpus.source", source], seeds, control=control):
            outputs.append(output)
            print(f"{idea.name}: {output} after {time.monotonic() - began:.0f} s", flush=True)
        curves = [read_records(output) for output in outputs]
        line[f"{key}_minutes"] = (time.monotonic() - began) / 60
        line[f"{key}_curve"] = {
            step: mean(curve[step][HELD_OUT_LOSS] for curve in curves)
            for step, numbers in curves[0].items()
            if HELD_OUT_LOSS in numbers
        }
        last = max(line[f"{key}_curve"])
        line[f"{key}_loss"] = [made[last][HELD_OUT_LOSS] for made in curves]
        if many:
            rows = folder / idea.recipe / "languages"
            words = str(folder / idea.vocab / "vocab")
            for name, path in zip(LANGUAGES, sources, strict=True):
                one = ["--corpus.source", str(path), "--corpus.licenses", "[]"]
                plain = ["--corpus.exponent", "1", "--tokenizer", words]
                stage("prepare", idea.recipe, rows / name, *one, *plain)
            found = [losses_by_language(output, rows) for output in outputs]
            line[f"{key}_languages"] = {
                name: [of_seed[name] for of_seed in found] for name in LANGUAGES
            }
        else:
            line[f"{key}_sst2"] = [sentiment(output, data) for output in outputs]
    return line


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the held-out loss of masked words by step, with and without each idea."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3 * len(lines), 3.2), layout="constrained")
    for axes, line in zip(figure.subplots(1, len(lines), squeeze=False)[0], lines, strict=True):
        for key, style in (("with", "-"), ("without", "--")):
            curve = line[f"{key}_curve"]
            label = line["name"] if key == "with" else line["control"]
            axes.plot([int(step) for step in curve], curve.values(), style, marker="o", label=label)
        axes.set(xlabel="step", title=line["name"])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.supylabel("held-out loss of masked words (nats)", fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ideas")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", nargs="*", default=[], help="names of ideas; all by default")
    parser.add_argument("--languages", type=Path, help="folder of a text file per language")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    chosen = parser.parse_args()
    data, results = Path(os.environ["RAYBERT_DATA"]), []
    for idea in IDEAS:
        if chosen.only and idea.name not in chosen.only:
            continue
        languages = chosen.languages or data / "languages"
        line = measure(idea, chosen.output.absolute(), data, languages, chosen.seeds)
        print({key: value for key, value in line.items() if "curve" not in key}, flush=True)
        results.append(line)
        if chosen.json:  # after every line
            chosen.json.write_text(json.dumps(results, indent=2, default=str) + "\n")
            draw(results, chosen.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
