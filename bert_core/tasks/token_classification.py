"""Tags for words, and the entities in them (Devlin et al. 2018, section 5.3).

A word is scored at its first piece. A text longer than the model's positions is read in overlapping
windows; a word is scored in the window where it has the most context.

Rows say what their words are, a plain text does not. So every part of a word (`data.words`) has a
label in training: the four of `U.S.` are `B-loc I-loc I-loc I-loc`. In a text every part is scored,
and those that belong to one word are joined in the answer; of words that are known, the first part
is scored. Models whose later parts had no label, such as those from transformers, are asked about
the words that their tokenizer finds.

Rows that mark spans of a text (`bert_core.tasks.span_rows`) are learned as such texts are answered:
every part of a word has a label, and an entity may begin within a word.

Rows may use any tag scheme of `bert_core.metrics.entities`, a different one per file; entity models
learn BIO, with `B-` and `I-` of every type. Models with other labels, such as those from
transformers or from older bundles, keep them.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from bert_core.checks import NonNegativeInt, check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import (
    Window,
    slices,
    with_special_tokens,
)
from bert_core.data.words import (
    Spans,
    glue_of,
    inner_marks,
    joined,
)
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.metrics.entities import (
    NAMELESS,
    OUTSIDE,
    PREFIXES,
    Scheme,
    are_nameless,
    entities_of,
    entity_metrics_by_type,
    is_of_entity,
    misplaced,
    name_of,
    recognised,
    scheme_of,
    tag_accuracy,
    tag_of,
    tagged_entity_metrics,
    tags_of,
    type_of,
    types_of,
)
from bert_core.model.config import EncoderConfig
from bert_core.objectives import IGNORE
from bert_core.objectives.graph_scores import TOKEN_CLASSIFICATION, GraphScores
from bert_core.tasks.base import Kind, Options, Parameters, Remarks, Task, numbered
from bert_core.tasks.evaluation import Columns, Evaluated
from bert_core.tasks.row_forms import Form
from bert_core.tasks.shapes import Label, Row
from bert_core.tasks.span_rows import (
    Mark,
    Overlaps,
    Span,
    check_spans,
    entities_in,
    longest,
    marks_in,
    remarks_on_spans,
)
from bert_core.tasks.tagged_words import (
    AggregationStrategy,
    Reading,
    Scored,
    best_tags,
    by_owner,
    by_type,
    counted,
    entity_answers,
    in_words,
    mark_of,
    marks_of_answer,
    marks_of_row,
    read,
    tags_of_units,
    with_words_left_out,
    word_answers,
    words_with_their_tags,
)
from bert_core.wording import as_json, some_of

if TYPE_CHECKING:
    from bert_core.objectives.token_classification import TokenLabels

SHOWN_TAGS = 8
"""How many tags a remark shows."""
ENTITY = [
    ("entity_group", pa.string()), ("entity", pa.string()), ("score", pa.float64()),
    ("word", pa.string()), ("start", pa.int64()), ("end", pa.int64()),
]  # fmt: skip
"""Fields of an answer: an entity has an `entity_group`, a single word an `entity` (its tag)."""


@dataclass(frozen=True, kw_only=True)
class TokenInput:
    """A text, or its words."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "json_schema_extra": {
            "oneOf": [
                {"required": ["text"], "properties": {"text": {"type": "string"}}},
                {"required": ["tokens"], "properties": {"tokens": {"type": "array"}}},
            ]
        }
    }

    text: str | None = None
    """The text; the tokenizer splits it into words."""
    tokens: list[str] | None = None
    """The words, if they are known: the text is these joined by spaces."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise InputError("wanted either text or tokens")


@dataclass(frozen=True, kw_only=True)
class LabelledInput:
    """The input of labelled rows."""

    tokens: list[str] | None = None
    """The words, if they have tags."""
    text: str | None = None
    """The text, if it has spans."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise InputError("wanted either tokens with tags or a text with spans: correct the row")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The expected answer: tags of words, or spans of a text."""

    forms: ClassVar[tuple[Form, ...]] = (("tokens", "tags"), ("text", "spans"))
    other_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"spans": ("entities",)}

    tags: list[Label] | None = None
    """One tag per word."""
    spans: list[Span] | None = None
    """`{"start": …, "end": …, "label": …}` for each labelled span of the text, in characters; or
    `[start, end, label]`."""

    def __post_init__(self) -> None:
        if (self.tags is None) == (self.spans is None):
            raise InputError("wanted either tokens with tags or a text with spans: correct the row")


