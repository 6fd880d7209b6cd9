"""Labels for a text or a pair of texts (Devlin et al. 2018, section 4.1)."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from bert_core.checks import PositiveInt, check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.metrics.classification import (
    by_label,
    f1_names,
    multi_label_metrics,
    selective_metrics,
    single_label_metrics,
    wrong_labels,
)
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import CLASSIFICATION
from bert_core.tasks.base import Kind, Remarks, numbered
from bert_core.tasks.decider import (
    USUAL_THRESHOLD,
    Decider,
    check_labels,
    decision_notes,
)
from bert_core.tasks.evaluation import Columns
from bert_core.tasks.modules import activation_of
from bert_core.tasks.shapes import Label, Row
from bert_core.tasks.texts import TextOptions, TextParameters, TextTask, sigmoid, softmax
from bert_core.wording import some_of

if TYPE_CHECKING:
    from bert_core.objectives.classification import Classification

Scoring = Literal["softmax", "sigmoid", "none"]
_TICKS = ({"0", "1"}, {"False", "True"})
"""Values of a column per label, in place of the label's name."""
FITTED = ("thresholds", "abstain_below", "calibration")
"""Options that are fitted to the scores of one model."""


@dataclass(frozen=True, kw_only=True)
class OneLabel:
    """The expected answer for a text with exactly one label."""

    instead: ClassVar[Mapping[str, str]] = {
        "labels": "with a list of labels in each row, set --options.multi_label true"
    }

    label: Label
    """The label's name."""


@dataclass(frozen=True, kw_only=True)
class SeveralLabels:
    """The expected answer for a text with any number of labels."""

    instead: ClassVar[Mapping[str, str]] = {
        "label": "with one label in each row, leave options.multi_label out"
    }
    column_per_label: ClassVar[str] = "labels"

    labels: list[Label]
    """The labels' names; empty if there are none."""


@dataclass(frozen=True, kw_only=True)
class TextClassificationOptions(TextOptions):
    """Options of text classification."""

    free_names: ClassVar = frozenset({"positive_label", *FITTED})
    own_names: ClassVar = frozenset(FITTED)
    read_names: ClassVar = frozenset({"calibration"})

    multi_label: bool = False
    """Whether a text has any number of labels, in a column `labels` of lists; otherwise it has one.
    Metrics and the column `predicted_labels` count the labels that reach their threshold: 0.5,
    unless `thresholds` says otherwise."""
    out_of_scope: str | None = None
    """The label of texts to which no other label applies, if there is one (CLINC150's `oos`)."""
    positive_label: str | None = field(default=None, compare=False)
    """The label that F1 is about, such as `spam`: the metric `f1_of_spam`. By default 1 of the
    labels 0 and 1, and each of two other labels."""
    thresholds: dict[str, float] = field(default_factory=dict, compare=False)
    """Score from which a text is assigned a label, by label: `{toxic = 0.3}`; 0.5 for others. Of
    two labels, of which a text has one, that of one decides between them.
    `selection.thresholds` chooses them."""
    abstain_below: float | None = field(default=None, compare=False)
    """Score below which an answer is none: the label is only the most probable one. With one label
    per text. `selection.abstain_precision` chooses it."""
    calibration: dict[str, list[float]] = field(default_factory=dict, compare=False)
    """The scale and the shift by which `selection.calibrate` changed each label's scores. They are
    part of the weights already."""


