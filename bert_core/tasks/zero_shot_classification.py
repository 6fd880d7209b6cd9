"""Labels that come with the request, by a model for natural language inference (Yin et al. 2019).

The text is the premise; a hypothesis per label says that it applies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import (
    Cut,
    Ids,
    Window,
    first_ids_of,
    ids_of,
    kept_of,
    with_special_tokens,
)
from bert_core.errors import FormatError, InputError
from bert_core.metrics.classification import (
    by_label,
    f1_names,
    single_label_metrics,
    wrong_labels,
)
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import CLASSIFICATION
from bert_core.tasks.base import CuttingParameters, Kind, Options, Task, check_length, numbered
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.shapes import Label, Row
from bert_core.tasks.texts import softmax
from bert_core.wording import nearest, shortened

if TYPE_CHECKING:
    from bert_core.objectives.classification import Classification

TEMPLATE = "This example is {}."
MOST_CHARACTERS = 500
"""Most characters of a template."""
INFERENCE_LABELS = ("contradiction", "entailment", "neutral")
"""The labels of a model that nothing is known of yet."""


@dataclass(frozen=True, kw_only=True)
class ZeroShotInput:
    """A text, and the labels that it may have."""

    text: str
    """The text."""
    candidate_labels: list[str] | None = None
    """The labels to choose from, if they are not those of the request."""

    def __post_init__(self) -> None:
        _check_labels(self.candidate_labels)


@dataclass(frozen=True, kw_only=True)
class CandidateLabel:
    """The expected answer."""

    label: Label
    """The label that applies best."""


@dataclass(frozen=True, kw_only=True)
class ZeroShotOptions(Options):
    """Labels to choose from where neither a row nor a request has any."""

    candidate_labels: list[str] | None = None
    """Labels to choose from; an evaluation needs all labels of its rows here."""
    hypothesis_template: str = TEMPLATE
    """Sentence that a label stands for, with `{}` once for the label; at most 500 characters."""
    multi_label: bool = False
    """Whether each label applies or not by itself; otherwise the scores of all labels sum to 1."""

    def __post_init__(self) -> None:
        _check_labels(self.candidate_labels)
        _check_template(self.hypothesis_template)


@dataclass(frozen=True, kw_only=True)
class ZeroShotParameters(CuttingParameters):
    """Hugging Face's parameters of zero-shot classification. Only the text is ever cut."""

    candidate_labels: list[str] | None = None
    """Labels to choose from; None takes those of the option."""
    hypothesis_template: str | None = None
    """Sentence that a label stands for, with `{}` once for the label; at most 500 characters. None
    takes that of the option, by default `This example is {}.`"""
    multi_label: bool | None = None
    """Whether each label applies or not by itself; otherwise the scores of all labels sum to 1.
    None does as the option says."""

    def __post_init__(self) -> None:
        _check_labels(self.candidate_labels)
        _check_template(self.hypothesis_template)


