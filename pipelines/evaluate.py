"""Bundle + labelled rows → metrics with intervals, metrics by class, calibration, the worst errors,
and a prediction for every row. Or bundle + retrieval set → metrics of a search, by its vectors in
several forms.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_core import files
from bert_core.checks import NonNegativeInt
from bert_core.errors import ConfigError
from bert_core.manifest import Headline, Manifest
from bert_core.metrics.judged import NAMES, PRIMARY
from bert_core.tasks.shapes import Row
from bert_core.wording import without_secrets
from pipelines.answering.bm25 import NAME as BM25
from pipelines.answering.columns import answer_columns
from pipelines.answering.embedding import embed
from pipelines.answering.predictors import options_text, predict_rows, predictor_of
from pipelines.answering.searched_files import write_searched
from pipelines.answering.searching import (
    RetrievalConfig,
    check_dimensions,
    check_searches,
    search,
    table_of,
)
from pipelines.corpus.labelled import (
    LabelledConfig,
    labelled_input,
    labelled_rows,
    retrieval_files_of,
    rows_of,
    usual_columns,
)
from pipelines.corpus.retrieval_sets import RetrievalFiles, read_retrieval_set
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.outputs import local_outputs
from pipelines.runtime.progress import BROKEN, CUT, SEEN, counted, print_remarks, say
from pipelines.runtime.result import SPREAD, Counts, Result, spread
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, StageConfig
from pipelines.training.selection import metric_in_full
from tracking.runs.story import figure, score, words

if TYPE_CHECKING:
    from bert_core.metrics.calibration import Reliability
    from bert_core.tasks.base import Task
    from bert_core.tasks.evaluation import Columns

PREDICTIONS, CLASSES, WORST = "predictions.parquet", "classes.json", "worst.jsonl"
CALIBRATION = "calibration.json"
BEFORE = "expected_calibration_error_before"
"""Count of a model that selection rows have calibrated: its error without that."""
DOCUMENTS = "documents"
"""The count that only an evaluation on a retrieval set has."""
PICTURE, CALIBRATION_PICTURE = "answers.png", "calibration.png"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(StageConfig):
    """Which model to measure on which rows."""

    model: str = field(metadata=INPUT)
    """Fine-tuned bundle: a folder, a URI, models:/name@alias, or owner/name or owner/name@revision
    of the Hugging Face hub."""
    held_out: LabelledConfig = field(default_factory=LabelledConfig)
    """Rows that the model has not been trained on. For vectors also a retrieval set: a folder or
    data set with `corpus`, `queries` and `qrels` (BEIR, NanoBEIR, MTEB), or TREC's files."""
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    """How the documents of a retrieval set are searched."""
    task: str | None = None
    """Task to use for a model that was not fine-tuned, as in `predict`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a task that needs no head, as in `predict`."""
    metric: str | None = None
    """Metric that decides whether a model is worse than the champion; by default the task's main
    metric."""
    worst: NonNegativeInt = 50
    """Maximum rows in `worst.jsonl`: the wrong answers, worst and most confident first."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCounts(Counts):
    source: str
    rows: int
    wrong_rows: int | None = None
    """None for a task whose answers are not right or wrong."""
    primary_metric: str
    metrics: Mapping[str, float] = field(metadata=SPREAD)
    intervals: Mapping[str, tuple[float, float]]
    """95 % intervals by metric."""
    baseline: Mapping[str, float] = field(metadata=spread("baseline_{}"))
    """Metrics of the best answer that ignores the input, as far as the task has them."""
    calibration: Mapping[str, float] = field(default_factory=dict, metadata=SPREAD)
    """How far probabilities are to be believed; empty if answers have none."""
    remarks: Mapping[str, int | str] = field(metadata=SPREAD)
    """Rows that were changed, left out or seen before."""
    tokens_per_s: float

    def entries(self) -> dict[str, Any]:
        counts = super().entries()
        intervals = counts.pop("intervals")
        return {
            **counts,
            **{f"{name}_low": low for name, (low, _) in intervals.items()},
            **{f"{name}_high": high for name, (_, high) in intervals.items()},
        }

    def interval(self, name: str) -> str:
        low, high = (figure(name, bound) for bound in self.intervals[name])
        return f"{low} to {high}"

    @property
    def line(self) -> str:
        main = self.primary_metric
        rows = counted(self.rows, "row")
        return f"{score(main, self.metrics[main])} ({self.interval(main)}), {rows}"

    @property
    def sentence(self) -> str:
        main = self.primary_metric
        return (
            f"Measured on {counted(self.rows, 'row')}, the model has "
            f"{score(main, self.metrics[main])}; the 95 % interval is {self.interval(main)}."
        )

    @property
    def headline(self) -> Headline:
        main, beside = self.primary_metric, self.interval(self.primary_metric)
        if main in self.baseline:
            beside += f"; ignoring the text {figure(main, self.baseline[main])}"
        value = figure(main, self.metrics[main])
        return Headline(label=words(main), value=value, beside=beside)


@dataclass(frozen=True, kw_only=True)
class RetrievalCounts(EvaluateCounts):
    """Of an evaluation on a retrieval set; a row is a query."""

    documents: int
    forms: Mapping[str, float] = field(metadata=spread(f"{PRIMARY}_{{}}"))
    """The main metric of each form besides the full vectors, and of BM25."""

    @property
    def line(self) -> str:
        main = self.primary_metric
        found = f"{score(main, self.metrics[main])} ({self.interval(main)})"
        return f"{found}, {self._queries} in {counted(self.documents, 'document')}"

    @property
    def sentence(self) -> str:
        main = self.primary_metric
        return (
            f"Searching {counted(self.documents, 'document')} for {self._queries}, the model has "
            f"{score(main, self.metrics[main])}; the 95 % interval is {self.interval(main)}."
        )

    @property
    def headline(self) -> Headline:
        main, beside = self.primary_metric, self.interval(self.primary_metric)
        if BM25.lower() in self.forms:
            beside += f"; {BM25} {figure(PRIMARY, self.forms[BM25.lower()])}"
        return Headline(label=words(main), value=figure(main, self.metrics[main]), beside=beside)

    @property
    def _queries(self) -> str:
        return counted(self.rows, "query", "queries")


def run(config: EvaluateConfig) -> Manifest:
    """Score the model by its task's metrics."""
    folder, model = bundle_input(config, config.model)
    predictor_of.cache_clear()  # an earlier run in this process may have read other contents
    inputs = [model, labelled_input("held_out", config.held_out, "held_out")]
    return run_stage("evaluate", config, inputs, lambda _: _evaluate(config, folder))


