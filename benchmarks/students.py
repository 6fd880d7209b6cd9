"""What a small student learns from a teacher, when few rows are labelled, by the set.

    python -m benchmarks.students --student BUNDLE --output FOLDER [--only SET …] [--json FILE]

all-MiniLM-L6-v2 (`make checkpoints`) is fine-tuned on a set from the folder RAYBERT_DATA and
teaches students with three layers, which differ in where they start and what they learn from:

- `alone`: every other layer of MiniLM-L6 as published, labels only
- `taught`: the same layers of the fine-tuned teacher, the teacher's scores and vectors
- `unlabelled`: as `taught`, on up to 10,000 texts of the set with the teacher's answers as labels
- `general`: `--student`, the bundle of `python -m benchmarks.books distill`; the teacher's scores
- `general_augmented`: and three more rows per row, with some words replaced (Jiao et al. 2019)

Scores are means of three seeds. A killed run resumes in its folder.
"""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints import MINILM, required
from benchmarks.harness import provenance
from benchmarks.tasks import LINES, Line, stage_config
from bert_core.tasks.catalog import TASKS
from pipelines import distill, finetune, predict
from pipelines.answering.parts import ROWS
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.finetune import FinetuneConfig
from pipelines.predict import PredictConfig
from pipelines.training.student import TEACHER, AugmentationConfig, LossesConfig

LAYERS = (0, 2, 4)
SEEDS = (0, 1, 2)
LABELS = LossesConfig(soft=0.0, hard=1.0, cosine=0.0)
SCORES = LossesConfig(soft=1.0, hard=0.0, cosine=1.0, temperature=2.0)
SETS = {
    "SST-2": (2_000, 3.0),
    "STS-B": (1_500, 3.0),
    "Banking77": (2_000, 10.0),
    "CLINC150": (3_000, 10.0),
}
"""Set → training rows, epochs of the teacher."""
EPOCHS = 2.0
"""Of the students, as a multiple of the teacher's."""
TEXTS = 10_000
"""Without labels, at most; the labelled rows are among them."""


@dataclass(frozen=True)
class Student:
    """Where a student starts, and what it learns from."""

    start: str
    """`minilm`, `teacher` or `general`."""
    losses: LossesConfig
    copies: int = 0
    """Augmented rows per row."""
    unlabelled: bool = False
    """Whether it learns from texts without labels, in as many steps."""
    steps: float = 1.0
    """Training steps, as a multiple of those of the other students."""


STUDENTS = {
    "alone": Student("minilm", LABELS),
    "taught": Student("teacher", SCORES),
    "unlabelled": Student("teacher", SCORES, unlabelled=True),
    "general": Student("general", SCORES),
    "general_augmented": Student("general", SCORES, copies=3, steps=2.0),
}


def benchmark(
    line: Line, student: str | None, folder: Path, chosen: list[str], threads: int
) -> Iterator[dict[str, Any]]:
    """A result for each student of a set."""
    rows, epochs = SETS[line.name]
    minilm = str(required(MINILM))
    folder.mkdir(parents=True, exist_ok=True)
    line = replace(line, rows=rows, epochs=epochs)
    data = Path(os.environ["RAYBERT_DATA"])
    base = stage_config(line, minilm, data, folder)
    base = replace(base, seeds=(0,), threads_per_worker=threads)
    teacher = finetune.run(base).counts
    shared = {field.name: getattr(base, field.name) for field in fields(FinetuneConfig)}
    starts = {"minilm": (minilm, LAYERS), "teacher": (TEACHER, LAYERS), "general": (student, ())}
    for name in chosen:
        kind = STUDENTS[name]
        model, layers = starts[kind.start]
        changes: dict[str, Any] = {
            "output": str(folder / name),
            "seeds": SEEDS,
            "epochs": EPOCHS * epochs * kind.steps / (1 + kind.copies),
            "teacher": f"{base.output}/bundle",
            "model": model,
            "layers": layers,
            "losses": kind.losses,
            "augmentation": AugmentationConfig(copies=kind.copies),
        }
        if kind.unlabelled:
            train = _answered(replace(line, rows=TEXTS), base, folder / "texts")
            share = _rows(base.train.source) / _rows(train.source)  # for the same steps
            changes |= {"train": train, "epochs": changes["epochs"] * share}
        counts = distill.run(DistillConfig(**shared | changes)).counts
        metric = line.metric or counts["primary_metric"]
        scores = [seed[metric] for seed in counts["seeds"]]
        yield {
            "set": line.name,
            "student": name,
            "metric": metric,
            "mean": float(np.mean(scores)),
            "standard_error": float(np.std(scores, ddof=1) / len(scores) ** 0.5),
            "scores": scores,
            "teacher": teacher["seeds"][0][metric],
            "teacher_epochs": epochs,
            "epochs": changes["epochs"],
            "train_rows": counts["train_rows"],
            "held_out_rows": counts["held_out_rows"],
            "lr": line.lr,
            "made": provenance(),
        }


def _answered(line: Line, base: FinetuneConfig, folder: Path) -> LabelledConfig:
    """The texts of a set, labelled by the teacher that `base` trains."""
    folder.mkdir(exist_ok=True)
    texts = stage_config(line, base.model, Path(os.environ["RAYBERT_DATA"]), folder).train.source
    answers = PredictConfig(
        model=f"{base.output}/bundle",
        source=texts,
        output=str(folder / "answers"),
        answer_column="",
        num_workers=0,
        threads_per_worker=base.threads_per_worker,
        tracking_uri=base.tracking_uri,
    )
    predict.run(answers)
    kind = TASKS[line.task]
    _, labels = kind.shapes(kind.options_of(line.options))
    columns = {field.name: f"{answers.prefix}{field.name}" for field in fields(labels)}
    [part] = Path(answers.output, ROWS).iterdir()
    return LabelledConfig(source=str(part), columns={**columns})


def _rows(source: str) -> int:
    return len(Path(source).read_bytes().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.students")
    parser.add_argument("--student", help="bundle of the general stage, if its students are chosen")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--only", nargs="*", choices=SETS, default=[*SETS], metavar="SET")
    parser.add_argument(
        "--students", nargs="*", choices=STUDENTS, default=[*STUDENTS], metavar="STUDENT"
    )
    parser.add_argument("--threads", type=int, default=2, help="one where others run beside it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    chosen = parser.parse_args()
    if not chosen.student and any(STUDENTS[name].start == "general" for name in chosen.students):
        parser.error("--student: wanted the bundle of the general stage, got none")
    results = []
    for line in LINES:
        if line.name not in chosen.only:
            continue
        folder = chosen.output.absolute() / line.name.lower()
        for result in benchmark(line, chosen.student, folder, chosen.students, chosen.threads):
            print(
                f"{result['set']:<10}{result['student']:<20}{result['metric']} "
                f"{result['mean']:.1%} ± {result['standard_error']:.1%}, "
                f"teacher {result['teacher']:.1%}",
                flush=True,
            )
            results.append(result)
            if chosen.json:
                chosen.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
