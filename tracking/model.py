"""What MLflow runs for `models:/<name>@champion`: a bundle behind the pyfunc interface.

"Model from code": MLflow copies this file beside the bundle and executes it when the model is
loaded, so nothing is pickled. Whoever loads it needs raybert installed.
"""

from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc import PythonModel, PythonModelContext

from bert_core.errors import InputError
from bert_core.predictor import Predictor

BUNDLE = "bundle"
TEXT_COLUMNS = ("inputs", "text")


class BundleModel(PythonModel):
    """Texts in, the best label and its score a row out."""

    predictor: Predictor

    def load_context(self, context: PythonModelContext) -> None:
        self.predictor = Predictor(context.artifacts[BUNDLE])

    def predict(
        self,
        context: PythonModelContext | None,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """Answer each row with `label` and `score`.

        Args:
            context: what MLflow passes; not used.
            model_input: texts in the first column, called `inputs` or `text`; MLflow makes such a
                frame of a list of texts.
            params: fields of the task's parameters. With `top_k` there is one column, `answers`,
                that holds a list of labels and scores a row.
        Raises: InputError if there are no texts, or the column has another name.
        """
        chosen = {name: value for name, value in (params or {}).items() if value is not None}
        parameters = self.predictor.task.parameters(**chosen)
        answers = self.predictor.predict(_texts(model_input), parameters)
        if "top_k" in chosen:
            return pd.DataFrame({"answers": answers})
        return pd.DataFrame([answer[0] for answer in answers])


def _texts(frame: pd.DataFrame) -> list[Any]:
    # NOTE: a signature without names lets a bare list pass, but hands over the first column of a
    # frame whatever it is called: a column `label` before `text` would be answered.
    name = frame.columns[0]
    if isinstance(name, str) and name not in TEXT_COLUMNS:
        raise InputError(
            f"wanted the texts in the first column, called {' or '.join(TEXT_COLUMNS)}, found "
            f"{name!r}: pass that column alone, renamed, or a list of texts"
        )
    return frame[name].tolist()


mlflow.models.set_model(BundleModel())
