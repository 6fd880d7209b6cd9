"""What models learn: every task fine-tuned by `raybert finetune` and by transformers' Trainer.

    python -m benchmarks.tasks --model FOLDER [--only NAME …] [--seeds N] [--json FILE]

Both start from the same checkpoint and see the same rows, cut into the same windows, with the same
hyperparameters, epochs and seeds, in steps of rows of any length; the same code decodes and scores
the answers of both. A fixed part of each set, drawn by seed 0, keeps a line below twenty minutes on
two cores.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import provenance
from benchmarks.peer_tasks import SHARE_OF_WARM_UP, Hyperparameters, scores_of, trained
from bert_core.bundle.format import load_bundle
from bert_core.tasks.catalog import TASKS
from pipelines import finetune
from pipelines.corpus.labelled import LabelledConfig, labelled_rows
from pipelines.finetune import FinetuneConfig

SEEDS = (0, 1, 2)
THREADS = 2


@dataclass(frozen=True, kw_only=True)
class Line:
    """A set, how much of it is used, and the hyperparameters of both."""

    name: str
    task: str
    train: tuple[str, str | None]
    """File below the data folder, and its format."""
    held_out: tuple[str, str | None]
    rows: int
    held_out_rows: int = 1000
    epochs: float = 2.0
    batch_size: int = 32
    lr: float = 5e-5
    max_length: int = 128
    columns: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None
    """The metric to compare; None: the task's primary metric."""


TWO = {"text": "sentence1", "text_pair": "sentence2"}
LINES = (
    Line(
        name="SST-2", task="text-classification", rows=6000, epochs=1, lr=2e-4,
        train=("sst2/train.tsv", "sst2"), held_out=("sst2/dev.tsv", "sst2"),
    ),
    Line(
        name="CoLA", task="text-classification", rows=4000, epochs=3, lr=2e-4, metric="matthews",
        train=("cola/in_domain_train.tsv", "cola"), held_out=("cola/in_domain_dev.tsv", "cola"),
    ),
    Line(
        name="MRPC", task="text-classification", rows=2000, epochs=3, lr=2e-4,
        train=("mrpc/msr_paraphrase_train.txt", "mrpc"),
        held_out=("mrpc/msr_paraphrase_test.txt", "mrpc"),
    ),
    Line(
        name="RTE", task="text-classification", rows=1000, epochs=3, lr=2e-4, columns=TWO,
        train=("rte/train.parquet", None), held_out=("rte/validation.parquet", None),
    ),
    Line(
        name="STS-B", task="text-regression", rows=2000, lr=2e-4,
        train=("stsb/sts-train.csv", "sts_benchmark"),
        held_out=("stsb/sts-dev.csv", "sts_benchmark"),
    ),
    Line(
        name="Banking77", task="text-classification", rows=3000, epochs=3, lr=3e-4,
        columns={"label": "category"},
        train=("banking77/train.csv", None), held_out=("banking77/test.csv", None),
    ),
    Line(
        name="CLINC150", task="text-classification", rows=4000, epochs=3, lr=3e-4,
        options={"out_of_scope": "oos"}, held_out_rows=1500,
        train=("clinc150/data_full.json", "clinc_train"),
        held_out=("clinc150/data_full.json", "clinc_test"),
    ),
    Line(
        name="WNUT-17", task="token-classification", rows=3394, lr=2e-4,
        train=("wnut17/wnut17train.conll", "conll"),
        held_out=("wnut17/emerging.dev.conll", "conll"),
    ),
    Line(
        name="UD EWT", task="token-classification", rows=3000, lr=2e-4,
        train=("ud_ewt/en_ewt-ud-train.conllu", "conllu"),
        held_out=("ud_ewt/en_ewt-ud-dev.conllu", "conllu"),
    ),
    Line(
        name="SQuADShifts", task="question-answering", rows=850, held_out_rows=500, lr=2e-4,
        batch_size=16, max_length=256,
        train=("squadshifts/amazon_reviews_v1.0.json", "squad"),
        held_out=("squadshifts/reddit_v1.0.json", "squad"),
    ),
)  # fmt: skip


def benchmark(
    model: str, lines: Sequence[Line], threads: int, seeds: Sequence[int] = SEEDS
) -> Iterator[dict[str, Any]]:
    """A line of the table for each set."""
    data = Path(os.environ["RAYBERT_DATA"])
    torch.set_num_threads(threads)
    for line in lines:
        with tempfile.TemporaryDirectory() as scratch:
            ours = stage_config(line, model, data, Path(scratch))
            ours = replace(ours, threads_per_worker=threads, seeds=tuple(seeds))
            yield _compared(line, ours, Path(scratch))


