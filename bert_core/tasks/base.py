"""What a task is: labelled rows to windows, scores to answers, answers to metrics.

A new task is one file and an entry in `catalog.TASKS`; stages, server and bundles pick it up.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Num

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, InputError
from bert_core.model.config import EncoderConfig
from bert_core.tasks.digests import Digests, row_digests
from bert_core.tasks.shapes import Row, as_row, has_empty_text

if TYPE_CHECKING:
    from bert_core.objectives.base import Objective

Columns = dict[str, np.ndarray]
"""What metrics are computed of, an entry a row in each: so any selection of rows has metrics."""

Remarks = dict[str, int | str]
"""What there is to tell of labelled rows, by name: counts, and what they were found to be. 0 and an
empty text are nothing to tell."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a task is told when a model is trained for it; each adds its own fields."""


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What a caller may choose about an answer; each task adds its own fields."""

    cut_by: ClassVar[str | None] = None
    """Name of the field that asks to cut what is too long; None where nothing is."""


@dataclass(frozen=True, kw_only=True)
class CuttingParameters(Parameters):
    """The same of a task that has one window a row."""

    cut_by: ClassVar[str | None] = "truncation"

    truncation: bool = False
    """Whether to cut a text that is longer than the model's positions; else it is refused."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of labelled rows that a task learns from, shown by rows of it.

    Help, documentation and the tests of every stage go over all of them.
    """

    name: str
    """What the rows are, in a word: `pair`."""
    rows: tuple[Row, ...]
    """Two rows or more, the first one with every column; together they are enough to train on."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that such rows need, by name."""


