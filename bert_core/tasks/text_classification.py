"""One label for one text (Devlin et al. 2018, section 4.1: single-sentence tasks)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float, Int

from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import CorpusError, InputError
from bert_core.metrics.classification import accuracy, macro_f1
from bert_core.model.variants import EncoderConfig
from bert_core.objectives.classification import Classification
from bert_core.tasks.base import EncodedRows, Parameters, Row, Task

Scoring = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, kw_only=True)
class TextClassificationParameters(Parameters):
    """Hugging Face's parameters of text classification."""

    top_k: int | None = None
    """Most labels in an answer, the best first; None gives all."""
    function_to_apply: Scoring = "softmax"
    """What turns logits into scores."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k = {self.top_k}: wanted at least 1, or none for all labels")
        if self.function_to_apply not in get_args(Scoring):
            raise InputError(
                f"function_to_apply = {self.function_to_apply!r}: "
                f"wanted one of {', '.join(get_args(Scoring))}"
            )


class TextClassification(Task):
    """Rows are `{"text": …, "label": …}`."""

    name = "text-classification"
    objective = Classification.name
    primary_metric = "accuracy"
    parameters = TextClassificationParameters

    def __init__(self, labels: list[str]) -> None:
        self.labels = list(labels)
        self._ids = {label: index for index, label in enumerate(self.labels)}

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> "TextClassification":
        labels = sorted({_field(row, "label", number) for number, row in enumerate(rows, 1)})
        if len(labels) < 2:
            raise CorpusError(
                f"training rows: wanted at least two labels, found {len(labels)} "
                f"({', '.join(labels) or 'no rows'}): add rows of another label"
            )
        return cls(labels)

    def build_objective(self, config: EncoderConfig) -> Classification:
        return Classification(config, len(self.labels))

    def encode(self, rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> EncodedRows:
        texts = [_field(row, "text", number) for number, row in enumerate(rows, 1)]
        labels = self.label_ids(rows) if any("label" in row for row in rows) else None
        return EncodedRows(tokenizer.encode(texts, max_length), labels)

    def label_ids(self, rows: Sequence[Row]) -> Int[np.ndarray, "rows"]:
        return np.array([self._label_id(row, number) for number, row in enumerate(rows, 1)])

    def predictions(self, logits: Float[np.ndarray, "rows classes"]) -> Int[np.ndarray, "rows"]:
        return logits.argmax(-1)

    def decode(
        self,
        logits: Float[np.ndarray, "rows classes"],
        parameters: TextClassificationParameters | None = None,
    ) -> list[list[dict[str, Any]]]:
        parameters = parameters or self.parameters()
        scores = _scores(logits, parameters.function_to_apply)
        best = np.argsort(-scores, axis=-1, kind="stable")[:, : parameters.top_k]
        return [
            [{"label": self.labels[index], "score": float(row[index])} for index in order]
            for row, order in zip(scores, best, strict=True)
        ]

    def metrics(
        self, predictions: Int[np.ndarray, "rows"], labels: Int[np.ndarray, "rows"]
    ) -> dict[str, float]:
        return {
            "accuracy": accuracy(predictions, labels),
            "macro_f1": macro_f1(predictions, labels),
        }

    def _label_id(self, row: Row, number: int) -> int:
        label = _field(row, "label", number)
        if label not in self._ids:
            raise CorpusError(
                f"row {number}: its label {label!r} is not one of the training rows', which are "
                f"{', '.join(self.labels)}: add such rows to the training set, or remove this one"
            )
        return self._ids[label]


def _field(row: Row, name: str, number: int) -> str:
    """A row's text or label. `number` counts from 1, for the message."""
    if not isinstance(row.get(name), str):
        came = repr(row[name]) if name in row else f"only {', '.join(row) or 'nothing'}"
        raise CorpusError(
            f"row {number}: wanted a field {name!r} that holds text, found {came}: "
            "correct the row, or name the right column"
        )
    return row[name]


def _scores(logits: Float[np.ndarray, "rows classes"], function: Scoring) -> np.ndarray:
    logits = logits.astype(np.float64)
    if function == "softmax":
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        return shifted / shifted.sum(-1, keepdims=True)
    if function == "sigmoid":
        # The form that overflows on neither side.
        return 0.5 * (1 + np.tanh(0.5 * logits))
    return logits