def _compared(line: Line, ours: FinetuneConfig, scratch: Path) -> dict[str, Any]:
    began = time.monotonic()
    counts = finetune.run(ours).counts
    middle = time.monotonic()
    theirs = [_trainer(line, ours, seed, scratch) for seed in ours.seeds]
    main = line.metric or counts["primary_metric"]
    scores = {
        "ours": [metrics[main] for metrics in counts["seeds"]],
        "trainer": [metrics[main] for metrics in theirs],
    }
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    variances = [np.var(values, ddof=1) for values in scores.values()]
    spread = float(np.sqrt(sum(variances) / len(ours.seeds)))
    difference = means["ours"] - means["trainer"]
    return {
        "name": line.name,
        "metric": main,
        **{f"{name}_mean": mean for name, mean in means.items()},
        "difference": difference,
        "standard_errors": abs(difference) / spread if spread else 0.0 if not difference else None,
        "baseline": counts.get(f"baseline_{main}"),
        **scores,
        "metrics": {"ours": counts["seeds"], "trainer": theirs},
        "minutes": [(middle - began) / 60, (time.monotonic() - middle) / 60],
        "settings": {
            "train": ours.train.source.rsplit("/", 1)[-1],
            "train_file": line.train[0],
            "held_out_file": line.held_out[0],
            "train_rows": counts["train_rows"],
            "held_out_rows": counts["held_out_rows"],
            "epochs": line.epochs,
            "batch_size": line.batch_size,
            "lr": line.lr,
            "max_length": line.max_length,
            "precision": ours.precision,
            "threads": ours.threads_per_worker,
            "seeds": list(ours.seeds),
        },
        "made": provenance(),
    }


def stage_config(line: Line, model: str, data: Path, scratch: Path) -> FinetuneConfig:
    """The stage's config; a part of each set is drawn and written as JSONL of its fields."""
    kind = TASKS[line.task]
    options = kind.options_of(line.options)

    def part(split: str, source: tuple[str, str | None], most: int) -> LabelledConfig:
        path, written_as = source
        config = LabelledConfig(
            source=str(data / path), format=written_as, columns={**line.columns}
        )
        rows = labelled_rows(config, "train", kind.shapes(options)).rows
        chosen = np.sort(np.random.default_rng(0).permutation(len(rows))[:most])
        target = scratch / f"{split}.jsonl"
        lines = (json.dumps({k: v for k, v in rows[n].items() if v is not None}) for n in chosen)
        target.write_text("".join(f"{row}\n" for row in lines))
        return LabelledConfig(source=str(target))

    return FinetuneConfig(
        output=str(scratch / "finetune"),
        model=model,
        task=line.task,
        options=line.options,
        train=part("train", line.train, line.rows),
        held_out=part("held_out", line.held_out, line.held_out_rows),
        max_length=line.max_length,
        epochs=line.epochs,
        batch_size=line.batch_size,
        lr=line.lr,
        warmup_share=SHARE_OF_WARM_UP,
        seeds=SEEDS,
        num_workers=0,
        threads_per_worker=THREADS,
        tracking_uri=f"sqlite:///{scratch}/mlflow.db",
    )


def _trainer(line: Line, config: FinetuneConfig, seed: int, scratch: Path) -> dict[str, float]:
    """The metrics of the Trainer's model on the held-out rows."""
    bundle = load_bundle(config.model)
    kind = TASKS[line.task]
    options = kind.options_of(line.options)
    assert config.held_out is not None
    rows, scored = (
        labelled_rows(source, "train", kind.shapes(options)).rows
        for source in (config.train, config.held_out)
    )
    task = kind.from_rows(rows, options)
    windows = task.encode(rows, bundle.tokenizer, line.max_length, labelled=True)
    chosen = Hyperparameters(
        config.steps(len(windows)), line.batch_size, config.optimizer, config.precision
    )
    pad_id = bundle.tokenizer.pad_id
    model, _ = trained(config.model, task, windows, pad_id, chosen, seed, scratch)
    windows_to_score = task.encode(scored, bundle.tokenizer, line.max_length, labelled=True)
    scores = scores_of(model, windows_to_score, pad_id)
    return task.metrics(task.compare(scored, task.decode(scored, windows_to_score, scores)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks")
    parser.add_argument("--model", required=True, help="folder of the checkpoint to start from")
    parser.add_argument("--only", nargs="*", default=[], help="names of the sets; all by default")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads that compute")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), metavar="N", help="0 to N - 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the list of results there")
    chosen = parser.parse_args()
    if chosen.seeds < 2:
        parser.error("--seeds: wanted at least 2, to have a standard error")
    lines = [line for line in LINES if not chosen.only or line.name in chosen.only]
    results = []
    for result in benchmark(chosen.model, lines, chosen.threads, range(chosen.seeds)):
        print(
            f"{result['name']:<14}{result['metric']:<12}"
            f"{result['ours_mean']:>8.3f}{result['trainer_mean']:>8.3f}"
            f"  {result['standard_errors'] or 0:.1f} standard errors, "
            f"{result['minutes'][0]:.1f} and {result['minutes'][1]:.1f} minutes",
            flush=True,
        )
        results.append(result)
        if chosen.json:  # after every line, since all of them take hours
            chosen.json.write_text(json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