def _evaluate(config: EvaluateConfig, folder: Path) -> Result:
    from bert_core.metrics.bootstrap import intervals

    if (found := retrieval_files_of(config.held_out, "held_out")) is not None:
        return _evaluate_search(config, folder, found)
    task_options = (config.task, options_text(config.options))
    predictor = predictor_of(folder, config.threads_per_worker, *task_options)
    task = predictor.task
    if config.metric in task.lower_is_better:
        raise ConfigError(
            f"metric: wanted one where higher is better, got {config.metric!r}: give another, or "
            "leave it out"
        )
    checked = partial(task.fitting, learned=False)
    usual = usual_columns(predictor.bundle, task.name)
    read = labelled_rows(config.held_out, "held_out", task.shapes(task.chosen), checked, usual)
    rows = read.rows
    with rows_of(config.held_out.source):
        baseline = task.baseline(rows)
    began = time.monotonic()
    with rows_of(config.held_out.source):
        predicted = predict_rows(folder, rows, config, *task_options)
    answers = predicted.answers
    seconds = time.monotonic() - began
    columns = task.compare(rows, answers)
    plain = task.plain(rows)
    if plain is not None:
        of_plain = predict_rows(folder, plain, config, *task_options).answers
        columns |= task.compare_plain(rows, of_plain)
    metrics = task.metrics(columns)
    main = metric_in_full("metric", config.metric or task.main_metric(metrics), metrics)
    ranges = intervals(task.metrics, columns)
    seen = int(predictor.bundle.has_seen(task, rows).sum())
    remarks = read.remarks | task.remarks(rows) | {CUT: predicted.cut, SEEN: seen}
    print_remarks("evaluate", remarks, config.held_out.source)
    wrong = task.wrong(columns)
    fit = _reliability(task, rows, answers)
    uncalibrated = task.before_calibration(answers)
    before = None if uncalibrated is None else _reliability(task, rows, uncalibrated)
    paths = _write(config, task, rows, answers, columns, (fit, before))
    counts = EvaluateCounts(
        source=without_secrets(config.held_out.source),
        rows=len(rows),
        wrong_rows=None if wrong is None else int(wrong.sum()),
        primary_metric=main,
        metrics=metrics,
        intervals=ranges,
        baseline=baseline,
        calibration={} if fit is None else _calibration(fit, before),
        remarks={**remarks, BROKEN: read.broken},
        tokens_per_s=predicted.tokens / seconds,
    )

    if fit is not None and before is not None:
        say(
            "evaluate: expected calibration error "
            f"{fit.expected_calibration_error:.4f}; before calibration it was "
            f"{before.expected_calibration_error:.4f}"
        )
    for name in metrics:
        beside = ""
        if name == task.error_metric and name in baseline:
            beside = f"; always giving the mean has {figure(name, baseline[name])}"
        value = figure(name, metrics[name])
        say(f"evaluate: {name} {value} ({counts.interval(name)}){beside}")
    return Result(outputs=local_outputs(config, paths), counts=counts, artifacts=paths)


