"""A number for a text or text pair, like STS-B's similarity (Devlin et al. 2018, section 4.1).

The model's output is the number itself, in the unit of the training rows; it is learned in units of
their deviation from their mean, so that any unit will do.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.errors import CorpusError
from bert_core.metrics.regression import correlations
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import CLASSIFICATION
from bert_core.tasks.base import Kind, Remarks, Task
from bert_core.tasks.evaluation import Columns
from bert_core.tasks.modules import SAYS, activation_of
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import TextOptions, TextParameters, TextTask

if TYPE_CHECKING:
    from bert_core.objectives.classification import Classification


DEVIATIONS = (1e-30, 1e30)
"""Least and most deviation of scores that single precision has room for."""
LEAST_SHARE = 1e-5
"""Least deviation of scores as a share of their mean: single precision has seven digits."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The expected answer for a text or pair."""

    score: float
    """The number."""


class TextRegression(TextTask):
    """Rows are `{"text": …, "text_pair": …, "score": 4.2}`."""

    name = "text-regression"
    objective = "classification"
    graph_scores = CLASSIFICATION
    target = Score
    kinds = (
        Kind(
            name="pair",
            rows=(
                {"text": "A plane takes off.", "text_pair": "A plane is taking off.", "score": 5.0},
                {"text": "A plane takes off.", "text_pair": "A man reads.", "score": 0.4},
            ),
        ),
        Kind(
            name="single",
            rows=(
                {"text": "It could not be better.", "score": 4.5},
                {"text": "It does not work.", "score": 1.0},
            ),
        ),
    )
    primary_metric = "correlation"
    pipeline_tag = "text-classification"
    shares_head_with = ("text-ranking",)
    lower_is_better = frozenset({"mse", "rmse"})
    error_metric = "rmse"
    parameters = TextParameters
    single = "A plane takes off."
    pair: ClassVar = {"text": single, "text_pair": "A plane is taking off."}
    examples = (pair,)
    cell_types: Mapping[str, pa.DataType] = {"score": pa.float64()}
    ranks = True
    """Whether it is known how CrossEncoder makes a relevance of the number."""
    scores: tuple[float, float] = (0.0, 1.0)
    """Mean and deviation of the scores that are learned."""

    def __init__(self, labels: Sequence[str] = (), options: TextOptions | None = None) -> None:
        super().__init__(labels or ["score"], options)

    @classmethod
    def from_huggingface(
        cls, entries: Mapping[str, Any], labels: list[str]
    ) -> "TextRegression | None":
        if activation_of(entries, len(labels)) is not None:
            return None  # it ranks texts
        is_regression = entries.get("problem_type") in (None, "regression") and len(labels) == 1
        if not is_regression:
            return None
        task = cls(labels)
        # If it names an activation, that is not implemented here: `activation_of` returned None.
        task.ranks = not (entries.get(SAYS) or {}).get("activation_fn")
        return task

    @classmethod
    def from_head(cls, other: Task) -> "TextRegression":
        """Return the task for a model that ranks texts: the number is the model's output before any
        activation."""
        return cls(other.labels, cls.options(pairs=True))

    @classmethod
    def from_rows(cls, rows: Sequence[Row], options: TextOptions | None = None) -> "TextRegression":
        _mean_and_deviation(rows)  # raises if there is nothing to learn
        return cls(options=cls.with_pairs(rows, options or cls.options()))

    def to_learn(self, rows: Sequence[Row], max_length: int) -> "TextRegression":
        task = copy(self)
        task.scores = _mean_and_deviation(rows)
        return task

    def build_objective(self, config: EncoderConfig) -> "Classification":
        from bert_core.objectives.classification import Classification

        mean, deviation = self.scores
        return Classification(config, 1, problem_type="regression", mean=mean, deviation=deviation)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: TextParameters | None = None,
    ) -> list[Window]:
        labels = {}
        if labelled:
            labels = {"labels": np.array([row["score"] for row in rows], np.float32)}
        return self.windows(rows, tokenizer, max_length, labels, parameters)

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "1"]],
        parameters: TextParameters | None = None,
    ) -> list[dict[str, float]]:
        return [{"score": float(score)} for (score,) in scores]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        return {
            "predicted": np.array([answer["score"] for answer in answers]),
            "label": np.array([row["score"] for row in rows], dtype=np.float64),
        }

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        scores = [row["score"] for row in rows]
        mean, deviation = np.mean(scores), np.std(scores)
        told = f"{min(scores):g} to {max(scores):g}, mean {mean:g}, deviation {deviation:g}"
        return super().remarks(rows) | {"scores": told}

    def constant(self, rows: Sequence[Row]) -> Columns:
        wanted = np.array([row["score"] for row in rows], dtype=np.float64)
        return {"predicted": np.full_like(wanted, wanted.mean()), "label": wanted}

    def cells(self, answer: dict[str, float]) -> dict[str, Any]:
        return dict(answer)

    def metrics(self, columns: Columns) -> dict[str, float]:
        return correlations(columns["predicted"], columns["label"])

    def faults(self, columns: Columns) -> Float[np.ndarray, "rows"]:
        return np.abs(columns["predicted"] - columns["label"])

    def wrong(self, columns: Columns) -> None:
        return None


def _mean_and_deviation(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the mean and standard deviation of the training rows' scores.

    Raises: CorpusError if no model can learn them.
    """
    scores = np.array([row["score"] for row in rows], dtype=np.float64)
    if len(np.unique(scores)) < 2:
        raise CorpusError(
            f"training rows: wanted at least two different scores, found {len(rows)} rows with "
            "one or none: add rows with another score"
        )
    with np.errstate(over="ignore"):
        mean, deviation = float(scores.mean()), float(scores.std())
    low, high = DEVIATIONS
    if not low <= deviation <= high or abs(mean) > high:
        raise CorpusError(
            f"training rows: wanted scores that deviate from their mean by {low:g} to {high:g}, "
            f"got {deviation:g}: give them in another unit"
        )
    if deviation < LEAST_SHARE * abs(mean):
        raise CorpusError(
            f"training rows: wanted scores that differ by more than {LEAST_SHARE:g} of their size, "
            f"which the model's numbers can tell apart, got {scores.min():.12g} to "
            f"{scores.max():.12g}: subtract {scores.min():.12g} from all of them"
        )
    return mean, deviation
