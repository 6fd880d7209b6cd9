"""What a task is: labelled rows to ids, scores to answers, answers to metrics.

A new task is one file and an entry in `registry.TASKS`; stages, server and bundles pick it up.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from bert_core.data.tokenizer import Tokenizer
from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Objective

Row = Mapping[str, Any]
"""One example of a labelled set, as `bert_core.data.formats` reads it."""


@dataclass(frozen=True)
class EncodedRows:
    """Rows as an encoder takes them."""

    ids: list[np.ndarray]
    """uint32 ids a row, special tokens included."""
    labels: Int[np.ndarray, "rows"] | None
    """int64 label id a row; None where the rows have no labels."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What a caller may choose about an answer; each task adds its own fields."""

    truncation: bool = False
    """Whether to cut a text that is longer than the model's positions; else it is refused."""


class Task(ABC):
    """One task over a fixed list of labels."""

    name: ClassVar[str]
    """Hugging Face's name of the pipeline."""
    objective: ClassVar[str]
    """Name of the objective that trains it and scores its rows."""
    primary_metric: ClassVar[str]
    """The metric that decides between two models; higher is better."""
    parameters: ClassVar[type[Parameters]]
    """Class of what `decode` takes."""

    labels: list[str]
    """The labels; a label's place is its id."""

    @abstractmethod
    def __init__(self, labels: list[str]) -> None: ...

    @classmethod
    @abstractmethod
    def from_rows(cls, rows: Sequence[Row]) -> "Task":
        """The task whose labels are those of the training rows, sorted.

        Raises: CorpusError if a row lacks what the task reads.
        """

    @abstractmethod
    def build_objective(self, config: EncoderConfig) -> Objective:
        """A fresh head with the task's loss."""

    @abstractmethod
    def encode(self, rows: Sequence[Row], tokenizer: Tokenizer, max_length: int) -> EncodedRows:
        """Ids and labels of rows, each cut to `max_length` ids.

        Raises: CorpusError if a row lacks a field or its label is not one of `labels`.
        """

    @abstractmethod
    def label_ids(self, rows: Sequence[Row]) -> Int[np.ndarray, "rows"]:
        """The label id of every row. Raises: CorpusError if a label is not one of `labels`."""

    @abstractmethod
    def predictions(self, logits: Float[np.ndarray, "rows classes"]) -> np.ndarray:
        """What `metrics` compares with the labels."""

    @abstractmethod
    def decode(
        self, logits: Float[np.ndarray, "rows classes"], parameters: Any = None
    ) -> list[Any]:
        """The answers, one a row, in Hugging Face's inference schema; None takes the defaults."""

    @abstractmethod
    def metrics(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Every metric by name, `primary_metric` among them."""
