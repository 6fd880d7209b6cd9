"""Runs a model over rows: the model is loaded once per process, and the rows spread over
workers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_core.data.windows import cut_rows
from bert_core.tasks.shapes import Row
from pipelines.corpus.labelled import rows_after
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import meter
from pipelines.runtime.stage_config import StageConfig
from tracking.models.hub import on_this_machine

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor

ROWS_PER_TASK = 512

NO_OPTIONS = "{}"


@dataclass(frozen=True)
class RowAnswers:
    """A model's answer to every row, in order."""

    answers: list[Any]
    tokens: int
    """Tokens that went through the model."""
    cut: int
    """Rows of which a part was left out, since they are longer than the model's positions; the
    passage of a question is always read whole."""


def predict_rows(
    folder: Path,
    rows: Sequence[Row],
    config: StageConfig,
    task: str | None = None,
    options: str = NO_OPTIONS,
) -> RowAnswers:
    """Answer every row with a model."""
    parts = _parts_of(rows)
    done: list[dict[str, Any]] = [{}] * len(parts)
    work = partial(_predict, folder.absolute(), config.threads_per_worker, task, options)
    with meter("predicting", len(rows), "rows") as progress:
        for index, part in run_tasks(work, parts, config, use_gpu=True):
            done[index] = part
            progress.add(len(part["answers"]))
    return _joined(done)


def predict_here(folder: Path, rows: Sequence[Row], threads: int) -> RowAnswers:
    """Answer every row with a model in this process."""
    done: list[dict[str, Any]] = []
    with meter("predicting", len(rows), "rows") as progress:
        for part in _parts_of(rows):
            done.append(_predict(folder, threads, None, NO_OPTIONS, part))
            progress.add(len(part[1]))
    return _joined(done)


def _parts_of(rows: Sequence[Row]) -> list[tuple[int, Sequence[Row]]]:
    starts = range(0, len(rows), ROWS_PER_TASK)
    return [(start, rows[start : start + ROWS_PER_TASK]) for start in starts]


def _joined(parts: Sequence[dict[str, Any]]) -> RowAnswers:
    answers = [answer for part in parts for answer in part["answers"]]
    tokens, cut = (sum(part[name] for part in parts) for name in ("tokens", "cut"))
    return RowAnswers(answers, tokens, cut)


def _predict(
    folder: Path,
    threads: int,
    name: str | None,
    options: str,
    part: tuple[int, Sequence[Row]],
) -> dict[str, Any]:
    predictor = predictor_of(folder, threads, name, options)
    task, (start, rows) = predictor.task, part
    with rows_after(start):
        windows = task.encode(rows, predictor.bundle.tokenizer, predictor.max_length)
    return {
        "answers": task.decode(rows, windows, predictor.forward(windows)),
        "tokens": sum(window.tokens for window in windows),
        "cut": cut_rows(windows),
    }


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as JSON: a hashable form, which `predictor_of` caches by."""
    return json.dumps(options, sort_keys=True)


@lru_cache(maxsize=2)
def predictor_of(
    folder: Path, threads: int, task: str | None = None, options: str = NO_OPTIONS
) -> "Predictor":
    """Return the model, loaded once per process."""
    from bert_core.inference.predictor import Predictor

    return Predictor(
        on_this_machine(folder), threads=threads, task=task, options=json.loads(options)
    )
