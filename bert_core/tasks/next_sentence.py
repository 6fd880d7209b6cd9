"""Whether a text follows another (Devlin et al. 2018, section 3.1, task 2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.errors import InputError
from bert_core.metrics.classification import (
    by_label,
    f1_names,
    single_label_metrics,
    wrong_labels,
)
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import NEXT_SENTENCE
from bert_core.tasks.base import CuttingParameters, Kind, Options, Task, numbered
from bert_core.tasks.evaluation import Columns
from bert_core.tasks.shapes import Label, Row
from bert_core.tasks.texts import softmax, text_windows

if TYPE_CHECKING:
    from bert_core.objectives.sentence_pairs import NextSentencePrediction

LABELS = ["IsNext", "NotNext"]
"""In the order of pretraining's labels: 0 = is next."""


@dataclass(frozen=True, kw_only=True)
class SentencePair:
    """Two texts."""

    text: str
    """The first text."""
    text_pair: str
    """The text that may follow it."""


@dataclass(frozen=True, kw_only=True)
class IsNext:
    """The expected answer for two texts."""

    label: Label
    """`IsNext` or `NotNext`."""


class NextSentence(Task):
    """Rows are `{"text": …, "text_pair": …, "label": "IsNext"}`."""

    name = "next-sentence-prediction"
    objective = "nsp"
    graph_scores = NEXT_SENTENCE
    inputs = SentencePair
    target = IsNext
    kinds = (
        Kind(
            name="pair",
            rows=(
                {"text": "The ship left.", "text_pair": "It sailed west.", "label": "IsNext"},
                {"text": "The ship left.", "text_pair": "Close the file.", "label": "NotNext"},
            ),
        ),
    )
    primary_metric = "accuracy"
    pipeline_tag = "text-classification"
    pretrained = True
    parameters = CuttingParameters
    examples = ({"text": "The ship left the port.", "text_pair": "It sailed west."},)
    cell_types: Mapping[str, pa.DataType] = {"label": pa.string(), "score": pa.float64()}

    def __init__(self, labels: Sequence[str] = (), options: Options | None = None) -> None:
        super().__init__(LABELS, options)

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        if row["label"] not in LABELS:
            raise InputError(
                f"wanted the label {' or '.join(LABELS)}, got {row['label']!r}: rename it, or "
                "remove the row"
            )
        return row

    def build_objective(self, config: EncoderConfig) -> "NextSentencePrediction":
        from bert_core.objectives.sentence_pairs import NextSentencePrediction

        return NextSentencePrediction(config)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: CuttingParameters | None = None,
    ) -> list[Window]:
        labels = {"next_sentence_label": _label_ids(rows)} if labelled else {}
        return text_windows(rows, tokenizer, max_length, labels, parameters)

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "2"]],
        parameters: CuttingParameters | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Return both labels with their scores, the higher score first."""
        return [
            sorted(
                (
                    {"label": label, "score": float(share)}
                    for label, share in zip(LABELS, shares, strict=True)
                ),
                key=lambda entry: -entry["score"],
            )
            for shares in softmax(np.stack(list(scores)))
        ]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        predicted = [LABELS.index(answer[0]["label"]) for answer in answers]
        return {"predicted": np.array(predicted), "label": _label_ids(rows)}

    def constant(self, rows: Sequence[Row]) -> Columns:
        labels = _label_ids(rows)
        return {"predicted": np.full_like(labels, int(labels.mean() > 0.5)), "label": labels}

    def cells(self, answer: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(answer[0])

    def metrics(self, columns: Columns) -> dict[str, float]:
        return single_label_metrics(columns["predicted"], columns["label"], f1_of=f1_names(LABELS))

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]]:
        return by_label(columns["predicted"], columns["label"], self.labels)

    def faults(self, columns: Columns) -> Int[np.ndarray, "rows"]:
        return wrong_labels(columns["predicted"], columns["label"])

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"]:
        return np.array([answer[0]["score"] for answer in answers])


def _label_ids(rows: Sequence[Row]) -> Int[np.ndarray, "rows"]:
    for number, row in enumerate(rows, 1):
        with numbered(number):
            NextSentence.checked_row(row)
    return np.array([LABELS.index(row["label"]) for row in rows], dtype=np.int64)
