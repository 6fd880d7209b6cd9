"""The books' recipe, BERT's, and the general stage of distillation on one device, without Ray.

    python -m benchmarks.books books|bert --shards FOLDER --vocabulary FOLDER --output FOLDER
    python -m benchmarks.books distill --shards FOLDER --teacher BUNDLE --output FOLDER

A GPU trains in minutes what takes two CPU cores hours. `books` is `configs/pretrain/books.toml`;
`bert` is the same with AdamW and a longer warmup, on shards with next-sentence labels (Devlin et
al. 2019); `distill` trains three layers of the teacher to imitate all six (the general stage of
Jiao et al. 2019). More options, such as the number of steps, are in `--help`.
The output is a bundle, and `run.json` with the curve.
"""

import argparse
import json
import multiprocessing
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import provenance
from bert_core.batches import RankBatches, ShardSource
from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.cache import Cache
from bert_core.data.order import GlobalOrder
from bert_core.data.shards import ShardRows, ShardSet
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.data.tokenizer import Tokenizer
from bert_core.model.attention import packing
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.catalog import PRETRAINING
from bert_core.objectives.distillation import Distillation, with_layers
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from bert_core.train.loop import evaluate, training_steps
from bert_core.train.optim import build_optimizer

CONFIG = Path(__file__).parent.parent / "configs" / "pretrain" / "books.toml"
GPU_TOKENS = 65_536
"""Tokens of a micro-batch on a GPU."""
READERS = 4
"""Processes that make batches: one alone makes fewer than a GPU takes."""
LAYERS = (0, 2, 4)
"""What a student has of its teacher's six layers."""
MATCHED = {"cosine": 1.0, "hidden": 1.0, "attention": 0.02}
"""Weights of what is compared; scores before the softmax start some 100 times as far apart."""


@dataclass(frozen=True)
class Recipe:
    """What a model is trained with."""

    model: ObjectiveModel
    """What is trained."""
    student: ObjectiveModel
    """What is stored."""
    tokenizer: Tokenizer
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    loop: LoopConfig
    rows: int
    """Per step."""


