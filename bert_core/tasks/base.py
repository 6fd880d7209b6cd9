"""A task turns labelled rows into windows, scores into answers, and answers into metrics.

A new task is one file and an entry in `catalog.TASKS`; stages, server and bundles pick it up.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import numpy as np
import pyarrow as pa

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, CorpusError, InputError, TooLongError
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import GraphScores
from bert_core.tasks.digests import Digests, row_digests
from bert_core.tasks.evaluation import Evaluated
from bert_core.tasks.shapes import Row, as_row, has_empty_text

if TYPE_CHECKING:
    from bert_core.objectives.base import Objective

Remarks = dict[str, int | str]
"""Notes about labelled rows to report, by name: counts, and properties that were detected. 0 and an
empty string mean nothing to report."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a task, fixed when a model is trained for it; each task adds its fields."""

    free_names: ClassVar[frozenset[str]] = frozenset()
    """Options that a head does not depend on: a student's may differ from its teacher's."""
    read_names: ClassVar[frozenset[str]] = frozenset()
    """Options that are read from a model's weights, so that nobody may set them."""
    own_names: ClassVar[frozenset[str]] = frozenset()
    """Options about a model's own sizes, which its students do not take over."""
    former_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options that older bundles have and nothing reads any more → what to do instead."""

    @classmethod
    def check_given(cls, values: Container[str]) -> None:
        """Check the names of the options that a user gives.

        Raises: ConfigError for one of `read_names` or `former_names`, which would have no effect.
        """
        for name, instead in sorted(cls.former_names.items()):
            if name in values:
                raise ConfigError(
                    f"options.{name}: wanted none, since it is no longer an option: {instead}"
                )
        for name in sorted(cls.read_names):
            if name in values:
                raise ConfigError(
                    f"options.{name}: wanted none, since it is read from the model's weights: "
                    "leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Settings of a request; each task adds its fields."""

    cut_by: ClassVar[str | None] = None
    """The field that enables cutting of inputs that are too long; None if the task never cuts."""

    @classmethod
    def cutting(cls) -> "Parameters":
        """Return the default parameters, but with cutting of inputs that are too long."""
        return cls(**({} if cls.cut_by is None else {cls.cut_by: True}))


@dataclass(frozen=True, kw_only=True)
class CuttingParameters(Parameters):
    """Parameters of a task with one window per row."""

    cut_by: ClassVar[str | None] = "truncation"

    truncation: bool = False
    """Cut texts that are longer than the model's positions; otherwise they are rejected."""


def check_length(row: int, tokens: int, max_length: int, parameters: Parameters) -> None:
    """Check the length of an input.

    Args:
        row: index of the input in the request, for the message.
        tokens: its tokens, special ones included.
        max_length: the most tokens that the model reads.
    Raises: TooLongError if it is longer.
    """
    if tokens > max_length:
        raise TooLongError(
            f"inputs[{row}]: wanted at most {max_length} tokens including special ones, the "
            f"model's maximum, got {tokens}",
            parameters.cut_by,
        )