class Task(ABC):
    """One task over a fixed list of labels."""

    name: ClassVar[str]
    """Hugging Face's name of the pipeline, where there is one."""
    objective: ClassVar[str]
    """Name of the objective that trains it and scores its windows."""
    inputs: type
    """Dataclass of what is asked, by the names of Hugging Face's inference schema."""
    target: ClassVar[type]
    """Dataclass of what is right, which labelled rows have beside the input."""
    kinds: ClassVar[tuple[Kind, ...]]
    """The kinds of labelled rows that it learns from, the usual one first."""
    primary_metric: str
    """The metric that decides between two models where none is named; higher is better."""
    parameters: type[Parameters] = Parameters
    """Class of what `decode` takes."""
    options: ClassVar[type[Options]] = Options
    """Class of what the task is told once."""

    lower_is_better: ClassVar[frozenset[str]] = frozenset()
    """The metrics that do not decide between two models, since a lower one is better."""
    pipeline_tag: ClassVar[str] = ""
    """Hugging Face's pipeline that answers as it does, where that has another name."""
    pretrained: ClassVar[bool] = False
    """Whether its head is one that pretraining trains."""
    headless: ClassVar[bool] = False
    """Whether it needs no head, so that any encoder answers it."""
    single_is_bare: ClassVar[bool] = False
    """Whether Hugging Face's schema answers an input that is no list by its answer alone, not by a
    list of one."""
    parameters_beside: ClassVar[bool] = False
    """Whether Hugging Face's schema has its parameters beside the inputs too."""
    replaceable: ClassVar[tuple[str, ...]] = ()
    """Fields whose words may be others without another answer being right."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Fields that many rows share, such as a passage that is asked about: rows of one are divided
    together into those that train and those that select."""
    group_rows: int = 1
    """Training rows that follow each other and have one loss together."""
    examples: tuple[Any, ...]
    """One input or more, as a caller sends them: shown in docs, and asked to see a model ready."""
    cell_types: Mapping[str, pa.DataType]
    """Names and types of `cells`."""

    labels: list[str]
    """The labels; a label's place is its id."""
    chosen: Options
    """What it was told."""

    def __init__(self, labels: Sequence[str] = (), options: Any = None) -> None:
        """None takes the options' defaults."""
        self.labels = list(labels)
        self.chosen = options or self.options()

    @classmethod
    def from_rows(cls, rows: Sequence[Row], options: Any = None) -> "Task":
        """The task whose labels are those of the training rows, sorted, where it has labels.

        Raises: CorpusError if there is nothing to tell apart.
        """
        return cls(options=options)

    @classmethod
    def from_huggingface(cls, entries: Mapping[str, Any], labels: list[str]) -> "Task | None":
        """The task of a model that transformers wrote; None where it is of another one.

        Args:
            entries: of its config.json.
            labels: of its head's outputs.
        """
        return cls(labels)

    def adapted(self, tensors: Container[str]) -> "Task":
        """The task as a model does it that has weights of these names."""
        return self

    @classmethod
    def shapes(cls, options: Any = None) -> tuple[type, type]:
        """Dataclasses of the fields of labelled rows: of the input, and of what is right."""
        return cls.inputs, cls.target

    @classmethod
    def digests(cls, rows: Sequence[Row], options: Any = None) -> Digests:
        """Of what each row asks, whatever is right of it: rows that ask the same have the same."""
        return row_digests(rows, [one.name for one in fields(cls.shapes(options)[0])])

    @classmethod
    def groups(cls, rows: Sequence[Row], options: Any = None) -> Digests:
        """The same of what rows have in common that are to be divided together."""
        return row_digests(rows, cls.shared) if cls.shared else cls.digests(rows, options)

    def request_of(self, row: Row) -> Any:
        """The input of a labelled row as a caller sends it: an object, or a text by itself."""
        names = [one.name for one in fields(self.inputs)]
        asked = {name: row[name] for name in names if row.get(name) is not None}
        values = list(asked.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else asked

    def encoder_config(self, config: EncoderConfig) -> EncoderConfig:
        """The encoder that it uses, of a model's. Raises: ConfigError if the model has none."""
        return config

    def files(self, config: EncoderConfig) -> dict[str, Any]:
        """What a bundle has beside the usual files: path in it → JSON value."""
        return {}

    @abstractmethod
    def build_objective(self, config: EncoderConfig) -> "Objective":
        """A fresh head with the task's loss."""

    @abstractmethod
    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: Any = None,
    ) -> list[Window]:
        """The windows of the rows, in their order, each of at most `max_length` ids.

        Args:
            labelled: whether the windows are to have the rows' labels.
            parameters: what a caller chose; None cuts what is too long. A window is longer than
                `max_length` where it is not to be cut.
        Raises: CorpusError if a label is not one of `labels`.
        """

    @abstractmethod
    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[np.ndarray],
        parameters: Any = None,
    ) -> list[Any]:
        """The answers, one a row, in Hugging Face's inference schema.

        Args:
            windows: of all the rows, as `encode` gives them.
            scores: of each window, as the objective's `logits` has them, padding included.
            parameters: None takes the defaults.
        """

    @abstractmethod
    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """What `metrics` needs to know of labelled rows and their answers (of the defaults)."""

    @abstractmethod
    def metrics(self, columns: Columns) -> dict[str, float]:
        """Every metric by name, the main one among them; at least one row."""

    def main_metric(self, metrics: Collection[str]) -> str:
        """The one that decides where none is named, of rows that have these metrics."""
        return self.primary_metric

    def is_comparable(self, other: "Task") -> bool:
        """Whether metrics tell which is better of two models, this task's and the other's."""
        return (self.name, self.chosen) == (other.name, other.chosen)

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        """What is odd in labelled rows that are used all the same, and how they were read."""
        return {"rows_with_empty_text": sum(has_empty_text(self.inputs, row) for row in rows)}

    def constant(self, rows: Sequence[Row]) -> Columns | None:
        """`compare` of the best answer that does not look at the input: the baseline.

        None where there is no such answer.
        """
        return None

    def baseline(self, rows: Sequence[Row]) -> dict[str, float]:
        """The metrics of `constant`; none where there is none."""
        columns = self.constant(rows)
        return {} if columns is None else self.metrics(columns)

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]] | None:
        """`precision`, `recall`, `f1` and `support` (rows or other items that are of it) of every
        class; None where there are no classes.
        """
        return None

    def faults(self, columns: Columns) -> Num[np.ndarray, "rows"]:
        """How wrong the answer to each row is: 0 where it is right.

        Where a task does not say, what the row alone lacks of 1 in the primary metric.
        """
        (rows,) = {len(column) for column in columns.values()}
        alone = (
            self.metrics({name: column[row : row + 1] for name, column in columns.items()})
            for row in range(rows)
        )
        return np.array([1.0 - metrics[self.primary_metric] for metrics in alone])

    def wrong(self, columns: Columns) -> Bool[np.ndarray, "rows"] | None:
        """Which rows are answered wrong; None where an answer is near or far, and not right or
        wrong."""
        return self.faults(columns) > 0

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"] | None:
        """The probability that each answer gives to itself; None where answers give none."""
        return None

    def claims(
        self, rows: Sequence[Row], answers: Sequence[Any]
    ) -> tuple[Float[np.ndarray, "claims"], Bool[np.ndarray, "claims"]] | None:
        """Each probability that calibration looks at, and whether what it is given to is right.

        Where a task does not say, that of each row's answer. None where answers give none.
        """
        confidence = self.confidence(answers)
        if confidence is None:
            return None
        return confidence, self.faults(self.compare(rows, answers)) == 0

    @abstractmethod
    def cells(self, answer: Any) -> dict[str, Any]:
        """The best of an answer in columns of a table."""

    @classmethod
    def cutting(cls) -> Parameters:
        """Parameters that cut what is too long, and are the defaults otherwise."""
        cut_by = cls.parameters.cut_by
        return cls.parameters(**({} if cut_by is None else {cut_by: True}))

    @classmethod
    def options_of(cls, values: Mapping[str, Any]) -> Options:
        """Options by name, checked.

        A whole number is text where text is wanted, as a label is that a user wrote without quotes.
        Raises: ConfigError naming the one that is not right.
        """
        hints = get_type_hints(cls.options)
        of_text = {name for name, hint in hints.items() if hint in (str, str | None)}
        given = {
            name: str(value) if name in of_text and type(value) is int else value
            for name, value in values.items()
        }
        try:
            return cls.options(**as_row(cls.options, given, "options"))
        except InputError as error:
            raise ConfigError(str(error)) from error

    @property
    def record(self) -> dict[str, Any]:
        """Labels and options as JSON has them."""
        return {"labels": self.labels, "options": asdict(self.chosen)}