def recipe(chosen: argparse.Namespace, device: torch.device) -> Recipe:
    """The recipe as configured, with the changes on the command line."""
    config = tomllib.loads(CONFIG.read_text())
    optimizer = OptimizerConfig(**config["optimizer"])
    schedule = ScheduleConfig(**config["schedule"])
    loop = LoopConfig(
        **config["loop"]
        | {"max_hours": chosen.max_hours, "compile": chosen.compile}
        | ({} if chosen.max_steps is None else {"max_steps": chosen.max_steps})
    )
    rows = chosen.rows or config["global_batch_size"]
    if chosen.recipe == "bert":
        optimizer = replace(optimizer, name="adamw")
        schedule = replace(schedule, warmup_steps=loop.max_steps // 10)
    if chosen.recipe == "distill":
        optimizer = OptimizerConfig(lr=5e-4)
        schedule = replace(schedule, warmup_steps=loop.max_steps // 20)
    if chosen.lr is not None:
        optimizer = replace(optimizer, lr=chosen.lr)
    torch.manual_seed(loop.seed)
    if chosen.recipe == "distill":
        model, student, tokenizer = _pair(chosen.teacher)
    else:
        tokenizer = Tokenizer.load(chosen.vocabulary)
        encoder = VARIANTS[config["variant"]].config.adapted(
            vocab_size=tokenizer.vocab_size,
            pad_token_id=tokenizer.pad_id,
            hidden_dropout_prob=config["hidden_dropout_prob"],
            attention_dropout=config["attention_probs_dropout_prob"],
        )
        names = ("mlm", "nsp") if chosen.recipe == "bert" else ("mlm",)
        model = student = ObjectiveModel(encoder, [PRETRAINING[name](encoder) for name in names])
    return Recipe(model.to(device), student, tokenizer, optimizer, schedule, loop, rows)


def _pair(folder: str) -> tuple[ObjectiveModel, ObjectiveModel, Tokenizer]:
    """A student together with its teacher, and the student, without dropout."""
    teacher = load_bundle(folder)
    still = teacher.encoder_config.adapted(hidden_dropout_prob=0.0, attention_dropout=0.0)
    config, state = with_layers(still, teacher.state, LAYERS)
    student = build_model(replace(teacher, encoder_config=config, state=state), [])
    pair = Distillation(student, build_model(replace(teacher, encoder_config=still), []), MATCHED)
    return pair, student, teacher.tokenizer


@dataclass(frozen=True)
class Reader:
    """The batches of one split of shards."""

    shards: ShardSet
    split: str
    recipe: Recipe
    device: torch.device

    def batches(self) -> RankBatches:
        """The batches, made by the process that asks for them."""
        infos = self.shards.split(self.split)
        recipe, loop = self.recipe, self.recipe.loop
        unused = Cache(Path("unused"))  # shards are local

        @lru_cache
        def open_shard(number: int) -> ShardRows:
            return self.shards.open(infos[number], unused)

        packed_from = packing(recipe.student.encoder.config, self.device, loop.precision)
        if isinstance(recipe.model, Distillation):  # scores before the softmax come in blocks
            packed_from = 1.0
        source = ShardSource(
            open_shard, recipe.tokenizer.pad_id, self.shards.masker, loop.seed, packed_from
        )
        order = GlobalOrder([info.rows for info in infos], seed=loop.seed, window=8)
        tokens = GPU_TOKENS if self.device.type == "cuda" else 4096
        return RankBatches(source, order, recipe.rows, tokens)

    def from_step(self, step: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step, in order, made by several processes."""
        context = multiprocessing.get_context("fork")
        queues = [context.Queue(maxsize=8) for _ in range(READERS)]
        batches = self.batches()
        for number, made in enumerate(queues):
            context.Process(target=_make, args=(batches, step + number, made), daemon=True).start()
        for index in count():
            yield [
                {name: torch.from_numpy(array) for name, array in batch.items()}
                for batch in queues[index % READERS].get()
            ]


def _make(batches: RankBatches, first: int, made: Any) -> None:
    """Every READERS-th step, as arrays, which travel between processes faster than tensors."""
    torch.set_num_threads(1)
    for step in count(first, READERS):
        whole = next(batches.from_step(step))
        made.put([{name: tensor.numpy() for name, tensor in batch.items()} for batch in whole])


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    """Train and store. Returns: the curve and what was measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained, shards = recipe(chosen, device), ShardSet.read(chosen.shards)
    shards.check_tokenizer(trained.tokenizer.digest, chosen.vocabulary or chosen.teacher)
    loop, optimizer = trained.loop, build_optimizer(trained.model, trained.optimizer)

    def measured() -> dict[str, float]:
        rows = Reader(shards, HELD_OUT, trained, device).batches().once(chosen.held_out_rows)
        return evaluate(trained.model, rows, loop)

    before = measured()
    steps = training_steps(
        trained.model,
        Reader(shards, TRAIN, trained, device).from_step(0),
        optimizer,
        trained.schedule.learning_rate(trained.optimizer.lr, loop.max_steps),
        loop,
        max_grad_norm=trained.optimizer.max_grad_norm,
    )
    sums, since, tokens = dict[str, Any](), time.monotonic(), 0
    points: list[dict[str, float]] = []
    speeds = []
    for step in steps:
        tokens += step.tokens
        for name, items in step.counts.items():  # sums stay on the device: float would wait for it
            for key, parts in (("loss", step.loss_sums), ("accuracy", step.correct)):
                if name in parts:
                    total, of = sums.get(f"{name}_{key}", (0, 0))
                    sums[f"{name}_{key}"] = total + parts[name], of + items
        if step.index % chosen.log_every == 0 or step.last:
            speeds.append(tokens / (time.monotonic() - since))
            means = {name: float(total) / max(1, of) for name, (total, of) in sums.items()}
            points.append({"step": step.index, "seconds": round(step.elapsed_s, 1), **means})
            print(chosen.recipe, json.dumps(points[-1]), f"{speeds[-1]:,.0f} tokens/s", flush=True)
            sums, since, tokens = {}, time.monotonic(), 0
    after = measured()
    trained.student.cpu()
    save_bundle(
        Path(chosen.output, "bundle"),
        trained.student,
        trained.tokenizer,
        About(
            metrics=after, lineage={"stage": chosen.recipe, "vocabulary": trained.tokenizer.digest}
        ),
    )
    return {
        "recipe": chosen.recipe,
        "rows_per_step": trained.rows,
        "max_steps": loop.max_steps,
        "steps": points[-1]["step"],
        "seconds": points[-1]["seconds"],
        "tokens_per_s": float(np.median(speeds)),
        "before": before,
        "after": after,
        "points": points,
        "made": provenance(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.books")
    parser.add_argument("recipe", choices=("books", "bert", "distill"))
    parser.add_argument("--shards", required=True, help="folder written by raybert prepare")
    parser.add_argument("--vocabulary", help="folder of the vocabulary; distill has the teacher's")
    parser.add_argument("--teacher", help="bundle that distill learns from")
    parser.add_argument("--output", type=Path, required=True, help="folder for bundle and run.json")
    parser.add_argument("--max_steps", type=int, help="as configured by default")
    parser.add_argument("--max_hours", type=float, help="end the schedule then, at the latest")
    parser.add_argument("--rows", type=int, help="per step, as configured by default")
    parser.add_argument("--lr", type=float, help="as configured by default")
    parser.add_argument("--compile", action="store_true", help="compile the encoder")
    parser.add_argument("--held_out_rows", type=int, default=2048, help="to measure it on")
    parser.add_argument("--log_every", type=int, default=200, help="steps between points")
    chosen = parser.parse_args()
    needed = "teacher" if chosen.recipe == "distill" else "vocabulary"
    if getattr(chosen, needed) is None:
        parser.error(f"{chosen.recipe} needs --{needed}")
    chosen.output.mkdir(parents=True, exist_ok=True)
    result = run(chosen)
    (chosen.output / "run.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