def _evaluate_search(config: EvaluateConfig, folder: Path, found: RetrievalFiles) -> Result:
    """Search the documents of a retrieval set with the model's vectors."""
    from bert_core.metrics.bootstrap import intervals
    from bert_core.metrics.judged import judged_metrics

    task_options = (config.task, options_text(config.options))
    predictor = predictor_of(folder, config.threads_per_worker, *task_options)
    task, encoder = predictor.task, predictor.bundle.encoder_config
    main = metric_in_full("metric", config.metric or PRIMARY, NAMES)
    check_searches(task, found.source)
    check_dimensions(config.retrieval, encoder.hidden_size if task.headless else None)
    read = read_retrieval_set(found, skip=config.held_out.bad_rows == "skip")
    began = time.monotonic()
    documents = embed(folder, read.documents, "document", config, *task_options)
    queries = embed(folder, read.queries, "query", config, *task_options)
    seconds = time.monotonic() - began
    trained = getattr(task.chosen, "dimensions", ())
    searched = list(search(read, documents.vectors, queries.vectors, config.retrieval, trained))
    first = searched[0]
    metrics = first.metrics
    seen = int(predictor.bundle.has_seen(task, read.pairs).sum())
    remarks = read.remarks | {CUT: documents.cut + queries.cut, SEEN: seen}
    print_remarks("evaluate", remarks, config.held_out.source)
    paths = write_searched(config.local_folder, read, searched, config.worst)
    counts = RetrievalCounts(
        source=without_secrets(config.held_out.source),
        rows=len(read.queries),
        wrong_rows=None,
        primary_metric=main,
        metrics=metrics,
        intervals=intervals(judged_metrics, first.columns),
        baseline={},
        remarks=remarks,
        documents=len(read.documents),
        forms={each.form.lower().replace(" ", "_"): each.metrics[PRIMARY] for each in searched[1:]},
        tokens_per_s=(documents.tokens + queries.tokens) / seconds,
    )
    for line in table_of(searched):
        say(f"evaluate: {line}")
    return Result(outputs=local_outputs(config, paths), counts=counts, artifacts=paths)


def _write(
    config: EvaluateConfig,
    task: "Task",
    rows: Sequence[Row],
    answers: Sequence[Any],
    columns: "Columns",
    calibrated: "tuple[Reliability | None, Reliability | None]",
) -> list[Path]:
    """Write every file that this task has into the run's local folder.

    Args:
        calibrated: how far probabilities are to be believed, and how far before calibration.
    """
    from tracking.runs.plots import plot_answers, plot_reliability

    folder, (fit, before) = config.local_folder, calibrated
    table = pa.table(
        {
            **{name: [row.get(name) for row in rows] for name in _names(rows)},
            **answer_columns(task, answers),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    files.write_bytes(str(folder / PREDICTIONS), sink.getvalue())
    worst = "".join(
        json.dumps(row, ensure_ascii=False) + "\n"
        for row in worst_rows(task, rows, answers, columns, config.worst)
    )
    files.write_bytes(str(folder / WORST), worst.encode())
    written = [folder / PREDICTIONS, folder / WORST]
    classes = task.by_class(columns)
    if classes is not None:
        files.write_json(str(folder / CLASSES), classes)
        written.append(folder / CLASSES)
    if fit is not None:
        files.write_json(str(folder / CALIBRATION), _calibration(fit, before) | {"bins": fit.table})
        written.append(folder / CALIBRATION)
        written.append(plot_reliability(fit, folder / CALIBRATION_PICTURE))
    picture = plot_answers(columns, task.labels, folder / PICTURE)
    return [*written, *([] if picture is None else [picture])]


def _reliability(task: "Task", rows: Sequence[Row], answers: Sequence[Any]) -> "Reliability | None":
    from bert_core.metrics.calibration import reliability

    claims = task.claims(rows, answers)
    return None if claims is None or not len(claims[0]) else reliability(*claims)


def _calibration(fit: "Reliability", before: "Reliability | None") -> dict[str, float]:
    return {
        "expected_calibration_error": fit.expected_calibration_error,
        "brier_score": fit.brier_score,
        **({} if before is None else {BEFORE: before.expected_calibration_error}),
    }


def worst_rows(
    task: "Task", rows: Sequence[Row], answers: Sequence[Any], columns: "Columns", most: int
) -> list[dict[str, Any]]:
    """Return the worst rows, by fault and then by confidence, both descending; correct rows are
    left out."""
    faults, confidence = task.faults(columns), task.confidence(answers)
    certainty = np.zeros(len(rows)) if confidence is None else confidence
    order = [place for place in np.lexsort((-certainty, -faults)) if faults[place] > 0]
    shapes = [[field.name for field in fields(shape)] for shape in task.shapes(task.chosen)]
    return [
        {
            "row": int(place) + 1,
            "fault": float(faults[place]),
            **({} if confidence is None else {"confidence": float(confidence[place])}),
            **{
                part: {
                    name: rows[place][name] for name in names if rows[place].get(name) is not None
                }
                for part, names in zip(("input", "wanted"), shapes, strict=True)
            },
            "answer": task.cells(answers[place]),
        }
        for place in order[:most]
    ]


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))
