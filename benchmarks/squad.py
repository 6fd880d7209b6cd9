"""SQuAD 1.1 by `configs/finetune/squad.toml`, by us and by transformers' Trainer, without Ray.

    python -m benchmarks.squad --model FOLDER --data FILE --output FOLDER [--json FILE]

Both fine-tune the same checkpoint on the same windows for the same number of steps, on a GPU if
there is one; the same code decodes and scores the answers of both. `--data` is the training part:
one article in ten, drawn by seed 0, is held out. A checkpoint that has seen SQuAD's passages, as
those of sentence-transformers have, scores higher than it would on new ones.
"""

import argparse
import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import provenance
from benchmarks.peer import now
from benchmarks.peer_tasks import Hyperparameters, scores_of, trained
from benchmarks.training import steps_of
from bert_core.batches import RankBatches, WindowSource
from bert_core.bundle.format import About, Bundle, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.order import GlobalOrder
from bert_core.data.windows import Window
from bert_core.errors import ConfigError
from bert_core.model.attention import packing
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.digests import Digests
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import evaluation_scores

CONFIG = Path(__file__).parent.parent / "configs" / "finetune" / "squad.toml"
HELD_OUT_SHARE = 0.1
"""Of the articles."""
TOKENS = {"cuda": 65_536, "cpu": 4096}
"""Of a micro-batch, by the device."""

Rows = list[dict[str, Any]]
Scores = list[np.ndarray]


def split_articles(whole: dict[str, Any], questions: int | None) -> tuple[Rows, Rows]:
    """Questions to train on, `questions` of them at most, and those of articles held out."""
    articles = whole["data"]
    order = np.random.default_rng(0).permutation(len(articles))
    held_out = set(order[: round(HELD_OUT_SHARE * len(articles))].tolist())
    parts: list[Rows] = []
    for is_held_out in (False, True):
        data = [article for n, article in enumerate(articles) if (n in held_out) is is_held_out]
        found = labelled_records(json.dumps({"data": data}).encode(), "articles", "squad")
        parts.append([dict(record) for record in found.records])
    train, scored = parts
    chosen = np.random.default_rng(0).permutation(len(train))[:questions]
    return [train[row] for row in np.sort(chosen)], scored


@dataclass(frozen=True)
class Recipe:
    """A checkpoint, its training rows and the hyperparameters, for both sides."""

    model: str
    """Folder of the checkpoint."""
    bundle: Bundle
    """The same, loaded."""
    task: Task
    windows: list[Window]
    trained_rows: Digests
    """Of the rows that the weights will have seen."""
    hyperparameters: Hyperparameters
    device: torch.device
    scratch: Path

    def ours(self, seed: int, scored: Sequence[Window]) -> tuple[Scores, float]:
        """Scores of windows after training, and the seconds that training took."""
        torch.manual_seed(seed)
        pad_id, tokens = self.bundle.tokenizer.pad_id, TOKENS[self.device.type]
        model = build_model(self.bundle, [self.task.build_objective(self.bundle.encoder_config)])
        model.to(self.device)
        chosen, optimizer = self.hyperparameters, self.hyperparameters.optimizer
        packed_from = packing(self.bundle.encoder_config, self.device, chosen.precision)
        batches = RankBatches(
            WindowSource(self.windows, pad_id, packed_from),
            GlobalOrder([len(self.windows)], seed=seed),
            chosen.batch_size,
            tokens,
        )
        loop = LoopConfig(max_steps=chosen.steps, precision=chosen.precision, seed=seed)
        began = now()
        for step in steps_of(model, batches, loop, optimizer, warmup_steps=chosen.warmup_steps):
            if step.index % 500 == 0:
                print(f"ours: {step.index:,} of {chosen.steps:,} steps", flush=True)
        took_s = now() - began
        scores = evaluation_scores(
            model, scored, pad_id, most_tokens=tokens, packed_from=packed_from
        )
        save_bundle(
            self.bundle_of(seed),
            model.cpu(),
            self.bundle.tokenizer,
            About(
                task=self.task,
                lineage={"stage": "squad", "parent": self.bundle.digest},
                trained_rows=self.trained_rows,
            ),
        )
        return scores, took_s

    def trainer(self, seed: int, scored: Sequence[Window]) -> tuple[Scores, float]:
        """As `ours`, for the Trainer."""
        pad_id = self.bundle.tokenizer.pad_id
        model, took_s = trained(
            self.model, self.task, self.windows, pad_id, self.hyperparameters, seed, self.scratch
        )
        return scores_of(model, scored, pad_id), took_s

    def bundle_of(self, seed: int) -> Path:
        """Where `ours` writes its bundle."""
        return self.scratch / f"ours-{seed}" / "bundle"