class ZeroShotClassification(Task):
    """Rows are `{"text": …, "label": …}`, with `candidate_labels` of their own if they differ.

    `labels` are those of the inference model: one begins with "entail", as transformers looks for
    it too.
    """

    name = "zero-shot-classification"
    objective = "classification"
    graph_scores = CLASSIFICATION
    inputs = ZeroShotInput
    target = CandidateLabel
    kinds = (
        Kind(
            name="labels",
            rows=(
                {"text": "Return the sum of all numbers.", "label": "maths"},
                {"text": "Open the file and read a line.", "label": "files"},
            ),
            options={"candidate_labels": ["files", "maths"]},
        ),
        Kind(
            name="own-labels",
            rows=(
                {
                    "text": "Return the sum of all numbers.",
                    "candidate_labels": ["maths", "files"],
                    "label": "maths",
                },
                {
                    "text": "Open the file and read a line.",
                    "candidate_labels": ["files", "sockets"],
                    "label": "files",
                },
            ),
            options={"candidate_labels": ["files", "maths", "sockets"]},
        ),
    )
    primary_metric = "accuracy"
    trainable = False
    shares_head_with = ("text-classification",)
    single_is_bare = True
    parameters = ZeroShotParameters
    options = ZeroShotOptions
    examples = ({"text": "Open the file and read a line.", "candidate_labels": ["files", "maths"]},)
    cell_types: Mapping[str, pa.DataType] = {"label": pa.string(), "score": pa.float64()}

    chosen: ZeroShotOptions

    def __init__(self, labels: Sequence[str] = (), options: ZeroShotOptions | None = None) -> None:
        super().__init__(labels or INFERENCE_LABELS, options)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: ZeroShotOptions | None = None
    ) -> "ZeroShotClassification":
        if options is None:
            options = cls.options(candidate_labels=sorted({row["label"] for row in rows}))
        return cls(options=options)

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        candidates = row.get("candidate_labels")
        if candidates is not None and row["label"] not in candidates:
            raise InputError(
                f"wanted one of its candidate_labels, {', '.join(candidates)}, got the label "
                f"{row['label']!r}{nearest(row['label'], candidates)}: correct the row, or remove "
                "it"
            )
        return row

    @classmethod
    def from_head(cls, other: Task) -> "ZeroShotClassification | None":
        """Return the task for a model of pairs with a label that begins with "entail"; None for
        other models."""
        chosen = other.chosen
        if getattr(chosen, "multi_label", False) or getattr(chosen, "pairs", None) is False:
            return None
        return None if _entailment(other.labels) is None else cls(other.labels)

    def is_comparable(self, other: Evaluated) -> bool:
        """Whether both choose from the same labels, by any template."""
        if not isinstance(other, ZeroShotClassification):
            return False
        return self._known().keys() == other._known().keys()

    def build_objective(self, config: EncoderConfig) -> "Classification":
        from bert_core.objectives.classification import Classification

        return Classification(config, len(self.labels))

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: ZeroShotParameters | None = None,
    ) -> list[Window]:
        """Return a window for each row and each of the labels to choose from in that row."""
        limit = None
        if parameters is None:
            limit = max_length
        elif parameters.truncation:
            limit = min(max_length, tokenizer.longest or max_length)
        template = self.chosen.hypothesis_template
        if parameters is not None and parameters.hypothesis_template is not None:
            template = parameters.hypothesis_template
        labels = [self._candidates(row, number, parameters) for number, row in enumerate(rows)]
        names = list(dict.fromkeys(name for row_labels in labels for name in row_labels))
        said = [template.format(name) for name in names]
        hypotheses = dict(zip(names, ids_of(tokenizer, said), strict=True))
        windows = []
        from_end = tokenizer.keeps_end
        texts = first_ids_of(tokenizer, [row["text"] for row in rows], limit, from_end=from_end)
        for number, (premise, row_labels) in enumerate(zip(texts, labels, strict=True)):
            for name in row_labels:
                hypothesis = hypotheses[name]
                cut = _cut(tokenizer, premise, hypothesis, limit, f"inputs[{number}]: {name!r}")
                sequence = with_special_tokens(tokenizer, cut, hypothesis)
                if parameters is not None:
                    check_length(number, len(sequence.ids), max_length, parameters)
                windows.append(
                    Window(
                        row=number,
                        ids=(sequence.ids,),
                        segment_b_start=(sequence.segment_b_start,),
                        cuts=(Cut(rows[number]["text"], len(cut), from_end=from_end),)
                        if len(cut) < len(premise)
                        else (),
                    )
                )
        return windows

    def least_windows(self, rows: Sequence[Row], parameters: ZeroShotParameters | None) -> int:
        return sum(
            len(self._candidates(row, number, parameters)) for number, row in enumerate(rows)
        )

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "classes"]],
        parameters: ZeroShotParameters | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Return the labels of each row with their scores, best first."""
        several = self.chosen.multi_label
        if parameters is not None and parameters.multi_label is not None:
            several = parameters.multi_label
        remaining = iter(scores)
        answers = []
        for number, row in enumerate(rows):
            names = self._candidates(row, number, parameters)
            logits = np.stack([next(remaining) for _ in names])
            answers.append(_best_first(names, self._shares(logits, several=several)))
        return answers

    def _shares(
        self, logits: Float[np.ndarray, "candidates classes"], *, several: bool
    ) -> Float[np.ndarray, "candidates"]:
        entails = _entailment(self.labels)
        if entails is None:
            raise FormatError(
                'wanted a model with a label that begins with "entail", got '
                f"{', '.join(self.labels)}: give a model for natural language inference, or name "
                "its labels under id2label in config.json"
            )
        if several or len(logits) == 1:
            return softmax(logits[:, [_contradiction(self.labels, entails), entails]])[:, 1]
        return softmax(logits[:, entails])

    def _candidates(
        self, row: Row, number: int, parameters: ZeroShotParameters | None
    ) -> list[str]:
        """Return the labels to choose from: those of the row, or else of the request, or else of
        the option.

        Raises: InputError if there are none.
        """
        of_request = None if parameters is None else parameters.candidate_labels
        labels = row.get("candidate_labels") or of_request or self.chosen.candidate_labels
        if labels is None:
            raise InputError(
                f"inputs[{number}]: wanted labels to choose from, got none: give the parameter "
                "candidate_labels, or the option of that name"
            )
        return list(labels)

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        known = self._known()
        return {
            "predicted": np.array([known.get(answer[0]["label"], -1) for answer in answers]),
            "label": self._label_ids(rows),
        }

    def _known(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.chosen.candidate_labels or ())}

    def _label_ids(self, rows: Sequence[Row]) -> Int[np.ndarray, "rows"]:
        known = self._known()
        for number, row in enumerate(rows, 1):
            with numbered(number):
                self.check_known(row)
        return np.array([known[row["label"]] for row in rows], dtype=np.int64)

    def check_known(self, row: Row) -> None:
        known = self.chosen.candidate_labels or ()
        if row["label"] not in known:
            raise InputError(
                "wanted one of the labels of the option candidate_labels, which are "
                f"{', '.join(known) or 'none'}, got {row['label']!r}"
                f"{nearest(row['label'], known)}: set the option to all labels of the rows"
            )

    def constant(self, rows: Sequence[Row]) -> Columns:
        labels = self._label_ids(rows)
        return {"predicted": np.full_like(labels, np.bincount(labels).argmax()), "label": labels}

    def cells(self, answer: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(answer[0])

    def metrics(self, columns: Columns) -> dict[str, float]:
        return single_label_metrics(
            columns["predicted"], columns["label"], f1_of=f1_names(list(self._known()))
        )

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]]:
        return by_label(columns["predicted"], columns["label"], list(self._known()))

    def faults(self, columns: Columns) -> Int[np.ndarray, "rows"]:
        return wrong_labels(columns["predicted"], columns["label"])

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"]:
        return np.array([answer[0]["score"] for answer in answers])


def _cut(tokenizer: Tokenizer, premise: Ids, hypothesis: Ids, limit: int | None, where: str) -> Ids:
    """Return as much of the text as there is room for; all of it if `limit` is None.

    Args:
        where: names the input and the label, for the message.
    Raises: InputError if there is no room at all.
    """
    if limit is None:
        return premise
    room = limit - len(hypothesis) - 2 - tokenizer.separators
    if room < min(1, len(premise)):
        raise InputError(
            f"{where}: wanted a label and a template of fewer than "
            f"{limit - 2 - tokenizer.separators} tokens, which leave room for the text, got "
            f"{len(hypothesis)}: shorten them"
        )
    return kept_of(premise, room, from_end=tokenizer.keeps_end)


def _best_first(
    names: Sequence[str], shares: Float[np.ndarray, "candidates"]
) -> list[dict[str, Any]]:
    order = np.argsort(-shares, kind="stable")
    return [{"label": names[index], "score": float(shares[index])} for index in order]


def _entailment(labels: Sequence[str]) -> int | None:
    return _starting(labels, "entail")


def _contradiction(labels: Sequence[str], entails: int) -> int:
    """Return the id of the label against which entailment is scored if each candidate is scored by
    itself: that which begins with "contradict", or else the label that transformers takes: the last
    if entailment is the first, otherwise the first."""
    named = _starting(labels, "contradict")
    if named is not None:
        return named
    return len(labels) - 1 if entails == 0 else 0


def _starting(labels: Sequence[str], beginning: str) -> int | None:
    places = (place for place, label in enumerate(labels) if label.lower().startswith(beginning))
    return next(places, None)


def _check_labels(labels: Sequence[str] | None) -> None:
    """Check candidate labels; None is allowed. Raises: InputError if the list is empty, or a label
    is blank or occurs twice."""
    if labels is None:
        return
    if not labels:
        raise InputError("candidate_labels: wanted at least one label, got an empty list")
    for place, label in enumerate(labels):
        if not label.strip():
            raise InputError(f"candidate_labels[{place}]: wanted a label, got {label!r}")
        if label in labels[:place]:
            raise InputError(
                f"candidate_labels: wanted each label once, got {label!r} twice: leave one out"
            )


def _check_template(template: str | None) -> None:
    """Check a template; None is allowed. Raises: InputError unless it has exactly one plain `{}`
    for the label, and is short enough."""
    if template is None:
        return
    try:
        fields = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        fields = []
    # NOTE: a width, as in `{:>1000000000}`, would fill the memory, and so would many places.
    if fields not in ([("", "", None)], [("0", "", None)]):
        raise InputError(
            f"hypothesis_template: wanted a text with {{}} where the label goes, once, such as "
            f"{TEMPLATE!r}, got {shortened(template)!r}"
        )
    if len(template) > MOST_CHARACTERS:
        raise InputError(
            f"hypothesis_template: wanted at most {MOST_CHARACTERS} characters, since it is read "
            f"with every label, got {len(template)}: shorten it"
        )