@contextmanager
def numbered(row: int) -> Iterator[None]:
    """Turn an InputError into a CorpusError that names the row; rows count from 1."""
    try:
        yield
    except InputError as error:
        raise CorpusError(f"row {row}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of labelled rows that a task learns from, with example rows.

    Help, documentation and the tests of every stage iterate over all kinds.
    """

    name: str
    """One word for what the rows are: `pair`."""
    rows: tuple[Row, ...]
    """At least two rows, the first with every column; together they are enough to train on."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that these rows require, by name."""


class Task(Evaluated, ABC):
    """One task over a fixed list of labels.

    What evaluation asks of it is in `evaluation.Evaluated`; a task whose bundles
    sentence-transformers reads is a `modules.SentenceTransformer` too.
    """

    name: ClassVar[str]
    """Hugging Face's name for the pipeline, if it has one."""
    objective: ClassVar[str]
    """Name of the objective that trains it and scores its windows."""
    graph_scores: GraphScores | None
    """How its scores are taken from a graph; None if its objective has no graph."""
    inputs: type
    """Dataclass of an input, with the field names of Hugging Face's inference schema."""
    target: ClassVar[type]
    """Dataclass of the expected answer: the fields that labelled rows have besides the input."""
    kinds: ClassVar[tuple[Kind, ...]]
    """The kinds of labelled rows that it learns from, or is evaluated on if it is not trained, the
    most common first."""
    parameters: type[Parameters] = Parameters
    """Class of the parameters that `decode` takes."""
    options: ClassVar[type[Options]] = Options
    """Class of the task's options."""
    pipeline_tag: ClassVar[str] = ""
    """The equivalent Hugging Face pipeline, if its name differs from `name`."""
    pretrained: ClassVar[bool] = False
    """Whether pretraining trains its head."""
    headless: ClassVar[bool] = False
    """Whether it needs no head, so that any encoder can answer it."""
    trainable: ClassVar[bool] = True
    """Whether labelled rows train it; otherwise models for `shares_head_with` answer it, and rows
    only evaluate it."""
    shares_head_with: ClassVar[tuple[str, ...]] = ()
    """Other tasks whose models answer it with the same head, by name."""
    single_is_bare: ClassVar[bool] = False
    """Whether, in Hugging Face's schema, a single input outside a list gets its bare answer rather
    than a list of one."""
    parameters_at_root: ClassVar[bool] = False
    """Whether Hugging Face's schema also allows parameters at the top level, next to `inputs`."""
    replaceable: ClassVar[tuple[str, ...]] = ()
    """Fields whose words may be replaced without changing the right answer."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Fields that many rows share, such as the passage that questions are about. Rows with equal
    values stay together when rows are split into training rows and selection rows."""
    labels_of_rows: ClassVar[bool] = False
    """Whether its labels are those that training rows name; a head for others is of no use."""
    classes_in: ClassVar[str | None] = None
    """Entry of windows' labels with the class of each item that a loss is computed on, as an index
    into `labels`; with several labels per row, a 0 or 1 for each. None if it has no such classes,
    so that the loss cannot treat them differently."""
    implies_labels: bool = False
    """Whether labels follow from others, such as `I-place` from `B-place`, so that rows may lack
    them."""
    joint: bool = False
    """Whether the training rows of a global batch have one joint loss."""
    kept_together: str | None = None
    """Entry of windows' labels by which windows with equal values come one after another in
    training; None if any may come next."""
    decides: ClassVar[bool] = False
    """Whether its scores can be calibrated, and answers decided by thresholds, with the options of
    `text_classification`."""
    examples: tuple[Any, ...]
    """One or more inputs as a caller sends them: shown in docs, and run to check that a model is
    ready."""
    cell_types: Mapping[str, pa.DataType]
    """Names and types of the columns that `cells` returns."""

    labels: list[str]
    """The labels; a label's index is its id."""
    chosen: Options
    """The options that it was made with."""

    def __init__(self, labels: Sequence[str] = (), options: Any = None) -> None:
        """Create the task for these labels; None for `options` means the defaults."""
        self.labels = list(labels)
        self.chosen = options or self.options()

    @classmethod
    def from_rows(cls, rows: Sequence[Row], options: Any = None) -> "Task":
        """Return the task for these training rows; if it has labels, they are the rows', sorted.

        Raises: CorpusError if the rows leave nothing to distinguish.
        """
        return cls(options=options)

    @classmethod
    def from_huggingface(cls, entries: Mapping[str, Any], labels: list[str]) -> "Task | None":
        """Return the task of a model saved by transformers; None if it is for another task.

        Args:
            entries: contents of the model's config.json, with sentence-transformers' settings
                (`modules.settings_of`) under `modules.SAYS`.
            labels: names of the outputs of the model's head.
        """
        return cls(labels)

    @classmethod
    def from_head(cls, other: "Task") -> "Task | None":
        """Return this task as answered by a model for `other`, one of `shares_head_with`, with the
        same weights and scores. None if the labels or options of `other` do not allow it, or if it
        is unknown whether they do."""
        return None

    def in_order_of(self, learned: "Task | None") -> "Task":
        """Return the task with its labels in the order in which a model has learned them, if it has
        learned the same labels; otherwise unchanged.

        Args:
            learned: the model's task, if any.
        """
        if learned is None or learned.name != self.name or learned.labels == self.labels:
            return self
        same = set(learned.labels) == set(self.labels)
        return type(self)(learned.labels, self.chosen) if same else self

    def adapted(self, tensors: Container[str]) -> "Task":
        """Return the task for a model with weights of these names, by which some options are
        detected."""
        return self

    @classmethod
    def checked(
        cls, rows: Sequence[Row], options: Any = None, *, learned: bool = True
    ) -> list[Row | InputError]:
        """Return each labelled row as the task reads it, or the error about it.

        Args:
            learned: whether a loss is computed on the rows; otherwise answers to them are only
                scored.
        Raises: CorpusError for a fault that concerns all rows together.
        """
        checked: list[Row | InputError] = []
        for row in rows:
            try:
                checked.append(cls.checked_row(row, options, learned=learned))
            except InputError as error:
                checked.append(error)
        return checked

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        """Return a labelled row as the task reads it. Raises: InputError if the row is invalid."""
        return row

    def to_learn(self, rows: Sequence[Row], max_length: int) -> "Task":
        """Return the task with what it takes from its training rows and window length, such as the
        mean of the scores.

        Args:
            rows: the rows that are trained on.
            max_length: maximum number of ids of a window.
        Raises: CorpusError if nothing can be learned from the rows.
        """
        return self

    def fitting(
        self, rows: Sequence[Row], *, learned: bool = True, trained: bool = False
    ) -> list[Row | InputError]:
        """Return each labelled row as `checked` reads it, or the error about it. A label that the
        task does not have is an error too.

        Args:
            learned: as in `checked`.
            trained: whether a model is trained on the rows.
        Raises: CorpusError as `checked` does.
        """
        taken = self.checked(rows, self.chosen, learned=learned)
        for place, row in enumerate(taken):
            try:
                if not isinstance(row, InputError):
                    self.check_known(row)
                    if trained:
                        self.check_trained(row)
            except InputError as error:
                taken[place] = error
        return taken

    def check_known(self, row: Row) -> None:
        """Check that the row's labels are among `labels`, if the task has any. Raises: InputError
        if not."""

    def check_trained(self, row: Row) -> None:
        """Check a training row. Raises: InputError if nothing can be learned from it."""

    @classmethod
    def shapes(cls, options: Any = None) -> tuple[type, type]:
        """Return the dataclasses of the fields of labelled rows: the input, and the expected
        answer."""
        return cls.inputs, cls.target

    @classmethod
    def digests(cls, rows: Sequence[Row], options: Any = None) -> Digests:
        """Return a digest of each row's input, without its labels: equal inputs have equal
        digests."""
        return row_digests(rows, [one.name for one in fields(cls.shapes(options)[0])])

    @classmethod
    def groups(cls, rows: Sequence[Row], options: Any = None) -> Digests:
        """Return a digest of each row's group: rows with equal digests must stay together in a
        split."""
        return row_digests(rows, cls.shared) if cls.shared else cls.digests(rows, options)

    def request_of(self, row: Row) -> Any:
        """Return the input of a labelled row as a caller sends it: an object, or a bare text."""
        names = [one.name for one in fields(self.inputs)]
        request = {name: row[name] for name in names if row.get(name) is not None}
        values = list(request.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else request

    def encoder_config(self, config: EncoderConfig) -> EncoderConfig:
        """Return the part of a model's encoder that the task uses. Raises: ConfigError if the model
        lacks it."""
        return config

    @property
    def max_length(self) -> int | None:
        """Number of tokens to which inputs are cut, if lower than the model's positions; None if
        the task sets no limit."""
        return None

    @abstractmethod
    def build_objective(self, config: EncoderConfig) -> "Objective":
        """Create a newly initialized head with the task's loss."""

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
        """Return the windows of the rows, in order, each of at most `max_length` ids.

        Args:
            labelled: whether the windows carry the rows' labels.
            parameters: those of the request; None cuts what is too long. If cutting is disabled, a
                window may be longer than `max_length`.
        Raises: CorpusError if a label is not one of `labels`; InputError for a text that is too
            long, in tasks in which several windows would repeat it.
        """

    def least_windows(self, rows: Sequence[Row], parameters: Any) -> int:
        """Return a lower bound of the number of windows that `encode` makes, without tokenizing."""
        return len(rows)

    @abstractmethod
    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[np.ndarray],
        parameters: Any = None,
    ) -> list[Any]:
        """Return the answers, one per row, in Hugging Face's inference schema.

        Args:
            windows: the windows of all rows, as `encode` returns them.
            scores: one array per window, as the objective's `logits` returns them, padding
                included.
            parameters: None for the defaults.
        """

    def numbers(
        self,
        windows: Sequence[Window],
        hidden_size: int,
        scores: Sequence[np.ndarray] | None = None,
        parameters: Any = None,
    ) -> list[int]:
        """Return how many numbers the vectors in the answer to each window have; 0 if the answer
        has no vectors.

        Args:
            scores: the scores of the windows. If None, numbers that depend on them count as 0.
        """
        return [0] * len(windows)

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        """Return notes on how the rows were read, and on oddities of rows that are used anyway."""
        return {"rows_with_empty_text": sum(has_empty_text(self.inputs, row) for row in rows)}

    @abstractmethod
    def cells(self, answer: Any) -> dict[str, Any]:
        """Return the best candidate of an answer, as columns of a table."""

    @classmethod
    def options_of(cls, values: Mapping[str, Any]) -> Options:
        """Return the options with these values, by name, after checking them.

        A whole number is accepted where text is wanted, such as a label written without quotes.
        Raises: ConfigError naming the invalid option.
        """
        hints = get_type_hints(cls.options)
        of_text = {name for name, hint in hints.items() if hint in (str, str | None)}
        values = {
            name: str(value) if name in of_text and type(value) is int else value
            for name, value in values.items()
        }
        try:
            return cls.options(**as_row(cls.options, values, "options"))
        except InputError as error:
            raise ConfigError(str(error)) from error

    def before_calibration(self, answers: Sequence[Any]) -> list[Any] | None:
        """Return the answers that the model would give without the calibration that was fitted to
        it; None if there is none."""
        return None

    @property
    def notes(self) -> list[str]:
        """Return sentences, without a full stop, on how scores become answers, if it is not as
        usual."""
        return []

    @property
    def record(self) -> dict[str, Any]:
        """Labels and options as JSON values."""
        return {"labels": self.labels, "options": asdict(self.chosen)}
