"""Bundle + labelled rows → metrics, confusion matrix, and a prediction for every row in order."""

import time
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_core import files
from bert_core.manifest import Manifest, Output
from pipelines.distribute import run_tasks
from pipelines.report import meter, say
from pipelines.sources import LabelledConfig, labelled_input, read_labelled
from pipelines.stage import INPUT, Result, StageConfig, run_stage
from tracking.runs import DatasetInput

if TYPE_CHECKING:
    from bert_core.predictor import Predictor

PREDICTIONS = "predictions.parquet"
ROWS_PER_TASK = 512


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(StageConfig):
    """Which model to measure on which rows."""

    model: str = field(metadata=INPUT)
    """Fine-tuned bundle: a folder, a URI, or models:/name@alias."""
    held_out: LabelledConfig = field(default_factory=LabelledConfig)
    """Rows that the model has not been trained on."""


def run(config: EvaluateConfig) -> Manifest:
    """Score the model by its task's metrics."""
    from bert_core.bundle import bundle_digest
    from tracking.resolve import resolve

    folder = resolve(config.model, uri=config.tracking_uri)
    _predictor.cache_clear()  # what lay there in an earlier run of this process
    inputs = [
        DatasetInput("model", bundle_digest(folder), config.model),
        labelled_input("held_out", config.held_out, "held_out"),
    ]
    return run_stage("evaluate", config, inputs, lambda _: _evaluate(config, folder))


def _evaluate(config: EvaluateConfig, folder: Path) -> Result:
    from tracking.plots import plot_confusion

    rows = read_labelled(config.held_out, "held_out")
    task = _predictor(folder, config.threads_per_worker).task
    began = time.monotonic()
    answers = predict_rows(folder, [row["text"] for row in rows], config)
    seconds = time.monotonic() - began
    ids = {label: index for index, label in enumerate(task.labels)}
    wanted = task.label_ids(rows)
    predicted = np.array([ids[answer["label"]] for answer in answers])
    metrics = task.metrics(predicted, wanted)
    table = pa.table(
        {
            "text": [row["text"] for row in rows],
            "label": [row["label"] for row in rows],
            "predicted": [answer["label"] for answer in answers],
            "score": [answer["score"] for answer in answers],
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    path = files.join(config.output, PREDICTIONS)
    files.write_bytes(path, sink.getvalue())
    matrix = np.zeros((len(ids), len(ids)), dtype=np.int64)
    np.add.at(matrix, (wanted, predicted), 1)
    picture = plot_confusion(task.labels, matrix, config.local_folder / "confusion.png")
    main = task.primary_metric
    say(f"evaluate: {main} {metrics[main]:.1%} on {len(rows):,} rows, predictions in {path}")
    counts = {"rows": len(rows), "primary_metric": main, **metrics}
    counts["tokens_per_s"] = sum(answer["tokens"] for answer in answers) / seconds
    return Result(outputs={PREDICTIONS: Output.of(path)}, counts=counts, artifacts=[picture])


def predict_rows(folder: Path, texts: list[str], config: StageConfig) -> list[dict[str, Any]]:
    """The model's best answer to every text, in order, with the text's length in `tokens`."""
    starts = range(0, len(texts), ROWS_PER_TASK)
    tasks = [texts[start : start + ROWS_PER_TASK] for start in starts]
    answers: list[list[dict[str, Any]]] = [[] for _ in tasks]
    work = partial(_predict, folder.absolute(), config.threads_per_worker)
    with meter("predicting", len(texts), "rows") as progress:
        for index, found in run_tasks(work, tasks, config):
            answers[index] = found
            progress.add(len(found))
    return [answer for part in answers for answer in part]


def _predict(folder: Path, threads: int, texts: list[str]) -> list[dict[str, Any]]:
    predictor = _predictor(folder, threads)
    ids = predictor.encode(texts, truncation=True)
    answers = predictor.decode(predictor.forward(ids))
    return [{**best, "tokens": len(row)} for (best, *_), row in zip(answers, ids, strict=True)]


@lru_cache(maxsize=2)
def _predictor(folder: Path, threads: int) -> "Predictor":
    """The model, loaded once a process."""
    from bert_core.predictor import Predictor

    return Predictor(folder, threads=threads)
