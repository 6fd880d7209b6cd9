"""Fine-tuned bundles + GLUE's test files → the zip that gluebenchmark.com accepts.

The server accepts complete submissions only: eleven files with a line for every published row.
"""

import io
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_core import files
from bert_core.errors import ConfigError, CorpusError
from bert_core.manifest import Manifest, Output, read_manifest
from bert_core.metrics.glue import SCORED_TASKS, SETS, submission_lines, task_scores
from pipelines.answering.predictors import predict_rows, predictor_of
from pipelines.corpus.labelled import LabelledConfig, read_unlabelled
from pipelines.runtime.inputs import bundle_input, input_digest
from pipelines.runtime.progress import counted, say
from pipelines.runtime.result import SPREAD, Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, StageConfig
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.tasks.base import Task

SUBMISSION = "submission.zip"
BEGINNING = (1980, 1, 1, 0, 0, 0)
"""Timestamp of the files in the zip, fixed so that the same answers give the same bytes."""


@dataclass(frozen=True, kw_only=True)
class GlueConfig(StageConfig):
    """Which models answer GLUE's test sets."""

    models: dict[str, str] = field(default_factory=dict, metadata=INPUT)
    """Set → fine-tuned bundle, named as in `predict`, for cola, sst2, mrpc, stsb, qqp, mnli, qnli,
    rte and wnli; by default mnli_mismatched and ax use the bundle of mnli."""
    tests: dict[str, str] = field(default_factory=dict, metadata=INPUT)
    """Set → its test file as GLUE publishes it, for all eleven sets."""
    labels: dict[str, list[str]] = field(default_factory=dict)
    """Set → GLUE's names for its model's labels, in the model's order, if the model uses others:
    `{rte = ["entailment", "not_entailment"]}` for one that names them 0 and 1."""
    evaluations: dict[str, str] = field(default_factory=dict, metadata=INPUT)
    """Set → folder of `raybert evaluate` on its development rows, for the score over all tasks."""
    allow_incomplete: bool = False
    """Make the zip even if a set lacks its model, its file or some published rows: sets that no
    model answers are filled with their most frequent label, which says nothing about a model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("models", "tests", "labels", "evaluations"):
            unknown = sorted(getattr(self, name).keys() - SETS.keys())
            if unknown:
                raise ConfigError(
                    f"{name}: wanted sets among {', '.join(SETS)}, got {', '.join(unknown)}"
                )
        lacking = {
            "models": [name for name in SETS if self.model(name) is None],
            "tests": [name for name in SETS if name not in self.tests],
        }
        for name, sets in lacking.items():
            if sets and not self.allow_incomplete:
                raise ConfigError(
                    f"{name}: wanted all of GLUE's sets, since its server accepts only complete "
                    f"submissions, got none for {', '.join(sets)}: add them, or set "
                    "allow_incomplete to fill these with their most frequent label"
                )

    def model(self, name: str) -> str | None:
        """Return the bundle that answers a set; None if no bundle does."""
        return self.models.get(name) or self.models.get(SETS[name].task or name)

    def answered(self) -> list[str]:
        """Return the sets that a model answers."""
        return [name for name in SETS if self.model(name) and name in self.tests]


@dataclass(frozen=True, kw_only=True)
class GlueCounts(Counts):
    rows: int
    """That models answered."""
    filled_rows: int | None = None
    """Rows of the sets that no model answers; None without such a set."""
    scores: Mapping[str, float] = field(metadata=SPREAD)
    """On development rows."""

    @property
    def line(self) -> str:
        return counted(self.rows, "row")

    @property
    def sentence(self) -> str:
        filled = "" if self.filled_rows is None else f"; {self.filled_rows:,} others are filled in"
        rows = counted(self.rows, "row")
        return f"The submission has answers to {rows} of GLUE's test sets{filled}."


def run(config: GlueConfig) -> Manifest:
    """Answer the test sets and write the submission."""
    folders, inputs = {}, []
    for name in config.answered():
        model, test = str(config.model(name)), config.tests[name]
        folders[name], source = bundle_input(config, model, name=f"models.{name}")
        if not files.exists(test):
            raise CorpusError(f"tests.{name}: wanted a test file, got {test}, which does not exist")
        inputs += [source, DatasetInput(f"tests.{name}", files.sha256_of(test), test)]
    for name, folder in config.evaluations.items():
        digest = input_digest(folder, "evaluate")
        inputs.append(DatasetInput(f"evaluations.{name}", digest, folder))
    predictor_of.cache_clear()  # an earlier run in this process may have read other contents
    return run_stage("glue", config, inputs, lambda _: _submit(config, folders))


def _submit(config: GlueConfig, folders: Mapping[str, Path]) -> Result:
    measured = {name: read_manifest(path).counts for name, path in config.evaluations.items()}
    scores = task_scores({name: _numbers(counts) for name, counts in measured.items()})
    test_rows = {name: _read_test(config, name, folder) for name, folder in folders.items()}
    counts: Counter[str] = Counter()
    texts: dict[str, bytes] = {}
    for name, test_set in SETS.items():
        if name in test_rows:
            predicted = predict_rows(folders[name], test_rows[name].rows, config)
            answers = test_rows[name].in_glue_notation(predicted.answers)
            counts["rows"] += len(answers)
        else:
            answers = [test_set.filler for _ in range(test_set.rows)]
            counts["filled_rows"] += test_set.rows
            say(f"glue: {test_set.file} is filled with {test_set.filler!r}, no model answers it")
        texts[test_set.file] = submission_lines(answers).encode()
    path = files.join(config.output, SUBMISSION)
    files.write_bytes(path, _zip(texts))
    answered = {name: len(test.rows) for name, test in test_rows.items()}
    lacking = [name for name, test_set in SETS.items() if answered.get(name) != test_set.rows]
    readiness = "ready for gluebenchmark.com"
    if lacking:
        readiness = f"not {readiness} until a model answers all of {', '.join(lacking)}"
    say(f"glue: {counted(counts['rows'], 'answer')} in {path}, {readiness}")
    figures = {f"{task}_score": score for task, score in scores.items()}
    if scores:
        mean = sum(scores.values()) / len(scores)
        whole = len(scores) == len(SCORED_TASKS)
        figures["glue_score" if whole else "mean_of_some_tasks"] = mean
        say(
            f"glue: {mean:.1%} on development rows, "
            f"mean of {len(scores)} of {len(SCORED_TASKS)} tasks"
        )
    return Result(
        outputs={SUBMISSION: Output.of(path)},
        counts=GlueCounts(
            rows=counts["rows"], filled_rows=counts["filled_rows"] or None, scores=figures
        ),
    )


def _numbers(counts: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in counts.items() if isinstance(value, int | float)}


@dataclass(frozen=True)
class _TestRows:
    """The rows of a set, and the task and labels of its model."""

    task: "Task"
    labels: Mapping[str, str]
    """The model's label → GLUE's; empty for a set with numbers."""
    rows: list[dict[str, Any]]

    def in_glue_notation(self, answers: Sequence[Any]) -> list[str | float]:
        cells = [self.task.cells(answer) for answer in answers]
        if self.labels:
            return [self.labels[cell["label"]] for cell in cells]
        return [float(cell["score"]) for cell in cells]


def _read_test(config: GlueConfig, name: str, folder: Path) -> _TestRows:
    """Read the test rows of a set. Raises: ConfigError if the model has another task; CorpusError
    if rows are missing."""
    test_set, path = SETS[name], config.tests[name]
    task = predictor_of(folder, config.threads_per_worker).task
    labels = _labels(config, name, task)
    rows = read_unlabelled(LabelledConfig(source=path, format=test_set.format), task.inputs)
    if len(rows) != test_set.rows:
        message = (
            f"tests.{name}: wanted the {test_set.rows:,} rows that GLUE publishes, got "
            f"{len(rows):,} in {path}: its server will reject them"
        )
        if not config.allow_incomplete:
            raise CorpusError(f"{message}; give the whole file, or set allow_incomplete")
        say(message)
    return _TestRows(task, labels, rows)


def _labels(config: GlueConfig, name: str, task: "Task") -> dict[str, str]:
    """Map the model's labels to GLUE's; empty for a set with numbers."""
    test_set, model = SETS[name], config.model(name)
    required = "text-classification" if test_set.labels else "text-regression"
    if task.name != required:
        raise ConfigError(
            f"models.{name}: wanted a bundle for {required}, got {model}, which is for "
            f"{task.name}: fine-tune one on the set's own rows (--train.format {test_set.format})"
        )
    if not test_set.labels:
        return {}
    names = config.labels.get(name) or config.labels.get(test_set.task or name) or task.labels
    if sorted(names) != sorted(test_set.labels) or len(names) != len(task.labels):
        raise ConfigError(
            f"models.{name}: wanted the labels {', '.join(test_set.labels)}, got "
            f"{', '.join(names)} from {model}: fine-tune it on GLUE's own files, or set "
            f"labels.{name} to GLUE's names for {', '.join(task.labels)}"
        )
    return dict(zip(task.labels, names, strict=True))


def _zip(texts: Mapping[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in texts.items():
            archive.writestr(zipfile.ZipInfo(name, BEGINNING), data, zipfile.ZIP_DEFLATED)
    return sink.getvalue()
