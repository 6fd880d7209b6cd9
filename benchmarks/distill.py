"""How much accuracy a student keeps, and what learning from a teacher costs.

The step: a student with three of MiniLM's six layers, trained with its teacher, against the same
student fine-tuned on the same batches plus a forward pass of the teacher, one after the other;
fresh weights, which are as fast as any. Then all-MiniLM-L6-v2 (`make checkpoints`) is fine-tuned
on SST-2 and on Banking77 from the folder that RAYBERT_DATA names, and distilled into three of its
layers; for comparison the same student, from the same weights, learns the same rows from labels
alone. For scores, below 1 the student is worse than its teacher; for speeds, above 1 it is faster.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import ABSENT, MINILM, checkpoint
from benchmarks.finetune import BUDGET_TOKENS, LONGEST, ROWS, minilm, sst2
from benchmarks.harness import Comparison, Planned, compare, main
from benchmarks.peer import WARM_UP
from benchmarks.tasks import LINES, Line, stage_config
from bert_core.batches import RankBatches, WindowSource
from bert_core.bundle.format import load_bundle
from bert_core.data.order import GlobalOrder
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.data.windows import Window
from bert_core.inference.predictor import Predictor
from bert_core.model.attention import packing
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.distillation import Distillation
from bert_core.tasks.text_classification import TextClassification
from bert_core.train.backward import autocast
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import training_steps
from bert_core.train.optim import build_optimizer
from pipelines import distill, finetune
from pipelines.corpus.labelled import labelled_rows
from pipelines.distill import DistillConfig
from pipelines.finetune import FinetuneConfig
from pipelines.training.student import TEACHER, LossesConfig

LAYERS = (0, 2, 4)
SCORES = LossesConfig(soft=1.0, hard=0.0, cosine=1.0, temperature=2.0)
ALONE = LossesConfig(soft=0.0, hard=1.0, cosine=0.0)
MEASURED = {"SST-2": (10_000, 2.0, 4.0), "Banking77": (6_000, 5.0, 8.0)}
"""Set → training rows, epochs of the teacher, epochs of the students."""


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    yield from _steps(rounds, quick)
    model = checkpoint(MINILM)
    if model is None:
        print(f"no student is trained: {ABSENT}", file=sys.stderr)
        return
    for line in LINES:
        if line.name in MEASURED:
            with tempfile.TemporaryDirectory() as scratch:
                yield from _taught(line, str(model), Path(scratch), rounds, quick)


def _steps(rounds: int, quick: bool) -> Iterator[Planned]:
    rows = sst2()
    task = TextClassification.from_rows(rows)
    vocabulary = train_vocabulary([row["text"] for row in rows], vocab_size=30_522, lowercase=True)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    steps = 15 if quick else 40
    order = np.random.default_rng(0).permutation(len(rows))[: ROWS * (steps + WARM_UP)]
    windows = task.encode([rows[n] for n in order], tokenizer, LONGEST, labelled=True)
    for name, losses in {
        "distill_step_vs_plain_and_teacher": LossesConfig(),
        "distill_step_all_parts_vs_plain_and_teacher": LossesConfig(
            embeddings=1.0, hidden=1.0, attention=1.0
        ),
    }.items():
        step = _Step(task, windows, tokenizer.pad_id, steps, losses)
        yield compare(
            name,
            step.with_teacher,
            step.plain_and_teacher,
            unit="tokens/s",
            rounds=rounds,
            what="3 of MiniLM's 6 layers; 1.6 times as long is a ratio of 0.625",
            **step.settings,
        )


class _Step:
    """A student's steps with and without its teacher, over the same batches."""

    def __init__(
        self,
        task: TextClassification,
        windows: list[Window],
        pad_id: int,
        steps: int,
        losses: LossesConfig,
    ) -> None:
        self._task, self._losses, self._steps = task, losses, steps + WARM_UP
        self._teacher_config = minilm()
        self._student_config = replace(self._teacher_config, num_hidden_layers=len(LAYERS))
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loop = LoopConfig(max_steps=self._steps, precision="bf16")
        packed_from = packing(self._student_config, self._device, self._loop.precision)
        self._batches = RankBatches(
            WindowSource(windows, pad_id, packed_from), GlobalOrder([len(windows)], seed=0),
            ROWS, BUDGET_TOKENS,
        )  # fmt: skip
        self.settings: dict[str, Any] = {
            "rows_per_step": ROWS,
            "steps": steps,
            "precision": self._loop.precision,
            "threads": torch.get_num_threads(),
            "hidden_dropout": self._student_config.hidden_dropout_prob,
            "losses": losses.weights | {"temperature": losses.temperature},
            "micro_batch_tokens": BUDGET_TOKENS,
        }

    def with_teacher(self) -> float:
        tokens, seconds = self._trained(
            Distillation(
                self._fresh(self._student_config),
                self._fresh(self._teacher_config),
                self._losses.weights,
                temperature=self._losses.temperature,
            )
        )
        return tokens / seconds

    def plain_and_teacher(self) -> float:
        tokens, seconds = self._trained(self._fresh(self._student_config))
        return tokens / (seconds + self._answered())

    def _fresh(self, config: Any) -> ObjectiveModel:
        torch.manual_seed(0)
        return ObjectiveModel(config, [self._task.build_objective(config)])

    def _trained(self, model: ObjectiveModel) -> tuple[int, float]:
        model.to(self._device)
        steps = training_steps(
            model,
            self._batches.from_step(0),
            build_optimizer(model, OptimizerConfig(lr=5e-5)),
            lambda _: 5e-5,
            self._loop,
            max_grad_norm=1.0,
        )
        began, tokens = 0.0, 0
        for step in steps:  # each waits for its gradient norm, and so for the GPU
            if step.index > WARM_UP:
                tokens += step.tokens
            elif step.index == WARM_UP:
                began = time.perf_counter()
        return tokens, time.perf_counter() - began

    def _answered(self) -> float:
        """Seconds that the teacher takes for the timed batches, which are made beforehand."""
        teacher = self._fresh(self._teacher_config).to(self._device).eval()
        ahead = self._batches.from_step(0)
        steps = [next(ahead) for _ in range(self._steps)]
        began = 0.0
        for index, micro_batches in enumerate(steps):
            if index == WARM_UP:
                began = time.perf_counter()
            for batch in micro_batches:
                with torch.no_grad(), autocast(self._device, self._loop):
                    moved = {name: value.to(self._device) for name, value in batch.items()}
                    scores = teacher.logits(moved)
        scores[self._task.objective].sum().item()  # waits for the GPU
        return time.perf_counter() - began


