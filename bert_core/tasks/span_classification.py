"""Labelled spans of a text that may be nested and overlap, such as `Bank of [England]`.

Every span of up to `max_span_length` parts of words (`data.words`) is scored for every label by
itself, from its first and its last part, so a span may lie within another, cross it, or have
several labels. Rows, and what a span is that cuts a word, are those of `span_rows`.

A text longer than the model's positions is read in overlapping windows; a span is scored in the
window where its first part has the most context.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from bert_core.checks import NonNegativeInt, PositiveInt, Share, check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Slice, Window, slices, with_special_tokens
from bert_core.data.words import Spans, parts_of
from bert_core.errors import CorpusError, InputError
from bert_core.metrics.entities import (
    entity_metrics,
    entity_metrics_by_type,
    misplaced,
    partial_metrics,
)
from bert_core.model.config import EncoderConfig
from bert_core.objectives import IGNORE
from bert_core.objectives.graph_scores import GraphScores, span_scores
from bert_core.tasks.base import Kind, Options, Parameters, Remarks, Task, numbered
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.shapes import Row
from bert_core.tasks.span_rows import Mark, Span, check_spans, marks_in, remarks_on_spans, units_in
from bert_core.tasks.tagged_words import by_type, marks_of_answer, read
from bert_core.tasks.texts import sigmoid

if TYPE_CHECKING:
    from bert_core.objectives.span_classification import SpanClassification as SpanScores

MOST = 32
"""The longest spans that are learned unless an option says otherwise."""
SPAN = [
    ("entity_group", pa.string()), ("score", pa.float64()), ("word", pa.string()),
    ("start", pa.int64()), ("end", pa.int64()),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SpanInput:
    """A text."""

    text: str
    """The text."""


@dataclass(frozen=True, kw_only=True)
class Spanned:
    """The expected answer: all labelled spans."""

    other_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"spans": ("entities",)}

    spans: list[Span]
    """`{"start": …, "end": …, "label": …}` for each labelled span of the text, in characters; or
    `[start, end, label]`."""


@dataclass(frozen=True, kw_only=True)
class SpanClassificationOptions(Options):
    """Options of span classification."""

    free_names: ClassVar = frozenset({"stride", "threshold"})

    max_span_length: PositiveInt | None = None
    """How many parts of words a span has at most; by default as many as the longest in the training
    rows, but at most 32. Longer ones are not found, and counted."""
    threshold: Share = 0.5
    """The probability that a span must reach to be in an answer."""
    stride: NonNegativeInt = 64
    """Pieces shared by neighbouring windows of a long text, at most half a window; spans that are
    longer than half of this may be missed."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True, kw_only=True)
