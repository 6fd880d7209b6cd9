"""The columns that an answer adds to its row, in the files of `predict` and of `evaluate`."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from bert_core.tasks.base import Task

ANSWER = "answer"
"""Column of the predictions with the whole answer, as JSON."""


def answer_cells(task: "Task", answer: Any, prefix: str, column: str) -> dict[str, Any]:
    """Return the cells that an answer adds to its row: the best answer in columns that start with
    `prefix`, and the whole answer in `column` unless `column` is empty."""
    best = {f"{prefix}{name}": value for name, value in task.cells(answer).items()}
    return best | ({column: answer} if column else {})


def answer_columns(
    task: "Task", answers: Sequence[Any], prefix: str = "predicted_", column: str = ANSWER
) -> dict[str, pa.Array]:
    """Return the `answer_cells` of all answers as Arrow arrays, with the whole answer as JSON."""
    rows = [answer_cells(task, answer, prefix, column) for answer in answers]
    types = {f"{prefix}{name}": kind for name, kind in task.cell_types.items()}
    arrays = {name: pa.array([row[name] for row in rows], kind) for name, kind in types.items()}
    if column:
        arrays[column] = pa.array([json.dumps(row[column]) for row in rows], pa.string())
    return arrays
