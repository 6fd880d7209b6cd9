"""Which of several continuations is right (Devlin et al. 2018, section 4.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window, first_ids_of, ids_of, with_special_tokens
from bert_core.errors import CorpusError, InputError
from bert_core.metrics.classification import single_label_metrics, wrong_labels
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import MULTIPLE_CHOICE
from bert_core.tasks.base import CuttingParameters, Kind, Task, check_length, numbered
from bert_core.tasks.evaluation import Columns
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import softmax

if TYPE_CHECKING:
    from bert_core.objectives.multiple_choice import MultipleChoice as ChoiceObjective


@dataclass(frozen=True, kw_only=True)
class ChoiceInput:
    """A context and its possible continuations."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "json_schema_extra": {"allOf": [{"properties": {"choices": {"minItems": 2}}}]}
    }

    text: str
    """The context, or a question."""
    choices: list[str]
    """Possible continuations or answers, at least two."""

    def __post_init__(self) -> None:
        if len(self.choices) < 2:
            raise InputError(f"wanted at least two choices, got {len(self.choices)}")


@dataclass(frozen=True, kw_only=True)
class RightChoice:
    """The expected answer."""

    label: int
    """Index of the right choice, from 0."""


class MultipleChoice(Task):
    """Rows are `{"text": …, "choices": [...], "label": 2}`, with any number of choices."""

    name = "multiple-choice"
    objective = "multiple_choice"
    graph_scores = MULTIPLE_CHOICE
    inputs = ChoiceInput
    target = RightChoice
    kinds = (
        Kind(
            name="choices",
            rows=(
                {
                    "text": "She opened the umbrella because",
                    "choices": ["it was a fish.", "it rained."],
                    "label": 1,
                },
                {
                    "text": "He closed the file since",
                    "choices": ["he had read it.", "it flew.", "it rained."],
                    "label": 0,
                },
            ),
        ),
    )
    primary_metric = "accuracy"
    parameters = CuttingParameters
    examples = (
        {"text": "She opened the umbrella because", "choices": ["it rained.", "it was a fish."]},
    )
    cell_types: Mapping[str, pa.DataType] = {
        "label": pa.int64(), "choice": pa.string(), "score": pa.float64(),
    }  # fmt: skip

    @classmethod
    def from_huggingface(cls, entries: Mapping[str, Any], labels: list[str]) -> "MultipleChoice":
        return cls()

    @classmethod
    def checked(
        cls, rows: Sequence[Row], options: Any = None, *, learned: bool = True
    ) -> list[Row | InputError]:
        counts_from_1 = any(row["label"] == len(row["choices"]) for row in rows)
        if counts_from_1 and all(row["label"] >= 1 for row in rows):
            raise CorpusError(
                "rows: wanted labels that count choices from 0, got none of 0 but some of the "
                "number of choices, so they count from 1: subtract 1 from every label"
            )
        return super().checked(rows, options, learned=learned)

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        if not 0 <= row["label"] < len(row["choices"]):
            raise InputError(
                f"wanted a label from 0 to {len(row['choices']) - 1}, the index of a choice, got "
                f"{row['label']}: correct the row, or remove it"
            )
        return row

    def build_objective(self, config: EncoderConfig) -> "ChoiceObjective":
        from bert_core.objectives.multiple_choice import MultipleChoice as ChoiceObjective

        return ChoiceObjective(config)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: CuttingParameters | None = None,
    ) -> list[Window]:
        limit = max_length if parameters is None or parameters.truncation else None
        from_end = tokenizer.keeps_end
        texts = [row["text"] for row in rows]
        contexts = first_ids_of(tokenizer, texts, limit, from_end=from_end)
        all_choices = [choice for row in rows for choice in row["choices"]]
        all_ids = iter(first_ids_of(tokenizer, all_choices, limit, from_end=from_end))
        labels = _label_ids(rows) if labelled else None
        windows = []
        for number, (row, context) in enumerate(zip(rows, contexts, strict=True)):
            choices = [next(all_ids) for _ in row["choices"]]
            if limit is not None and min(len(context), max(map(len, choices))) > limit:
                # The odd token goes to the longer text, so the full lengths are needed.
                context, *choices = ids_of(tokenizer, [row["text"], *row["choices"]])
            if parameters is not None:
                longest = with_special_tokens(tokenizer, context, max(choices, key=len), limit)
                check_length(number, len(longest.ids), max_length, parameters)
            pairs = [
                with_special_tokens(tokenizer, context, ids, limit, from_end=from_end)
                for ids in choices
            ]
            cuts = (
                pair.cuts(("text", row["text"], context), (f"choices[{place}]", choice, ids))
                for place, (pair, choice, ids) in enumerate(
                    zip(pairs, row["choices"], choices, strict=True)
                )
            )
            windows.append(
                Window(
                    row=number,
                    ids=tuple(pair.ids for pair in pairs),
                    segment_b_start=tuple(pair.segment_b_start for pair in pairs),
                    labels={} if labels is None else {"labels": labels[number : number + 1]},
                    cuts=tuple(chain.from_iterable(cuts)),
                )
            )
        return windows

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_"]],
        parameters: CuttingParameters | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Return all choices of each row with their scores, best first."""
        answers = []
        for row, logits in zip(rows, scores, strict=True):
            shares = softmax(logits[: len(row["choices"])])
            answers.append(
                [
                    {"label": int(index), "choice": row["choices"][index],
                     "score": float(shares[index])}
                    for index in np.argsort(-shares, kind="stable")
                ]
            )  # fmt: skip
        return answers

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        predicted = [answer[0]["label"] for answer in answers]
        return {"predicted": np.array(predicted), "label": _label_ids(rows)}

    def constant(self, rows: Sequence[Row]) -> Columns:
        wanted = _label_ids(rows)
        return {"predicted": np.full_like(wanted, np.bincount(wanted).argmax()), "label": wanted}

    def cells(self, answer: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(answer[0])

    def metrics(self, columns: Columns) -> dict[str, float]:
        metrics = single_label_metrics(columns["predicted"], columns["label"])
        return {"accuracy": metrics["accuracy"]}

    def faults(self, columns: Columns) -> Int[np.ndarray, "rows"]:
        return wrong_labels(columns["predicted"], columns["label"])

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"]:
        return np.array([answer[0]["score"] for answer in answers])


def _label_ids(rows: Sequence[Row]) -> Int[np.ndarray, "rows"]:
    for number, row in enumerate(rows, 1):
        with numbered(number):
            MultipleChoice.checked_row(row)
    return np.array([row["label"] for row in rows], dtype=np.int64)