class SpanParameters(Parameters):
    """Parameters of a request for spans."""

    threshold: Share | None = None
    """The probability that a span must reach; None takes the model's option."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True, slots=True)
class Scored:
    """What a window scores."""

    text: str
    units: Spans
    """The characters of each part of a word that it scores."""
    own: int
    """How many of them a span may begin at; later ones belong to the next window."""


class SpanClassification(Task):
    """Rows are `{"text": …, "spans": [...]}`, whose spans may be nested and overlap."""

    name = "span-classification"
    labels_of_rows = True
    objective = "span_classification"
    inputs = SpanInput
    target = Spanned
    kinds = (
        Kind(
            name="nested",
            rows=(
                {
                    "text": "Ada visited the Bank of England.",
                    "spans": [
                        {"start": 0, "end": 3, "label": "person"},
                        {"start": 16, "end": 31, "label": "organisation"},
                        {"start": 24, "end": 31, "label": "place"},
                    ],
                },
                {
                    "text": "Ada wrote a program.",
                    "spans": [{"start": 0, "end": 3, "label": "person"}],
                },
            ),
        ),
    )
    primary_metric = "f1"
    pipeline_tag = "token-classification"
    single_is_bare = True
    parameters = SpanParameters
    options = SpanClassificationOptions
    examples = ("The Bank of England is in London.",)
    cell_types: Mapping[str, pa.DataType] = {"entities": pa.list_(pa.struct(SPAN))}

    chosen: SpanClassificationOptions

    def __init__(
        self, labels: Sequence[str] = (), options: SpanClassificationOptions | None = None
    ) -> None:
        options = options or self.options()
        if options.max_span_length is None:
            options = replace(options, max_span_length=MOST)
        super().__init__(labels, options)
        self._most = options.max_span_length or MOST
        self._ids = {label: index for index, label in enumerate(self.labels)}
        self.graph_scores: GraphScores | None = span_scores(len(self.labels), self._most)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: SpanClassificationOptions | None = None
    ) -> "SpanClassification":
        labels = sorted({span["label"] for row in rows for span in row["spans"]})
        if not labels:
            raise CorpusError("training rows: wanted spans, found none: add rows with spans")
        options = options or cls.options()
        if options.max_span_length is None:
            sizes = [size for row in rows for size in _sizes(row)]
            options = replace(options, max_span_length=min(MOST, max(sizes, default=1)))
        return cls(labels, options)

    def build_objective(self, config: EncoderConfig) -> "SpanScores":
        from bert_core.objectives.span_classification import SpanClassification as SpanScores

        return SpanScores(config, len(self.labels), self._most)

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: SpanParameters | None = None,
    ) -> list[Window]:
        room = max_length - 2
        windows: list[Window] = []
        for number, reading in enumerate(read(rows, tokenizer, by_parts=True)):
            units, begin = reading.units, 0
            wanted = self._wanted(rows[number], number + 1, units.spans) if labelled else []
            for part in slices(len(reading.ids), room, min(self.chosen.stride, room // 2)):
                here = np.flatnonzero((units.firsts >= begin) & (units.firsts < part.end))
                begin = part.own_end
                own = int((units.firsts[here] < part.own_end).sum())
                labels, is_cut = self._labels(wanted, here, own)
                sequence = with_special_tokens(tokenizer, reading.ids[part.first : part.end])
                windows.append(
                    Window(
                        row=number,
                        ids=(sequence.ids,),
                        segment_b_start=(sequence.segment_b_start,),
                        positions={"token_positions": _positions(units.firsts[here], part)},
                        labels={"span_labels": labels} if labelled else {},
                        origin=Scored(reading.text, units.spans[here], own),
                        lacks_answer=is_cut,
                    )
                )
        return windows

    def _wanted(self, row: Row, number: int, units: Spans) -> list[tuple[int, int, int]]:
        """Return the label, the first unit and the last of each span that can be learned."""
        with numbered(number):
            self.checked_row(row, self.chosen)
        wanted = []
        for mark in marks_in(row):
            first, end = units_in(mark, units)
            if mark[0] in self._ids and 0 < end - first <= self._most:
                wanted.append((self._ids[mark[0]], first, end - 1))
        return wanted

    def _labels(
        self, wanted: Sequence[tuple[int, int, int]], here: Int[np.ndarray, "units"], own: int
    ) -> tuple[Int[np.ndarray, "units most labels"], bool]:
        """Return the labels of the spans from each unit of a window, by length, and whether a span
        ends behind the window. Units that belong to the next window have IGNORE.

        Args:
            here: the units of the window.
            own: how many of them a span may begin at.
        """
        labels = np.zeros((len(here), self._most, len(self.labels)), dtype=np.int8)
        labels[own:] = IGNORE
        is_cut = False
        for label, first, last in wanted:
            if not own or not here[0] <= first <= here[own - 1]:
                continue
            if last > here[-1]:
                is_cut = True
            else:
                labels[first - here[0], last - first, label] = 1
        return labels, is_cut

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "units most labels"]],
        parameters: SpanParameters | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Return the spans of each text, sorted by start, the longer first."""
        least = self.chosen.threshold if parameters is None else parameters.threshold
        least = self.chosen.threshold if least is None else least
        answers: list[list[dict[str, Any]]] = [[] for _ in rows]
        for window, of_window in zip(windows, scores, strict=True):
            scored = window.origin
            shares = sigmoid(of_window[: scored.own])
            for first, more, label in np.argwhere((shares >= least) & (shares > 0)).tolist():
                start = int(scored.units[first, 0])
                end = int(scored.units[first + more, 1])
                answers[window.row].append(
                    {
                        "entity_group": self.labels[label],
                        "score": float(shares[first, more, label]),
                        "word": scored.text[start:end],
                        "start": start,
                        "end": end,
                    }
                )
        for answer in answers:
            answer.sort(key=lambda span: (span["start"], -span["end"], span["entity_group"]))
        return answers

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return for each row the `correct`, `predicted` and `wanted` spans, counted by label (the
        last count is for labels that the model does not know), and how many overlap one of the
        same label: predicted ones (`touching`) and wanted ones (`touched`)."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("correct", "predicted", "wanted", "touching", "touched")
        }
        for number, (row, answer) in enumerate(zip(rows, answers, strict=True), 1):
            with numbered(number):
                self.checked_row(row, self.chosen)
            annotated = {*marks_in(row)}
            predicted = marks_of_answer(answer, of_entities=True)
            columns["correct"].append(by_type(predicted & annotated, self._ids))
            columns["predicted"].append(by_type(predicted, self._ids))
            columns["wanted"].append(by_type(annotated, self._ids))
            columns["touching"].append(_overlapping(predicted, annotated))
            columns["touched"].append(_overlapping(annotated, predicted))
        return {name: np.array(values) for name, values in columns.items()}

    def constant(self, rows: Sequence[Row]) -> Columns:
        return self.compare(rows, [[] for _ in rows])

    def cells(self, answer: list[dict[str, Any]]) -> dict[str, Any]:
        return {"entities": answer}

    def metrics(self, columns: Columns) -> dict[str, float]:
        """Return precision, recall and F1 of exact spans, and of spans that overlap one of the same
        label, as `partial_…`."""
        return entity_metrics(columns) | partial_metrics(columns)

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]]:
        return entity_metrics_by_type(columns, self.labels)

    def faults(self, columns: Columns) -> Int[np.ndarray, "rows"]:
        """Return the number of wrong spans. A span predicted instead of another counts once."""
        return misplaced(columns)

    def claims(
        self, rows: Sequence[Row], answers: Sequence[Any]
    ) -> tuple[Float[np.ndarray, "claims"], Bool[np.ndarray, "claims"]]:
        """Return the score of each span in the answers, and whether it is right."""
        scores: list[float] = []
        is_right: list[bool] = []
        for row, answer in zip(rows, answers, strict=True):
            annotated = {*marks_in(row)}
            for span in answer:
                scores.append(span["score"])
                mark = span["entity_group"], span["start"], span["end"]
                is_right.append(mark in annotated)
        return np.array(scores, dtype=np.float64), np.array(is_right, dtype=bool)

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        unknown = [span["label"] for row in rows for span in row["spans"]]
        unknown = [label for label in unknown if label not in self._ids]
        longer = sum(size > self._most for row in rows for size in _sizes(row))
        return {
            **super().remarks(rows),
            "spans_with_unknown_labels": len(unknown),
            "unknown_labels_of_spans": ", ".join(sorted({*unknown})),
            "spans_longer_than_the_model_finds": longer,
            **remarks_on_spans(rows, may_overlap=True),
        }

    def is_comparable(self, other: Evaluated) -> bool:
        # Options are about how spans are found, not what is measured.
        return isinstance(other, SpanClassification)

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        check_spans(row, None)
        return row


def _sizes(row: Row) -> list[int]:
    """Return the number of parts of words of each span of a row."""
    parts = parts_of(row["text"])
    places = [units_in(mark, parts) for mark in marks_in(row)]
    return [end - first for first, end in places]


def _positions(firsts: Int[np.ndarray, "units"], part: Slice) -> Int[np.ndarray, "units"]:
    """Return the tokens of a window, whose first is special, that are the first pieces of units."""
    return firsts - part.first + 1


def _overlapping(marks: set[Mark], others: set[Mark]) -> int:
    """Return how many of the marks overlap another with the same label."""
    return sum(
        any(label == other and start < stop and begin < end for other, begin, stop in others)
        for label, start, end in marks
    )
