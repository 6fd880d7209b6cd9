"""Tags for words, and the entities in them (Devlin et al. 2018, section 5.3).

A word is scored at its first piece. A text longer than the model's positions is read in overlapping
windows; a word is scored in the window where it has the most context.

Rows may use any tag scheme of `bert_core.metrics.entities`, a different one per file; entity models
learn BIO, with `B-` and `I-` of every type. Models with other labels, such as those from
transformers or from older bundles, keep them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from bert_core.checks import NonNegativeInt, check_fields
from bert_core.data.ragged import starts_of
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Pieces, Slice, Window, pieces_of, slices, with_special_tokens
from bert_core.errors import CorpusError, InputError
from bert_core.metrics.entities import (
    OUTSIDE,
    Scheme,
    entities_of,
    entity_metrics,
    is_of_entity,
    recognised,
    tags_of,
    type_of,
)
from bert_core.model.config import EncoderConfig
from bert_core.objectives import IGNORE
from bert_core.tasks.base import Columns, Kind, Options, Parameters, Remarks, Task, numbered
from bert_core.tasks.shapes import Label, Row
from bert_core.tasks.texts import softmax

if TYPE_CHECKING:
    from bert_core.objectives.feature_based import FeatureBasedTokenClassification
    from bert_core.objectives.token_classification import TokenClassification as TokenObjective

AggregationStrategy = Literal["none", "simple", "first", "average", "max"]
Spans = Int[np.ndarray, "words 2"]
Mark = tuple[str, int, int]
"""Type or tag, start character, and end character (exclusive)."""
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
class TaggedWords:
    """The input of labelled rows: with a text alone, tags could not be matched to words."""

    instead: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("spans", "entities"),
        "write the words of each text in tokens, and a tag for each word in tags (B-PER, I-PER, O)",
    )

    tokens: list[str]
    """The words."""


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The expected answer for words."""

    tags: list[Label]
    """One tag per word."""