@dataclass(frozen=True, kw_only=True)
class TextClassificationParameters(TextParameters):
    """Hugging Face's parameters of text classification."""

    top_k: PositiveInt | None = None
    """Maximum number of labels in an answer, best first; None returns all."""
    function_to_apply: Scoring | None = None
    """Function from logits to scores; None means softmax, or sigmoid if `multi_label` is set."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


class TextClassification(TextTask):
    """Rows are `{"text": …, "label": …}`, with a `text_pair` if the task is about pairs."""

    name = "text-classification"
    labels_of_rows = True
    classes_in = "labels"
    decides = True
    objective = "classification"
    graph_scores = CLASSIFICATION
    target = OneLabel
    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            name="single",
            rows=(
                {"text": "Return the sum of all numbers.", "label": "maths"},
                {"text": "Open the file and read a line.", "label": "files"},
            ),
        ),
        Kind(
            name="pair",
            rows=(
                {"text": "The file is open.", "text_pair": "The file is closed.", "label": "no"},
                {"text": "The file is open.", "text_pair": "It can be read.", "label": "yes"},
            ),
        ),
        Kind(
            name="multi-label",
            rows=(
                {"text": "Read numbers from a file.", "labels": ["files", "maths"]},
                {"text": "Return the name.", "labels": []},
                {"text": "Close the file.", "labels": ["files"]},
            ),
            options={"multi_label": True},
        ),
    )
    primary_metric = "accuracy"
    parameters: type[TextClassificationParameters] = TextClassificationParameters
    options = TextClassificationOptions
    single = "A text to be labelled."
    pair: ClassVar = {"text": "A text to be labelled", "text_pair": "with this one."}
    examples = (single,)
    cell_types: Mapping[str, pa.DataType] = {"label": pa.string(), "score": pa.float64()}

    chosen: TextClassificationOptions

    def __init__(
        self, labels: Sequence[str] = (), options: TextClassificationOptions | None = None
    ) -> None:
        super().__init__(labels, options)
        self._ids = {label: index for index, label in enumerate(self.labels)}
        for name in ("out_of_scope", "positive_label"):
            label = getattr(self.chosen, name)
            if self.labels and label is not None and label not in self._ids:
                raise ConfigError(
                    f"options.{name}: wanted one of the labels, got {label!r}; they are: "
                    f"{some_of(self.labels)}"
                )
        # Without labels, options alone are known: rows are checked by them.
        self._f1_of = f1_names(self.labels, self.chosen.positive_label) if self.labels else {}
        if self.chosen.multi_label:
            self.cell_types = {"labels": pa.list_(pa.string()), "scores": pa.list_(pa.float64())}
        elif self.chosen.abstain_below is not None:
            self.cell_types = {**self.cell_types, "abstained": pa.bool_()}
        check_labels("calibration", self.chosen.calibration, self.labels)
        self._decider = Decider.of(
            self.labels,
            thresholds=self.chosen.thresholds,
            abstain_below=self.chosen.abstain_below,
            several=self.chosen.multi_label,
        )

    @classmethod
    def from_huggingface(
        cls, entries: Mapping[str, Any], labels: list[str]
    ) -> "TextClassification | None":
        if activation_of(entries, len(labels)) is not None:
            return None  # it ranks texts
        several = entries.get("problem_type") == "multi_label_classification"
        if entries.get("problem_type") == "regression" or (len(labels) < 2 and not several):
            return None
        return cls(labels, cls.options(multi_label=several))

    @classmethod
    def shapes(cls, options: TextClassificationOptions | None = None) -> tuple[type, type]:
        inputs, target = super().shapes(options)
        several = options is not None and options.multi_label
        return inputs, SeveralLabels if several else target

    @classmethod
    def checked(
        cls,
        rows: Sequence[Row],
        options: TextClassificationOptions | None = None,
        *,
        learned: bool = True,
    ) -> list[Row | InputError]:
        if options is not None and options.multi_label:
            widths = {len(row["labels"]) for row in rows}
            names = {label for row in rows for label in row["labels"]}
            if len(widths) == 1 and min(widths) > 1 and any(names <= each for each in _TICKS):
                raise CorpusError(
                    f"rows: wanted the names of the labels that a text has, got {max(widths)} of "
                    f"{' and '.join(sorted(names))} in every row, which look like a column per "
                    "label: write the names of those that apply, such as "
                    '["files", "maths"], or name the places in order: '
                    'columns.labels \'["files", "maths"]\''
                )
        return super().checked(rows, options, learned=learned)

    @classmethod
    def checked_row(
        cls,
        row: Row,
        options: TextClassificationOptions | None = None,
        *,
        learned: bool = True,
    ) -> Row:
        labels = row.get("labels") or ()
        twice = next((label for label, count in Counter(labels).items() if count > 1), None)
        if twice is not None:
            raise InputError(
                f"wanted each label once, got {twice!r} {labels.count(twice)} times: correct the "
                "row, or remove it"
            )
        return row

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: TextClassificationOptions | None = None
    ) -> "TextClassification":
        options = cls.with_pairs(rows, options or cls.options())
        several = options.multi_label
        labels = sorted({label for row in rows for label in _labels_of(row, several=several)})
        if len(labels) < (1 if several else 2):
            raise CorpusError(
                f"training rows: wanted at least two labels, found {len(labels)} "
                f"({', '.join(labels) or 'no rows'}): add rows with another label"
            )
        if several and options.out_of_scope is not None:
            raise ConfigError(
                "options.out_of_scope: wanted none with multi_label, where texts without a label "
                f"have an empty list, got {options.out_of_scope!r}: leave it out"
            )
        return cls(labels, options)

    def build_objective(self, config: EncoderConfig) -> "Classification":
        from bert_core.objectives.classification import Classification

        return Classification(
            config,
            len(self.labels),
            problem_type="multi_label_classification"
            if self.chosen.multi_label
            else "single_label_classification",
        )

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: TextClassificationParameters | None = None,
    ) -> list[Window]:
        labels = {"labels": self._label_ids(rows)} if labelled else {}
        return self.windows(rows, tokenizer, max_length, labels, parameters)

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "classes"]],
        parameters: TextClassificationParameters | None = None,
    ) -> list[list[dict[str, Any]]]:
        """Return the labels of each text, best first; if one of several labels was decided on by a
        threshold, that one first. If the model has thresholds, or abstains, `assigned` says of each
        label whether it is part of the answer."""
        parameters = parameters or self.parameters()
        logits = np.stack(list(scores))
        usual: Scoring = "sigmoid" if self.chosen.multi_label else "softmax"
        shares = _scores(logits, parameters.function_to_apply or usual)
        if self._decider is None:
            best = np.argsort(-shares, axis=-1, kind="stable")[:, : parameters.top_k]
            return [
                [{"label": self.labels[index], "score": float(row[index])} for index in order]
                for row, order in zip(shares, best, strict=True)
            ]
        decided = self._decider.decide(_scores(logits, usual))
        best = np.lexsort((-shares, ~decided.chosen))[:, : parameters.top_k]
        return [
            [
                {
                    "label": self.labels[index],
                    "score": float(row[index]),
                    "assigned": bool(on[index]),
                }
                for index in order
            ]
            for row, on, order in zip(shares, decided.assigned, best, strict=True)
        ]

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        labels = self._label_ids(rows)
        if self.chosen.multi_label:
            predicted = np.zeros_like(labels)
            for row, answer in zip(predicted, answers, strict=True):
                for entry in _assigned(answer):
                    if entry["label"] in self._ids:
                        row[self._ids[entry["label"]]] = 1
            return {"predicted": predicted, "label": labels}
        columns = {
            # Another model may know other labels.
            "predicted": np.array([self._ids.get(answer[0]["label"], -1) for answer in answers]),
            "label": labels,
        }
        if self.chosen.abstain_below is not None:
            columns["answered"] = np.array([answer[0].get("assigned", True) for answer in answers])
        return columns

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        several = self.chosen.multi_label
        support = Counter(label for row in rows for label in _labels_of(row, several=several))
        told = {
            "labels_that_differ_only_by_case_or_spaces": "; ".join(
                " and ".join(map(repr, alike)) for alike in _alike(support)
            ),
            "labels_with_fewer_than_2_rows": some_of(
                [repr(label) for label in sorted(support) if support[label] < 2]
            ),
        }
        return super().remarks(rows) | {name: text for name, text in told.items() if text}

    def constant(self, rows: Sequence[Row]) -> Columns:
        labels = self._label_ids(rows)
        if self.chosen.multi_label:
            return {"predicted": np.zeros_like(labels), "label": labels}
        usual = np.bincount(labels, minlength=len(self.labels)).argmax()
        return {"predicted": np.full_like(labels, usual), "label": labels}

    def cells(self, answer: list[dict[str, Any]]) -> dict[str, Any]:
        if self.chosen.multi_label:
            assigned = _assigned(answer)
            return {f"{name}s": [entry[name] for entry in assigned] for name in ("label", "score")}
        first = {name: answer[0][name] for name in ("label", "score")}
        if self.chosen.abstain_below is None:
            return first
        return first | {"abstained": not answer[0].get("assigned", True)}

    def metrics(self, columns: Columns) -> dict[str, float]:
        if self.chosen.multi_label:
            return multi_label_metrics(columns["predicted"], columns["label"], f1_of=self._f1_of)
        outside = self.chosen.out_of_scope
        answered = columns.get("answered")
        selective = {} if answered is None else selective_metrics(**columns)
        return selective | single_label_metrics(
            columns["predicted"],
            columns["label"],
            f1_of=self._f1_of,
            out_of_scope=None if outside is None else self._ids[outside],
        )

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]]:
        return by_label(columns["predicted"], columns["label"], self.labels)

    def faults(self, columns: Columns) -> Int[np.ndarray, "rows"]:
        return wrong_labels(columns["predicted"], columns["label"])

    def confidence(self, answers: Sequence[Any]) -> Float[np.ndarray, "rows"]:
        """Return the probability of each answer; multi-label, the product over all labels of the
        probability of the decision on each label."""
        if not self.chosen.multi_label:
            return np.array([answer[0]["score"] for answer in answers])
        scores = np.array([[entry["score"] for entry in answer] for answer in answers])
        assigned = np.array([[_is_assigned(entry) for entry in answer] for answer in answers])
        return np.where(assigned, scores, 1 - scores).prod(axis=1)

    def before_calibration(self, answers: Sequence[Any]) -> list[Any] | None:
        """Return the answers that the model would give without its `calibration`; None if it has
        none. Thresholds, which were chosen for calibrated scores, stay out of them."""
        if not self.chosen.calibration:
            return None
        scale, shift = np.array([self.chosen.calibration[label] for label in self.labels]).T
        entries = [{entry["label"]: entry["score"] for entry in answer} for answer in answers]
        shares = np.array([[entry[label] for label in self.labels] for entry in entries])
        logits = (_logits(shares, several=self.chosen.multi_label) - shift) / scale
        plain = type(self)(self.labels, replace(self.chosen, thresholds={}, abstain_below=None))
        return plain.decode([], [], list(logits))

    @property
    def notes(self) -> list[str]:
        return decision_notes(
            self.labels, self.chosen.thresholds, self.chosen.abstain_below, self.chosen.calibration
        )

    def _label_ids(self, rows: Sequence[Row]) -> Int[np.ndarray, "rows *labels"]:
        """Return each row's label id; multi-label, 1 for the labels that the row has and 0 for
        others."""
        several = self.chosen.multi_label
        names = [_labels_of(row, several=several) for row in rows]
        for number, row in enumerate(rows, 1):
            with numbered(number):
                self.check_known(row)
        ids = [[self._ids[label] for label in labels] for labels in names]
        if not several:
            return np.array([label_id for (label_id,) in ids], dtype=np.int64)
        has_label = np.zeros((len(rows), len(self.labels)), dtype=np.int64)
        for of_row, label_ids in zip(has_label, ids, strict=True):
            of_row[label_ids] = 1
        return has_label

    def check_known(self, row: Row) -> None:
        for label in _labels_of(row, several=self.chosen.multi_label):
            if self.labels and label not in self._ids:
                raise InputError(
                    f"its label {label!r} is not one of the model's, which are "
                    f"{some_of(self.labels)}: remove the row, or train the model on such rows first"
                )


def _assigned(answer: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the labels that a text is assigned in a multi-label answer, best first."""
    return [entry for entry in answer if _is_assigned(entry)]


def _is_assigned(entry: dict[str, Any]) -> bool:
    return bool(entry.get("assigned", entry["score"] >= USUAL_THRESHOLD))


def _labels_of(row: Row, *, several: bool) -> list[str]:
    return list(row["labels"]) if several else [row["label"]]


def _alike(labels: Iterable[str]) -> list[list[str]]:
    """Return groups of labels that a reader could not tell apart, or would take for the same."""
    by_form: dict[str, list[str]] = {}
    for label in sorted(labels):
        form = "".join(unicodedata.normalize("NFKC", label).casefold().split())
        by_form.setdefault(form, []).append(label)
    return [alike for alike in by_form.values() if len(alike) > 1]


def _scores(logits: Float[np.ndarray, "rows classes"], function: Scoring) -> np.ndarray:
    if function == "softmax":
        return softmax(logits)
    return sigmoid(logits) if function == "sigmoid" else logits.astype(np.float64)


def _logits(shares: Float[np.ndarray, "rows classes"], *, several: bool) -> np.ndarray:
    """Return scores that have these probabilities."""
    least = np.finfo(np.float64).tiny
    logs = np.log(shares.clip(least))
    return logs - np.log((1 - shares).clip(np.finfo(np.float64).eps / 2)) if several else logs