def run(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train and score. Yields: the settings, and exact match and F1 of each run so far."""
    config = tomllib.loads(CONFIG.read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    rows, scored = split_articles(json.loads(chosen.data.read_text()), chosen.questions)
    drawn = np.random.default_rng(0).permutation(len(scored))[: chosen.held_out_questions]
    scored = [scored[place] for place in np.sort(drawn)]
    bundle, kind = load_bundle(chosen.model), TASKS[config["task"]]
    task = kind.from_rows(rows, kind.options_of({})).to_learn(rows, config["max_length"])
    windows, to_score = (
        task.encode(each, bundle.tokenizer, config["max_length"], labelled=True)
        for each in (rows, scored)
    )
    recipe = Recipe(
        model=chosen.model,
        bundle=bundle,
        task=task,
        windows=windows,
        trained_rows=np.union1d(bundle.trained_rows, task.digests(rows, task.chosen)),
        hyperparameters=Hyperparameters(
            steps=max(1, round(config["epochs"] * len(windows) / config["batch_size"])),
            batch_size=config["batch_size"],
            optimizer=OptimizerConfig(lr=config["lr"]),
            precision="bf16",
        ),
        device=device,
        scratch=chosen.output,
    )
    sides: dict[str, Callable[[int, Sequence[Window]], tuple[Scores, float]]] = {
        "ours": recipe.ours,
        "trainer": recipe.trainer,
    }
    if "ours" in chosen.sides:
        for folder in map(recipe.bundle_of, chosen.seeds):
            if folder.exists():
                raise ConfigError(f"{folder}: wanted no bundle there yet: give another --output")
    report = {
        "questions": len(rows),
        "held_out_questions": len(scored),
        "windows": len(windows),
        "tokens": sum(window.tokens for window in windows),
        "steps": recipe.hyperparameters.steps,
        "model": chosen.model,
        "settings": {name: config[name] for name in ("max_length", "batch_size", "epochs", "lr")},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "threads": torch.get_num_threads(),
        "made": provenance(),
    }
    results: list[dict[str, Any]] = []
    for seed in chosen.seeds:
        for side in chosen.sides:
            scores, took_s = sides[side](seed, to_score)
            metrics = task.metrics(task.compare(scored, task.decode(scored, to_score, scores)))
            results.append({"side": side, "seed": seed, "seconds": took_s, **metrics})
            yield report | {"results": results}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.squad")
    parser.add_argument("--model", required=True, help="folder of the checkpoint to start from")
    parser.add_argument("--data", type=Path, required=True, help="train-v1.1.json of SQuAD")
    parser.add_argument("--output", type=Path, required=True, help="folder for bundles")
    parser.add_argument("--questions", type=int, help="to train on, drawn by seed 0; default: all")
    parser.add_argument("--held_out_questions", type=int, help="to score; default: all held out")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument(
        "--sides", nargs="*", choices=("ours", "trainer"), default=["ours", "trainer"]
    )
    parser.add_argument("--threads", type=int, help="CPU threads; not used on a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    chosen = parser.parse_args()
    for result in run(chosen):
        print(json.dumps(result["results"][-1]), flush=True)
        if chosen.json:  # after every run
            chosen.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
