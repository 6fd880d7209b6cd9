"""The code that MLflow runs for `models:/<name>@champion`: a bundle behind the pyfunc interface.

"Model from code": MLflow copies this file next to the bundle and executes it when the model is
loaded, so nothing is pickled. Loading it requires raybert.
"""

from dataclasses import fields
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
from mlflow.pyfunc import PythonModel, PythonModelContext

from bert_core.errors import InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.shapes import rows_of

BUNDLE = "bundle"
INPUTS = "inputs"


class BundleModel(PythonModel):
    """A bundle as an MLflow model: takes inputs of the task, returns the best answer per row."""

    predictor: Predictor

    def load_context(self, context: PythonModelContext) -> None:
        self.predictor = Predictor(context.artifacts[BUNDLE])

    def predict(
        self,
        context: PythonModelContext | None,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Answer each row with the columns of the task's `cells`, such as `label` and `score`.

        Args:
            context: passed by MLflow; not used.
            model_input: the fields of the task's `inputs` by name, one row of lists if they came as
                a dict of lists; or one column, called `inputs` or like the first field, as MLflow
                makes it from a list of texts. Without rows, the answer has none either.
            params: fields of the task's parameters. With a non-default `top_k` there is one column,
                `answers`, with the complete answers.
        Raises: InputError if a field is missing, or the first column has another name.
        """
        chosen = {name: value for name, value in (params or {}).items() if value is not None}
        parameters = self.predictor.task.parameters(**chosen)
        task = self.predictor.task
        inputs = _inputs(model_input, task.inputs)
        # Spark's partitions may be empty; `Predictor.predict` wants an input.
        answers = self.predictor.predict(inputs, parameters) if inputs else []
        if getattr(parameters, "top_k", None) != getattr(task.parameters(), "top_k", None):
            return pd.DataFrame({"answers": answers})
        if not answers:
            return pa.schema(list(task.cell_types.items())).empty_table().to_pandas()
        return pd.DataFrame([task.cells(answer) for answer in answers])


def _inputs(frame: pd.DataFrame, shape: type) -> list[Any]:
    names = [field.name for field in fields(shape)]
    # NOTE: a signature without names accepts a bare list, but also passes on the first column of a
    # frame whatever its name: a column `label` before `text` would be taken as the input.
    first = frame.columns[0]
    if isinstance(first, str) and first not in (INPUTS, *names):
        raise InputError(
            f"wanted the first column to be called {' or '.join((INPUTS, *names))}, found "
            f"{first!r}: pass only the columns {', '.join(names)}, or a list of inputs"
        )
    present = [name for name in names if name in frame.columns]
    if not present:
        values = [None if _is_missing(value) else value for value in frame[first].tolist()]
        # MLflow makes one row of a dict of lists.
        return values[0] if len(values) == 1 and isinstance(values[0], list) else values
    rows = [
        {name: _plain(value) for name, value in row.items() if not _is_missing(value)}
        for row in frame[present].to_dict("records")
    ]
    return rows_of(shape, rows[0]) if len(rows) == 1 else rows


def _is_missing(value: Any) -> bool:
    """Whether a cell is None, NaN, NaT or NA."""
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


mlflow.models.set_model(BundleModel())
