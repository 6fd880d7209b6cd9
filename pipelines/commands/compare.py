"""`raybert compare`: two models on the same rows, metric by metric and row by row.

`raybert publish` compares a model with the champion in the same way, by its main metric.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core.checks import NonNegativeInt, PositiveInt, check_fields
from bert_core.errors import ConfigError, InputError
from bert_core.metrics.bootstrap import differences
from bert_core.tasks.shapes import Row
from bert_core.wording import shortened
from pipelines.answering.predictors import predict_here, predictor_of
from pipelines.commands.listing import show_table
from pipelines.corpus.labelled import LabelledConfig, labelled_rows, rows_of, usual_columns
from pipelines.runtime.progress import counted, say
from tracking.models.references import Reference
from tracking.runs.story import figure, is_share, words

if TYPE_CHECKING:
    from bert_core.tasks.base import Task
    from bert_core.tasks.evaluation import Columns

SHOWN = 100
"""Characters of a row to show."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare two models on the same rows: `raybert compare runs/a models:/b@champion
    --held_out.source rows.csv`."""

    a: str
    """A model: a folder, a URI, models:/name@alias, or owner/name of the Hugging Face hub."""
    b: str
    """Another model for the same task."""
    held_out: LabelledConfig = field(default_factory=LabelledConfig)
    """Rows that neither has been trained on."""
    show: NonNegativeInt = 3
    """How many of the rows to show that only one of the two answers right, for each of them."""
    threads: PositiveInt = 1
    """CPU threads."""
    tracking_uri: str | None = None
    """MLflow store of registered models; by default the one in MLFLOW_TRACKING_URI, or else
    runs/mlflow.db."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Answered:
    """A model's answers to the rows, beside their labels."""

    task: "Task"
    answers: list[Any]
    columns: "Columns"


def run(config: CompareConfig) -> None:
    """Answer the rows with both models, and print how they differ.

    Raises: ConfigError if the models are for different tasks; CorpusError about rows that do not
        fit; RaybertError if a model cannot be read.
    """
    predictor_of.cache_clear()  # an earlier run in this process may have read other contents
    folders = [
        Reference.parse(model).fetch(uri=config.tracking_uri) for model in (config.a, config.b)
    ]
    rows = _rows(config, folders)
    a, b = (_answered(config, folder, rows) for folder in folders)
    _show_metrics(a, b)
    say(
        f"on {counted(len(rows), 'row')}; B − A has its 95 % interval by paired bootstrap, for "
        "shares in points"
    )
    for name, folder in zip(("A", "B"), folders, strict=True):
        predictor = predictor_of(folder, config.threads)
        if seen := int(predictor.bundle.has_seen(predictor.task, rows).sum()):
            say(f"{name} was trained or selected on {seen:,} of them, so they favour it")
    _show_rows(config, rows, a, b)


def _rows(config: CompareConfig, folders: Sequence[Path]) -> Sequence[Row]:
    """Return the rows, which both models must be able to be measured on."""
    a, b = (predictor_of(folder, config.threads) for folder in folders)
    if not a.task.is_comparable(b.task):
        raise ConfigError(
            f"b: wanted a model for {a.task.name} with the options of {config.a}, "
            f"{a.task.chosen}, got one for {b.task.name} with {b.task.chosen}"
        )

    def check(rows: Sequence[Row]) -> list[Row | InputError]:
        of_a, of_b = (task.fitting(rows, learned=False) for task in (a.task, b.task))
        pairs = zip(of_a, of_b, strict=True)
        return [other if isinstance(other, InputError) else row for row, other in pairs]

    usual = usual_columns(a.bundle, a.task.name)
    read = labelled_rows(config.held_out, "held_out", a.task.shapes(a.task.chosen), check, usual)
    return read.rows


def _answered(config: CompareConfig, folder: Path, rows: Sequence[Row]) -> Answered:
    task = predictor_of(folder, config.threads).task
    with rows_of(config.held_out.source):
        answers = predict_here(folder, rows, config.threads).answers
    return Answered(task, answers, task.compare(rows, answers))


def _show_metrics(a: Answered, b: Answered) -> None:
    of_a, of_b = a.task.metrics(a.columns), b.task.metrics(b.columns)
    table = []
    for name, changes in differences(b.task.metrics, b.columns, a.columns).items():
        values = [of_a[name], of_b[name]]
        in_points = all(is_share(name, value) for value in values)
        shown = [figure(name, value) for value in values]
        table.append([words(name), *shown, *(_change(in_points, each) for each in changes)])
    show_table(["metric", "A", "B", "B − A", "from", "to"], table)


def _change(in_points: bool, difference: float) -> str:
    """Return a difference of metrics; of shares, in points of a hundred."""
    return f"{100 * difference:+.1f}" if in_points else f"{difference:+.4g}"


def _show_rows(config: CompareConfig, rows: Sequence[Row], a: Answered, b: Answered) -> None:
    """Print how many rows only one of them answers right, and some of these."""
    wrong_a, wrong_b = a.task.wrong(a.columns), b.task.wrong(b.columns)
    if wrong_a is None or wrong_b is None:
        return
    both, neither = int((~wrong_a & ~wrong_b).sum()), int((wrong_a & wrong_b).sum())
    say(f"both are right on {both:,} rows, both wrong on {neither:,}")
    for name, right in (("A", wrong_b & ~wrong_a), ("B", wrong_a & ~wrong_b)):
        places = np.flatnonzero(right)
        say(f"only {name} is right on {counted(len(places), 'row')}")
        for place in places[: config.show]:
            shown = [shortened(str(value), SHOWN) for value in rows[place].values()]
            say(f"  row {place + 1}: {' · '.join(shown)}")
            say(f"    A {_short(a, int(place))}   B {_short(b, int(place))}")


def _short(model: Answered, place: int) -> str:
    cells = model.task.cells(model.answers[place])
    parts = [
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in cells.items()
    ]
    return shortened(", ".join(parts), SHOWN)