@dataclass(frozen=True, kw_only=True)
class TokenClassificationOptions(Options):
    """Options of token classification."""

    stride: NonNegativeInt = 32
    """Pieces shared by neighbouring windows of a long text, at most half a window."""
    entities: bool | None = None
    """Whether tags mark entities: `O`, and a type after `B-` or `I-`, `E-` or `S-` (BIOES), `L-` or
    `U-` (BILOU), or these letters alone. Otherwise each tag is right or wrong by itself. None
    detects which."""

    scheme: Scheme | None = None
    """Scheme of the entity tags in the training rows: BIO, IOB1, BIOES or BILOU. None detects it.
    The entities read are the same under any scheme; rows that fit another scheme better are
    rejected. Files for evaluation may use any scheme."""

    label_parts: bool | None = None
    """Whether all parts of a word have labels in training, such as the four of `U.S.`, so that a
    plain text is answered as its words are. None has them in training; a model without it, made by
    transformers or an older version, answers by the words that its tokenizer finds."""

    inner_marks: str | None = None
    """Punctuation marks that stand within words, `-` in `IL-2`: in a text, what they join has one
    tag. None finds those that stand within the words of the training rows more often than alone
    between two."""

    begin_within: bool | None = None
    """Whether an entity may begin within a word, right after another of its type, as spans of
    characters may. It follows from the training rows and cannot be given."""

    overlapping_spans: Overlaps = "refuse"
    """How to treat spans that overlap, since a word has one tag: `refuse` their rows, or keep the
    `longest` span, of equal ones the first; the others are counted."""

    feature_based: bool = False
    """Freeze the encoder and train an LSTM on its last four layers (Devlin et al. 2018, section
    5.3); otherwise the whole encoder is fine-tuned."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)
        if self.scheme is not None and self.entities is False:
            raise InputError(
                f"scheme: wanted none with entities = false, got {self.scheme}: leave one out"
            )

    @classmethod
    def check_given(cls, values: Container[str]) -> None:
        super().check_given(values)
        if "begin_within" in values:
            raise ConfigError(
                "options.begin_within: wanted none, since it follows from the training rows: leave "
                "it out"
            )


@dataclass(frozen=True, kw_only=True)
class TagParameters(Parameters):
    """Hugging Face's parameters for token classification."""

    aggregation_strategy: AggregationStrategy | None = None
    """`none` returns the tag of every word, the others entities; None follows the model's tags. A
    word has the tag of its first piece (`first`, and `simple`, since words are never split), that
    with the best mean over its pieces (`average`), or that of its most certain piece (`max`); over
    those of its first part, if its later parts had labels of their own."""
    ignore_labels: list[str] = field(default_factory=lambda: [OUTSIDE])
    """Tags to leave out of an answer."""
    stride: NonNegativeInt | None = None
    """Pieces shared by neighbouring windows of a long text; None takes the model's option."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


@dataclass(frozen=True, kw_only=True)
class TokenClassificationParameters(TagParameters):
    """Parameters for models whose tags mark entities."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "json_schema_extra": {
            "anyOf": [
                {"properties": {"scheme": {"type": "null"}}},
                {"properties": {"aggregation_strategy": {"enum": [None, "none"]}}},
            ]
        }
    }

    scheme: Scheme | None = None
    """Return the entities as tags of words in BIO, IOB1, BIOES or BILOU; with `ignore_labels = []`
    also `O`. None returns entities, or under `none` the label that the model scores best for each
    word."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scheme is not None and self.aggregation_strategy not in (None, "none"):
            raise InputError(
                f"scheme: wanted none with aggregation_strategy = {self.aggregation_strategy!r}, "
                f"which returns entities, got {self.scheme}: leave one out"
            )


class TokenClassification(Task):
    """Rows are `{"tokens": [...], "tags": [...]}`, or `{"text": …, "spans": [...]}`."""

    name = "token-classification"
    labels_of_rows = True
    classes_in = "token_labels"
    objective = "token_classification"
    graph_scores: GraphScores | None = TOKEN_CLASSIFICATION
    inputs = TokenInput
    target = Tags
    kinds = (
        Kind(
            name="entities",
            rows=(
                {
                    "tokens": ["Ada", "Lovelace", "lived", "in", "London"],
                    "tags": ["B-person", "I-person", "O", "O", "B-place"],
                },
                {"tokens": ["Ada", "wrote", "a", "program"], "tags": ["B-person", "O", "O", "O"]},
            ),
        ),
        Kind(
            name="tags",
            rows=(
                {"tokens": ["The", "file", "is", "open"], "tags": ["DET", "NOUN", "VERB", "ADJ"]},
                {"tokens": ["Open", "the", "file"], "tags": ["VERB", "DET", "NOUN"]},
            ),
        ),
        Kind(
            name="spans",
            rows=(
                {
                    "text": "Ada Lovelace lived in London.",
                    "spans": [
                        {"start": 0, "end": 12, "label": "person"},
                        {"start": 22, "end": 28, "label": "place"},
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
    single_is_bare = True
    parameters: type[TagParameters] = TokenClassificationParameters
    options = TokenClassificationOptions
    examples = ("The Eiffel Tower is in Paris.",)
    cell_types: Mapping[str, pa.DataType] = {"entities": pa.list_(pa.struct(ENTITY))}

    chosen: TokenClassificationOptions

    def __init__(
        self, labels: Sequence[str] = (), options: TokenClassificationOptions | None = None
    ) -> None:
        self.labels = list(labels)
        options = options or self.options()
        if options.entities is None:
            entities = all(map(is_of_entity, self.labels)) or are_nameless(self.labels)
            options = replace(options, entities=entities)
        self.chosen = options
        self.implies_labels = bool(options.entities)
        self.primary_metric = "f1" if options.entities else "accuracy"
        if not options.entities:
            self.parameters = TagParameters
        if options.feature_based:
            self.graph_scores = None
        self._ids = {label: index for index, label in enumerate(self.labels)}
        self._is_nameless = bool(options.entities) and "" in types_of(self.labels)
        kinds = sorted(map(name_of, types_of(self.labels))) if options.entities else self.labels
        self._types = {kind: place for place, kind in enumerate(kinds)}

    @property
    def kinds_found(self) -> list[str]:
        """The types of entities, or tags, that answers have by default."""
        return [kind for kind in self._types if self.chosen.entities or kind != OUTSIDE]

    @classmethod
    def shapes(cls, options: TokenClassificationOptions | None = None) -> tuple[type, type]:
        return LabelledInput, cls.target

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: TokenClassificationOptions | None = None
    ) -> "TokenClassification":
        of_words = [row for row in rows if "tags" in row]
        marked = {mark["label"] for row in rows for mark in row.get("spans", ())}
        has_spans = len(of_words) < len(rows)
        labels = sorted({tag for row in of_words for tag in row["tags"]})
        if len(labels) < 2 and not marked:
            raise CorpusError(_too_few(labels, has_spans=has_spans))
        options = options or cls.options()
        _check_options(options, has_spans=has_spans, has_words=bool(of_words))
        if options.label_parts is None:
            options = replace(options, label_parts=True)
        if options.label_parts and options.inner_marks is None:
            # A span may end where words of other rows go on, as in `Berlin-based`.
            marks = "" if has_spans else inner_marks(row["tokens"] for row in of_words)
            options = replace(options, inner_marks=marks)
        if has_spans:
            options = replace(options, begin_within=True)
        plain_tags = [label for label in labels if not is_of_entity(label)]
        if are_nameless(labels):
            plain_tags = []
        entities = options.entities
        if entities is None:
            entities = has_spans or options.scheme is not None
            entities = entities or bool(set(labels) - {OUTSIDE, *plain_tags})
        if not entities:
            return cls(labels, replace(options, entities=False))
        if plain_tags:
            raise CorpusError(
                "training rows: wanted all tags to mark entities (B-PER, I-PER, O), or none, got "
                f"{some_of(plain_tags, SHOWN_TAGS)} among them: correct them, or set "
                "options.entities = false to score each tag by itself"
            )
        if of_words:
            scheme, _ = recognised((row["tags"] for row in of_words), options.scheme)
            if options.scheme not in (None, scheme):
                raise CorpusError(
                    f"training rows: wanted tags in the scheme {options.scheme}, more of them fit "
                    f"{scheme}: set options.scheme to it, or leave it out"
                )
            options = replace(options, scheme=scheme)
        types = types_of(labels) | marked
        labels = sorted({OUTSIDE, *(tag_of(prefix, kind) for prefix in "BI" for kind in types)})
        return cls(labels, replace(options, entities=True))

    def request_of(self, row: Row) -> str:
        return joined(row["tokens"])[0] if "tokens" in row else row["text"]

    def build_objective(self, config: EncoderConfig) -> "TokenLabels":
        from bert_core.objectives import token_classification as heads

        if self.chosen.feature_based:
            return heads.FeatureBasedTokenClassification(config, len(self.labels))
        return heads.TokenClassification(config, len(self.labels))

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: TagParameters | None = None,
    ) -> list[Window]:
        parameters = parameters or TagParameters()
        all_pieces = parameters.aggregation_strategy in ("average", "max")
        stride = self.chosen.stride if parameters.stride is None else parameters.stride
        room = max_length - 2
        stride = min(stride, room // 2)
        windows = []
        for number, reading in enumerate(
            read(rows, tokenizer, by_parts=bool(self.chosen.label_parts))
        ):
            ids = self._label_ids(rows[number], number + 1, reading) if labelled else None
            parts = slices(len(reading.ids), room, stride)
            for part, units in zip(parts, by_owner(reading.units.firsts, parts), strict=True):
                sequence = with_special_tokens(tokenizer, reading.ids[part.first : part.end])
                labels = {} if ids is None else {"token_labels": ids[units]}
                positions = reading.units.firsts[units]
                if all_pieces:
                    sizes = np.minimum(reading.units.ends[units], part.end) - positions
                    units = np.repeat(units, sizes)
                    positions = np.repeat(positions, sizes) + counted(sizes)
                windows.append(
                    Window(
                        row=number,
                        ids=(sequence.ids,),
                        segment_b_start=(sequence.segment_b_start,),
                        positions={"token_positions": positions - part.first + 1},
                        labels=labels,
                        origin=Scored(reading.text, reading.spans, units, reading.words[units]),
                    )
                )
        return windows

    def decode(
        self,
        rows: Sequence[Row],
        windows: Sequence[Window],
        scores: Sequence[Float[np.ndarray, "_ classes"]],
        parameters: TagParameters | None = None,
    ) -> list[list[dict[str, Any]]]:
        parameters = parameters or TagParameters()
        scheme = None
        if isinstance(parameters, TokenClassificationParameters):
            scheme = parameters.scheme
        usual: AggregationStrategy = "simple" if self.chosen.entities and scheme is None else "none"
        strategy = parameters.aggregation_strategy or usual
        answers: list[list[dict[str, Any]]] = []
        by_row: list[list[int]] = [[] for _ in rows]
        for place, window in enumerate(windows):
            by_row[window.row].append(place)
        for row, places in zip(rows, by_row, strict=True):
            parts = [(windows[at].origin, scores[at]) for at in places]
            tagged = best_tags(parts, self.labels, strategy, of_entities=bool(self.chosen.entities))
            if self.chosen.label_parts and row.get("tokens") is None:
                marks = self.chosen.inner_marks or ""
                tagged = in_words(
                    tagged,
                    marks,
                    of_entities=bool(self.chosen.entities),
                    begin_within=bool(self.chosen.begin_within),
                )
            if scheme is not None:
                tags = tags_of(entities_of(tagged.tags), len(tagged.tags), scheme)
                tagged = replace(tagged, tags=tags)
            if strategy != "none":
                of_entities = bool(self.chosen.entities)
                answers.append(
                    entity_answers(tagged, parameters.ignore_labels, of_entities=of_entities)
                )
            else:
                answers.append(word_answers(tagged, parameters.ignore_labels))
        return answers

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return for each row the `correct`, `predicted` and `wanted` entities (or words), counted
        by type.

        The last count is for all types that the model does not know, which no answer can have.
        """
        for number, row in enumerate(rows, 1):
            self._check(row, number)
        entities = bool(self.chosen.entities)
        columns: dict[str, list[Any]] = {"correct": [], "predicted": [], "wanted": []}
        if entities:
            columns |= {"surfaces": [], "wanted_surfaces": []}
        for row, answer in zip(rows, answers, strict=True):
            text, spans, annotated = self._annotated(row)
            predicted = marks_of_answer(answer, of_entities=entities)
            if not entities:
                predicted = with_words_left_out(predicted, row, spans)
            columns["correct"].append(by_type(predicted & annotated, self._types))
            columns["predicted"].append(by_type(predicted, self._types))
            columns["wanted"].append(by_type(annotated, self._types))
            if entities:
                for name, marks in (("surfaces", predicted), ("wanted_surfaces", annotated)):
                    columns[name].append({(kind, text[start:end]) for kind, start, end in marks})
        return {name: _column(values) for name, values in columns.items()}

    def _annotated(self, row: Row, *, as_written: bool = False) -> tuple[str, Spans, set[Mark]]:
        """Return the text of a labelled row, its words, and the marks that its labels are.

        Args:
            as_written: whether words that a row names are joined as people write them.
        """
        if "tokens" not in row:
            return row["text"], np.empty((0, 2), np.int64), {*self._marks(row)}
        tokens = row["tokens"]
        text, spans = joined(tokens, glue_of(tokens) if as_written else None)
        return text, spans, marks_of_row(row, spans, of_entities=bool(self.chosen.entities))

    def _marks(self, row: Row) -> list[Mark]:
        """Return the spans of a row, of which none overlap."""
        return longest(marks_in(row))

    def plain(self, rows: Sequence[Row]) -> list[Row] | None:
        """Return the words of each row as a text, written as people write it; None if no row has
        words, since all are texts."""
        if not any("tokens" in row for row in rows):
            return None
        return [
            {
                "text": joined(words, glue_of(words))[0]
                if (words := row.get("tokens")) is not None
                else row["text"]
            }
            for row in rows
        ]

    def compare_plain(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Return counts as `compare` does, but over all types together, and by characters of the
        text: a word is right if every part of it has the right tag."""
        for number, row in enumerate(rows, 1):
            self._check(row, number)
        entities = bool(self.chosen.entities)
        names = ("text_correct", "text_predicted", "text_wanted")
        columns: dict[str, list[int]] = {name: [] for name in names}
        for row, answer in zip(rows, answers, strict=True):
            text, _, annotated = self._annotated(row, as_written=True)
            predicted = marks_of_answer(answer, of_entities=entities)
            if not entities:
                predicted = words_with_their_tags(annotated, predicted, text)
            counts = len(predicted & annotated), len(predicted), len(annotated)
            for name, count in zip(names, counts, strict=True):
                columns[name].append(count)
        return {name: np.array(values) for name, values in columns.items()}

    def constant(self, rows: Sequence[Row]) -> Columns:
        if self.chosen.entities:
            nothing: list[Any] = [[] for _ in rows]
            of_plain = {} if self.plain(rows) is None else self.compare_plain(rows, nothing)
            return self.compare(rows, nothing) | of_plain
        tags = [tag for row in rows for tag in row["tags"]]
        usual = max(sorted(set(tags)), key=tags.count)
        texts = [joined(row["tokens"]) for row in rows]
        written = [joined(row["tokens"], glue_of(row["tokens"])) for row in rows]
        known, plain = (
            [
                [{"entity": usual, "start": a, "end": b} for a, b in spans.tolist()]
                for _, spans in each
            ]
            for each in (texts, written)
        )
        return self.compare(rows, known) | self.compare_plain(rows, plain)

    def cells(self, answer: list[dict[str, Any]]) -> dict[str, Any]:
        return {"entities": answer}

    def metrics(self, columns: Columns) -> dict[str, float]:
        """Return conlleval's metrics and `surface_f1` for entities; accuracy for other tags. If the
        columns include those of `compare_plain`, also the metrics of plain texts, as `text_…`."""
        return (tagged_entity_metrics if self.chosen.entities else tag_accuracy)(columns)

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]]:
        """Return the metrics of each type of entity, or each tag."""
        return entity_metrics_by_type(columns, list(self._types))

    def faults(self, columns: Columns) -> Int[np.ndarray, "rows"]:
        """Return the number of wrong entities, or words. An entity predicted instead of another
        counts once."""
        return misplaced(columns)

    def claims(
        self, rows: Sequence[Row], answers: Sequence[Any]
    ) -> tuple[Float[np.ndarray, "claims"], Bool[np.ndarray, "claims"]]:
        """Return the score of each entity, or word, in the answers, and whether it is right."""
        entities = bool(self.chosen.entities)
        scores: list[float] = []
        is_right: list[bool] = []
        for row, answer in zip(rows, answers, strict=True):
            _, _, annotated = self._annotated(row)
            scores.extend(entity["score"] for entity in answer)
            is_right.extend(mark_of(entity, of_entities=entities) in annotated for entity in answer)
        return np.array(scores, dtype=np.float64), np.array(is_right, dtype=bool)

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        remarks = super().remarks(rows)
        of_words = [row for row in rows if "tags" in row]
        tags = [tag for row in of_words for tag in row["tags"]]
        if self.chosen.entities:
            if of_words:
                scheme, broken = recognised((row["tags"] for row in of_words), self.chosen.scheme)
                remarks |= {"tag_scheme": scheme, "tags_that_break_their_scheme": broken}
            tags = [name_of(type_of(tag)) for tag in tags if tag != OUTSIDE]
        else:
            shown = some_of(sorted(set(tags)), SHOWN_TAGS)
            remarks["tags_mark_no_entities"] = f"accuracy decides ({shown})"
        unknown = [tag for tag in tags if tag not in self._types]
        marked = [span["label"] for row in rows for span in row.get("spans", ())]
        unmarked = [label for label in marked if label not in self._types]
        remarks |= {
            "words_with_unknown_tags": len(unknown),
            "unknown_tags": ", ".join(sorted({*unknown, *unmarked})),
        }
        if of_text := [row for row in rows if "spans" in row]:
            remarks |= {"spans_with_unknown_labels": len(unmarked)} | remarks_on_spans(of_text)
        return remarks

    def is_comparable(self, other: Evaluated) -> bool:
        # Other options are about how texts are read or rows were written, not what is measured.
        return isinstance(other, TokenClassification) and (
            self.chosen.entities == other.chosen.entities
        )

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        if "tokens" not in row:
            check_spans(row, (options or cls.options()).overlapping_spans)
        elif len(row["tags"]) != len(row["tokens"]):
            raise InputError(
                f"wanted one tag per word, got {len(row['tags'])} tags for "
                f"{len(row['tokens'])} words: correct the row, or remove it"
            )
        return row

    def check_known(self, row: Row) -> None:
        if self.labels and not self.chosen.entities and "tokens" not in row:
            raise InputError(
                f"wanted tokens and tags, since the model's tags mark no entities "
                f"({some_of(self.labels, SHOWN_TAGS)}), got spans: give rows with tags"
            )
        if not self.labels or not self.chosen.entities or "tokens" not in row:
            return
        nameless, tags = self._is_nameless, set(row["tags"]) - {OUTSIDE}
        plain_tag = min(
            (tag for tag in tags if not (tag in PREFIXES if nameless else is_of_entity(tag))),
            default=None,
        )
        if plain_tag is not None:
            such_as = "B, I" if nameless else "B-PER, I-PER"
            raise InputError(
                f"wanted entity tags ({such_as}, O), as in the training rows, got {plain_tag!r}: "
                "correct the row, or remove it"
            )

    def _check(self, row: Row, number: int) -> None:
        with numbered(number):
            self.checked_row(row, self.chosen)
            self.check_known(row)

    def _label_ids(self, row: Row, number: int, reading: Reading) -> Int[np.ndarray, "units"]:
        """Return the label id of each unit; IGNORE for tags that the model does not know, and for
        units to which `tags_of_units` gives none."""
        self._check(row, number)
        scheme = scheme_of(self.labels) if self.chosen.entities else None
        tags: Sequence[str | None]
        if "tokens" in row:
            tags = tags_of_units(row, reading.words, scheme)
        else:
            assert scheme is not None
            units = reading.units.spans
            entities = entities_in(self._marks(row), units)
            if self._is_nameless:
                entities = [
                    one._replace(type="" if one.type == NAMELESS else one.type) for one in entities
                ]
            tags = tags_of(entities, len(units), scheme)
        ids = [IGNORE if tag is None else self._ids.get(tag, IGNORE) for tag in tags]
        return np.array(ids, dtype=np.int64)


def _check_options(
    options: TokenClassificationOptions, *, has_spans: bool, has_words: bool
) -> None:
    """Raise CorpusError for an option that these training rows leave no meaning."""
    if not has_spans and options.overlapping_spans != "refuse":
        raise CorpusError(
            "training rows: wanted spans with options.overlapping_spans = "
            f'"{options.overlapping_spans}", got tokens and tags: leave the option out'
        )
    unfit = {
        "entities": options.entities is False,
        "label_parts": options.label_parts is False,
        "inner_marks": bool(options.inner_marks),
        "scheme": options.scheme is not None and not has_words,
    }
    name = next((name for name, is_unfit in unfit.items() if is_unfit), None)
    if has_spans and name is not None:
        raise CorpusError(
            f"training rows: wanted tokens and tags with options.{name} = "
            f"{as_json(getattr(options, name))}, got spans, which are entities of the parts of "
            "words: leave the option out"
        )


def _too_few(labels: Sequence[str], *, has_spans: bool) -> str:
    if has_spans:
        return "training rows: wanted spans, found none: add rows with spans"
    return (
        f"training rows: wanted at least two tags, found {len(labels)} "
        f"({', '.join(labels) or 'no rows'}): add rows with another tag"
    )


def _column(values: list[Any]) -> np.ndarray:
    """Return an array with one entry per row, even if entries are sets."""
    if not isinstance(values[0], set):
        return np.array(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
