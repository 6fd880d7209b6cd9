"""What MLflow runs for `models:/<name>@champion`: a bundle behind the pyfunc interface.

"Model from code": MLflow copies this file beside the bundle and executes it when the model is
loaded, so nothing is pickled. Whoever loads it needs raybert installed.
"""

from dataclasses import fields
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from bert_core.errors import InputError
from bert_core.predictor import Predictor

BUNDLE = "bundle"
INPUTS = "inputs"


class BundleModel(PythonModel):
    """Inputs of the task in, the best answer a row out."""

    predictor: Predictor

    def load_context(self, context: PythonModelContext) -> None:
        self.predictor = Predictor(context.artifacts[BUNDLE])

    def predict(
        self,
        context: PythonModelContext | None,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Answer each row with the columns of the task's `cells`: `label` and `score`, say.

        Args:
            context: what MLflow passes; not used.
            model_input: the fields of the task's `inputs` by name; or one column, called `inputs`
                or as the first field, such as MLflow makes of a list of texts.
            params: fields of the task's parameters. With a `top_k` other than its default there is
                one column, `answers`, that holds the whole answer.
        Raises: InputError if a field is missing, or the first column has another name.
        """
        chosen = {name: value for name, value in (params or {}).items() if value is not None}
        parameters = self.predictor.task.parameters(**chosen)
        task = self.predictor.task
        names = [one.name for one in fields(task.inputs)]
        answers = self.predictor.predict(_inputs(model_input, names), parameters)
        if getattr(parameters, "top_k", None) != getattr(task.parameters(), "top_k", None):
            return pd.DataFrame({"answers": answers})
        return pd.DataFrame([task.cells(answer) for answer in answers])


def _inputs(frame: pd.DataFrame, names: list[str]) -> list[Any]:
    # NOTE: a signature without names lets a bare list pass, but hands over the first column of a
    # frame whatever it is called: a column `label` before `text` would be answered.
    first = frame.columns[0]
    if isinstance(first, str) and first not in (INPUTS, *names):
        raise InputError(
            f"wanted the first column to be called {' or '.join((INPUTS, *names))}, found "
            f"{first!r}: pass the columns {', '.join(names)} alone, or a list of inputs"
        )
    there = [name for name in names if name in frame.columns]
    if not there:
        return [None if _is_missing(value) else value for value in frame[first].tolist()]
    return [
        {name: _plain(value) for name, value in row.items() if not _is_missing(value)}
        for row in frame[there].to_dict("records")
    ]


def _is_missing(value: Any) -> bool:
    """Whether a cell is None, NaN, NaT or NA."""
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


mlflow.models.set_model(BundleModel())