@dataclass(frozen=True, kw_only=True)
class TokenClassificationOptions(Options):
    """Options of token classification."""

    stride: NonNegativeInt = 32
    """Pieces shared by neighbouring windows of a long text, at most half a window."""
    entities: bool | None = None
    """Whether tags mark entities: `O`, and a type after `B-` or `I-`, `E-` or `S-` (BIOES), `L-` or
    `U-` (BILOU). Otherwise each tag is right or wrong by itself. None detects which."""

    scheme: Scheme | None = None
    """Scheme of the entity tags in the training rows: BIO, IOB1, BIOES or BILOU. None detects it.
    The entities read are the same under any scheme; rows that fit another scheme better are
    rejected. Files for evaluation may use any scheme."""

    feature_based: bool = False
    """Freeze the encoder and train an LSTM on its last four layers (Devlin et al. 2018, section
    5.3); otherwise the whole encoder is fine-tuned."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)
        if self.scheme is not None and self.entities is False:
            raise InputError(
                f"scheme: wanted none with entities = false, got {self.scheme}: leave one out"
            )


@dataclass(frozen=True, kw_only=True)
class TagParameters(Parameters):
    """Hugging Face's parameters for token classification."""

    aggregation_strategy: AggregationStrategy | None = None
    """`none` returns the tag of every word, the others entities; None follows the model's tags. A
    word has the tag of its first piece (`first`, and `simple`, since words are never split), that
    with the best mean over its pieces (`average`), or that of its most certain piece (`max`)."""
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
    """Rows are `{"tokens": [...], "tags": [...]}`."""

    name = "token-classification"
    labels_of_rows = True
    objective = "token_classification"
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
    )
    primary_metric = "f1"
    single_is_bare = True
    parameters: type[TagParameters] = TokenClassificationParameters
    options = TokenClassificationOptions
    examples = ("The Eiffel Tower is in Paris.",)
    cell_types: Mapping[str, pa.DataType] = {"entities": pa.list_(pa.struct(ENTITY))}

    chosen: TokenClassificationOptions

    def __init__(
        self, labels: list[str], options: TokenClassificationOptions | None = None
    ) -> None:
        self.labels = list(labels)
        options = options or self.options()
        if options.entities is None:
            options = replace(options, entities=all(map(is_of_entity, self.labels)))
        self.chosen = options
        self.primary_metric = "f1" if options.entities else "accuracy"
        if not options.entities:
            self.parameters = TagParameters
        self._ids = {label: index for index, label in enumerate(self.labels)}
        types = {type_of(tag) for tag in self.labels} - {""}
        kinds = sorted(types) if options.entities else self.labels
        self._types = {kind: place for place, kind in enumerate(kinds)}

    @classmethod
    def shapes(cls, options: TokenClassificationOptions | None = None) -> tuple[type, type]:
        return TaggedWords, cls.target

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: TokenClassificationOptions | None = None
    ) -> "TokenClassification":
        labels = sorted({tag for row in rows for tag in row["tags"]})
        if len(labels) < 2:
            raise CorpusError(
                f"training rows: wanted at least two tags, found {len(labels)} "
                f"({', '.join(labels) or 'no rows'}): add rows with another tag"
            )
        options = options or cls.options()
        plain_tags = [label for label in labels if not is_of_entity(label)]
        entities = options.entities
        if entities is None:
            entities = options.scheme is not None or bool(set(labels) - {OUTSIDE, *plain_tags})
        if not entities:
            return cls(labels, replace(options, entities=False))
        if plain_tags:
            raise CorpusError(
                "training rows: wanted all tags to mark entities (B-PER, I-PER, O), or none, got "
                f"{', '.join(plain_tags[:5])} among them: correct them, or set options.entities = "
                "false to score each tag by itself"
            )
        scheme, _ = recognised((row["tags"] for row in rows), options.scheme)
        if options.scheme not in (None, scheme):
            raise CorpusError(
                f"training rows: wanted tags in the scheme {options.scheme}, more of them fit "
                f"{scheme}: set options.scheme to it, or leave it out"
            )
        types = {type_of(label) for label in labels} - {""}
        labels = sorted({OUTSIDE, *(f"{prefix}-{kind}" for prefix in "BI" for kind in types)})
        return cls(labels, replace(options, entities=True, scheme=scheme))

    def request_of(self, row: Row) -> str:
        return _text_of(row["tokens"])[0]

    def build_objective(
        self, config: EncoderConfig
    ) -> "TokenObjective | FeatureBasedTokenClassification":
        from bert_core.objectives.feature_based import FeatureBasedTokenClassification
        from bert_core.objectives.token_classification import TokenClassification as TokenObjective

        kind = FeatureBasedTokenClassification if self.chosen.feature_based else TokenObjective
        return kind(config, len(self.labels))

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: TagParameters | None = None,
    ) -> list[Window]:
        divided = [None if row.get("tokens") is None else _text_of(row["tokens"]) for row in rows]
        texts = [
            row["text"] if text_spans is None else text_spans[0]
            for row, text_spans in zip(rows, divided, strict=True)
        ]
        parameters = parameters or TagParameters()
        all_pieces = parameters.aggregation_strategy in ("average", "max")
        stride = self.chosen.stride if parameters.stride is None else parameters.stride
        room = max_length - 2
        stride = min(stride, room // 2)
        windows = []
        for number, (pieces, text_spans) in enumerate(
            zip(pieces_of(tokenizer, texts), divided, strict=True)
        ):
            spans = _spans_of(pieces) if text_spans is None else text_spans[1]
            firsts, words = _first_pieces(pieces.offsets, spans)
            if all_pieces:
                ends = np.append(firsts[1:], len(pieces.ids))
            ids = self._label_ids(rows[number], number + 1) if labelled else None
            parts = slices(len(pieces.ids), room, stride)
            for part, scored in zip(parts, _by_owner(firsts, parts), strict=True):
                sequence = with_special_tokens(tokenizer, pieces.ids[part.first : part.end])
                labels = {} if ids is None else {"token_labels": ids[words[scored]]}
                positions, scored_words = firsts[scored], words[scored]
                if all_pieces:
                    sizes = np.minimum(ends[scored], part.end) - positions
                    scored_words = np.repeat(scored_words, sizes)
                    positions = np.repeat(positions, sizes) + _counted(sizes)
                windows.append(
                    Window(
                        row=number,
                        ids=(sequence.ids,),
                        segment_b_start=(sequence.segment_b_start,),
                        positions={"token_positions": positions - part.first + 1},
                        labels=labels,
                        origin=_Words(texts[number], spans, scored_words),
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
        for places in by_row:
            origin: _Words = windows[places[0]].origin
            parts = [(windows[at].origin, scores[at]) for at in places]
            tags, shares = self._tags(origin, parts, strategy)
            if scheme is not None:
                tags = tags_of(entities_of(tags), len(tags), scheme)
            if strategy != "none":
                answers.append(_groups(origin, tags, shares, parameters.ignore_labels))
            else:
                answers.append(_words(origin, tags, shares, parameters.ignore_labels))
        return answers

    def _tags(
        self,
        origin: "_Words",
        parts: Sequence[tuple["_Words", np.ndarray]],
        strategy: AggregationStrategy,
    ) -> tuple[list[str], np.ndarray]:
        """The best tag of each word and its probability; a word without pieces is outside."""
        outside = OUTSIDE if OUTSIDE in self._ids else self.labels[0]
        tags = [outside] * len(origin.spans)
        shares = np.zeros(len(tags))
        for part, logits in parts:
            words, probabilities = _by_word(part.words, softmax(logits), strategy)
            best = probabilities.argmax(-1)
            for word, index, row in zip(words, best, probabilities, strict=True):
                tags[word] = self.labels[index]
                shares[word] = row[index]
        return tags, shares

    def compare(self, rows: Sequence[Row], answers: Sequence[Any]) -> Columns:
        """Per row, the `correct`, `predicted` and `wanted` entities (or words), counted by type.

        The last type is for all types that the model does not know, which no answer can have.
        """
        for number, row in enumerate(rows, 1):
            self._check(row, number)
        columns: dict[str, list[Any]] = {"correct": [], "predicted": [], "wanted": []}
        if self.chosen.entities:
            columns |= {"surfaces": [], "wanted_surfaces": []}
        for row, answer in zip(rows, answers, strict=True):
            text, spans = _text_of(row["tokens"])
            annotated, predicted = self._annotated(row, spans), self._predicted(answer, spans)
            columns["correct"].append(self._by_type(predicted & annotated))
            columns["predicted"].append(self._by_type(predicted))
            columns["wanted"].append(self._by_type(annotated))
            if self.chosen.entities:
                for name, marks in (("surfaces", predicted), ("wanted_surfaces", annotated)):
                    columns[name].append({(kind, text[start:end]) for kind, start, end in marks})
        return {name: _column(values) for name, values in columns.items()}

    def _annotated(self, row: Row, spans: Spans) -> set[Mark]:
        if self.chosen.entities:
            return {
                (entity.type, int(spans[entity.first, 0]), int(spans[entity.end - 1, 1]))
                for entity in entities_of(row["tags"])
            }
        return {
            (tag, start, end) for tag, (start, end) in zip(row["tags"], spans.tolist(), strict=True)
        }

    def _predicted(self, answer: list[dict[str, Any]], spans: Spans) -> set[Mark]:
        marks = {self._mark(entity) for entity in answer}
        if not self.chosen.entities:
            # Words that an answer leaves out are outside.
            starts = {start for _, start, _ in marks}
            marks |= {(OUTSIDE, start, end) for start, end in spans.tolist() if start not in starts}
        return marks

    def _mark(self, entity: Mapping[str, Any]) -> Mark:
        kind = entity["entity_group" if self.chosen.entities else "entity"]
        return kind, entity["start"], entity["end"]

    def _by_type(self, marks: set[Mark]) -> Int[np.ndarray, "types"]:
        counts = np.zeros(len(self._types) + 1, dtype=np.int64)
        for kind, _, _ in marks:
            counts[self._types.get(kind, -1)] += 1
        return counts

    def constant(self, rows: Sequence[Row]) -> Columns:
        if self.chosen.entities:
            return self.compare(rows, [[] for _ in rows])
        tags = [tag for row in rows for tag in row["tags"]]
        usual = max(sorted(set(tags)), key=tags.count)
        words = [_text_of(row["tokens"])[1].tolist() for row in rows]
        return self.compare(
            rows, [[{"entity": usual, "start": a, "end": b} for a, b in spans] for spans in words]
        )

    def cells(self, answer: list[dict[str, Any]]) -> dict[str, Any]:
        return {"entities": answer}

    def metrics(self, columns: Columns) -> dict[str, float]:
        """For entities conlleval's, and `surface_f1` over distinct entities (WNUT 2017)."""
        if not self.chosen.entities:
            return {"accuracy": float(columns["correct"].sum() / max(1, columns["wanted"].sum()))}
        surfaces: list[set[tuple[str, str]]] = [
            set().union(*columns[name]) for name in ("surfaces", "wanted_surfaces")
        ]
        counts = {
            "correct": len(surfaces[0] & surfaces[1]),
            "predicted": len(surfaces[0]),
            "wanted": len(surfaces[1]),
        }
        different = entity_metrics({name: np.array([count]) for name, count in counts.items()})
        return {**entity_metrics(columns), "surface_f1": different["f1"]}

    def by_class(self, columns: Columns) -> dict[str, dict[str, float]]:
        """Per type of entity, or per tag."""
        names = ("correct", "predicted", "wanted")
        return {
            kind: {
                **entity_metrics({name: columns[name][:, place] for name in names}),
                "support": int(columns["wanted"][:, place].sum()),
            }
            for kind, place in self._types.items()
        }

    def faults(self, columns: Columns) -> Int[np.ndarray, "rows"]:
        """How many entities, or words, are wrong; one predicted instead of another counts once."""
        correct, predicted, annotated = (
            columns[name].sum(axis=1) for name in ("correct", "predicted", "wanted")
        )
        return np.maximum(predicted, annotated) - correct

    def claims(
        self, rows: Sequence[Row], answers: Sequence[Any]
    ) -> tuple[Float[np.ndarray, "claims"], Bool[np.ndarray, "claims"]]:
        """The score of each entity, or word, in the answers."""
        scores: list[float] = []
        is_right: list[bool] = []
        for row, answer in zip(rows, answers, strict=True):
            annotated = self._annotated(row, _text_of(row["tokens"])[1])
            scores.extend(entity["score"] for entity in answer)
            is_right.extend(self._mark(entity) in annotated for entity in answer)
        return np.array(scores, dtype=np.float64), np.array(is_right, dtype=bool)

    def remarks(self, rows: Sequence[Row]) -> Remarks:
        remarks = super().remarks(rows)
        tags = [tag for row in rows for tag in row["tags"]]
        if self.chosen.entities:
            scheme, broken = recognised((row["tags"] for row in rows), self.chosen.scheme)
            remarks |= {"tag_scheme": scheme, "tags_that_break_their_scheme": broken}
            tags = [type_of(tag) for tag in tags if tag != OUTSIDE]
        unknown = [tag for tag in tags if tag not in self._types]
        return remarks | {
            "words_with_unknown_tags": len(unknown),
            "unknown_tags": ", ".join(sorted(set(unknown))),
        }

    def is_comparable(self, other: Task) -> bool:
        # Other options are about how texts are read or rows were written, not what is measured.
        return isinstance(other, TokenClassification) and (
            self.chosen.entities == other.chosen.entities
        )

    @classmethod
    def checked_row(cls, row: Row, options: Any = None, *, learned: bool = True) -> Row:
        if len(row["tags"]) != len(row["tokens"]):
            raise InputError(
                f"wanted one tag per word, got {len(row['tags'])} tags for "
                f"{len(row['tokens'])} words: correct the row, or remove it"
            )
        return row

    def _check(self, row: Row, number: int) -> None:
        with numbered(number):
            self.checked_row(row)
        if not self.chosen.entities:
            return
        plain_tag = next((tag for tag in row["tags"] if not is_of_entity(tag)), None)
        if plain_tag is not None:
            raise CorpusError(
                f"row {number}: wanted entity tags (B-PER, I-PER, O), as in the training rows, "
                f"got {plain_tag!r}: correct the row, or remove it"
            )

    def _label_ids(self, row: Row, number: int) -> Int[np.ndarray, "words"]:
        self._check(row, number)
        tags = row["tags"]
        if self.chosen.entities:
            tags = tags_of(entities_of(tags), len(tags), _scheme_of(self.labels))
        return np.array([self._ids.get(tag, IGNORE) for tag in tags], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of a text, and which of them a window scores."""

    text: str
    spans: Spans
    words: Int[np.ndarray, "scored"]
    """The word of each scored piece."""


def _counted(sizes: Int[np.ndarray, "runs"]) -> Int[np.ndarray, "_"]:
    """0, 1, … within each run."""
    return np.arange(sizes.sum()) - np.repeat(starts_of(sizes), sizes)


def _by_word(
    words: Int[np.ndarray, "scored"],
    probabilities: Float[np.ndarray, "scored classes"],
    strategy: AggregationStrategy,
) -> tuple[Int[np.ndarray, "words"], Float[np.ndarray, "words classes"]]:
    """Words, and the probabilities of each from those of its pieces, as transformers' aggregation
    strategies do."""
    if strategy not in ("average", "max") or not len(words):
        return words, probabilities
    known, firsts, counts = np.unique(words, return_index=True, return_counts=True)
    if strategy == "average":
        return known, np.add.reduceat(probabilities, firsts) / counts[:, None]
    order = np.lexsort((-probabilities.max(-1), words))  # the most certain piece of each word first
    return known, probabilities[order[firsts]]


def _scheme_of(labels: Sequence[str]) -> Scheme:
    """The scheme that a model with these entity labels writes.

    Only IOB1 lacks `B-` for types that never directly follow an entity of the same type.
    """
    prefixes = {label[:2] for label in labels}
    if prefixes & {"L-", "U-"}:
        return "BILOU"
    if prefixes & {"E-", "S-"}:
        return "BIOES"
    types = {type_of(label) for label in labels} - {""}
    return "BIO" if all(f"B-{kind}" in labels for kind in types) else "IOB1"


def _text_of(tokens: Sequence[str]) -> tuple[str, Spans]:
    """The words joined by spaces, and the character span of each."""
    lengths = np.array([len(token) for token in tokens], dtype=np.int64)
    ends = np.cumsum(lengths + 1) - 1
    return " ".join(tokens), np.stack([ends - lengths, ends], axis=1)


def _spans_of(pieces: Pieces) -> Spans:
    """The character span of each word found by the tokenizer."""
    known = (pieces.words >= 0) & (pieces.offsets[:, 1] > pieces.offsets[:, 0])
    offsets = pieces.offsets[known]
    _, firsts, counts = np.unique(pieces.words[known], return_index=True, return_counts=True)
    return np.stack([offsets[firsts, 0], offsets[firsts + counts - 1, 1]], axis=1)


def _first_pieces(
    offsets: Int[np.ndarray, "pieces 2"], spans: Spans
) -> tuple[Int[np.ndarray, "found"], Int[np.ndarray, "found"]]:
    """For every word that has pieces: its first piece, and its index."""
    if not len(offsets) or not len(spans):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    # A piece belongs to the last word that starts at or before its last character.
    word = np.searchsorted(spans[:, 0], offsets[:, 1] - 1, side="right") - 1
    words, firsts = np.unique(word, return_index=True)
    known = words >= 0
    return firsts[known].astype(np.int64), words[known].astype(np.int64)


def _by_owner(
    firsts: Int[np.ndarray, "words"], parts: Sequence[Slice]
) -> list[Int[np.ndarray, "_"]]:
    """For every slice: which words it owns, by their first pieces."""
    ends = np.array([part.own_end for part in parts])
    owners = np.searchsorted(ends, firsts, side="right")
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(1, len(parts)))
    return np.split(order, bounds)


def _groups(
    origin: _Words, tags: Sequence[str], shares: np.ndarray, ignored: Sequence[str]
) -> list[dict[str, Any]]:
    """Entities, each scored by the mean of its words' scores.

    As in transformers, neighbours with the same tag of no scheme are one, and an entity has the
    name of its first tag after the hyphen.
    """
    marked = [tag if is_of_entity(tag) else f"I-{tag}" for tag in tags]
    named = [(entity, tags[entity.first].split("-", 1)[-1]) for entity in entities_of(marked)]
    return [
        _answer(origin, entity.first, entity.end, "entity_group", name, shares)
        for entity, name in named
        if name not in ignored
    ]


def _words(
    origin: _Words, tags: Sequence[str], shares: np.ndarray, ignored: Sequence[str]
) -> list[dict[str, Any]]:
    return [
        _answer(origin, place, place + 1, "entity", tag, shares)
        for place, tag in enumerate(tags)
        if tag not in ignored
    ]


def _answer(
    origin: _Words, first: int, end: int, key: str, label: str, shares: np.ndarray
) -> dict[str, Any]:
    start, stop = int(origin.spans[first, 0]), int(origin.spans[end - 1, 1])
    return {
        key: label,
        "score": float(shares[first:end].mean()),
        "word": origin.text[start:stop],
        "start": start,
        "end": stop,
    }


def _column(values: list[Any]) -> np.ndarray:
    """An array with one entry per row, of sets too."""
    if not isinstance(values[0], set):
        return np.array(values)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