def _taught(line: Line, model: str, scratch: Path, rounds: int, quick: bool) -> Iterator[Planned]:
    taught = cache(partial(_trained, line, model, scratch, quick))
    key = line.name.lower().replace("-", "")
    for peer in ("teacher", "alone"):
        name = f"distill_{key}_vs_{peer}"
        yield Planned(name, partial(_score, name, taught, peer))
    name = f"distill_{key}_speed"
    yield Planned(name, lambda: _speed(name, scratch, taught().teacher, rounds).make())


@dataclass(frozen=True)
class _Taught:
    """The trained teacher and students of a set."""

    teacher: FinetuneConfig
    metric: str
    scores: dict[str, float]
    """`taught`, `alone` and `teacher`; for students the mean over their seeds."""
    settings: dict[str, Any]


def _score(name: str, taught: Callable[[], _Taught], peer: str) -> Comparison:
    trained = taught()
    ours, theirs = trained.scores["taught"], trained.scores[peer]
    return Comparison(
        name=name,
        ours=100 * ours,
        peer=100 * theirs,
        unit=f"% {trained.metric}",
        ratio=ours / theirs,
        settings=trained.settings,
    )


def _trained(line: Line, model: str, scratch: Path, quick: bool) -> _Taught:
    rows, teacher_epochs, student_epochs = MEASURED[line.name]
    if quick:
        line = replace(line, held_out_rows=400)
        rows, teacher_epochs, student_epochs = 2_000, 1.0, 2.0
    line = replace(line, rows=rows, epochs=teacher_epochs)
    base = replace(stage_config(line, model, Path(os.environ["RAYBERT_DATA"]), scratch), seeds=(0,))
    finetune.run(base)
    shared = {field.name: getattr(base, field.name) for field in fields(FinetuneConfig)}
    shared |= {
        "epochs": student_epochs,
        "seeds": (0,) if quick else (0, 1, 2),
        "teacher": f"{base.output}/bundle",
        "model": TEACHER,
        "layers": LAYERS,
    }
    runs = {}
    for name, losses in {"taught": SCORES, "alone": ALONE}.items():
        config = DistillConfig(**shared | {"output": str(scratch / name), "losses": losses})
        runs[name] = distill.run(config).counts
    taught = runs["taught"]
    metric = taught["primary_metric"]
    settings = {
        "train_rows": taught["train_rows"],
        "held_out_rows": taught["held_out_rows"],
        "teacher_epochs": teacher_epochs,
        "student_epochs": student_epochs,
        "lr": line.lr,
        "losses": SCORES.weights | {"temperature": SCORES.temperature},
        **{name: [seed[metric] for seed in counts["seeds"]] for name, counts in runs.items()},
        "teacher_parameters": taught["teacher_parameters"],
        "student_parameters": taught["student_parameters"],
    }
    scores = {name: counts[f"{metric}_mean"] for name, counts in runs.items()}
    return _Taught(base, metric, scores | {"teacher": taught[f"teacher_{metric}"]}, settings)


def _speed(name: str, scratch: Path, config: FinetuneConfig, rounds: int) -> Planned:
    """Held-out rows per second through the models alone, in fp32, as they are served on a CPU."""
    assert config.held_out is not None
    student, teacher = scratch / "taught", Path(config.output)
    task = load_bundle(teacher / "bundle").task
    assert task is not None
    rows = labelled_rows(config.held_out, "held_out", task.shapes(task.chosen)).rows

    def rate(folder: Path) -> float:
        predictor = Predictor(folder / "bundle")
        windows = predictor.encode(rows)
        began = time.perf_counter()
        predictor.forward(windows)
        return len(rows) / (time.perf_counter() - began)

    return compare(
        name,
        lambda: rate(student),
        lambda: rate(teacher),
        unit="rows/s",
        rounds=rounds,
        precision="fp32",
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    main(benchmark, "distill")
