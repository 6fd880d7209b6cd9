"""The relation between two marked spans of a text.

A text has its spans marked as in SemEval-2010 task 8: `The <e1>bank</e1> of <e2>England</e2>`. The
model reads the text without these marks; around the pieces of the spans stand `$` and `#` (R-BERT,
Wu and He 2019), and the relation is read from the first of both (`objectives`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Cut, Ids, Pieces, Window, ids_of, pieces_of, with_special_tokens
from bert_core.errors import InputError
from bert_core.metrics.relations import relation_f1
from bert_core.model.config import EncoderConfig
from bert_core.objectives.graph_scores import RELATIONS
from bert_core.tasks.base import Kind, check_length
from bert_core.tasks.evaluation import Columns
from bert_core.tasks.shapes import Row
from bert_core.tasks.text_classification import (
    OneLabel,
    SeveralLabels,
    TextClassification,
    TextClassificationOptions,
    TextClassificationParameters,
)
from bert_core.wording import shown

if TYPE_CHECKING:
    from bert_core.objectives.relation_classification import RelationClassification as Relations

MARKS = ("$", "#")
"""What stands around the first and the second span (Wu and He 2019, section 3.2)."""
NONE = ("Other", "no_relation")
"""Labels of pairs without a relation, in SemEval-2010 task 8 and TACRED."""
_TAG = re.compile(r"</?e[12]>")
_TAGS = ("<e1>", "</e1>", "<e2>", "</e2>")


@dataclass(frozen=True)
class Marked:
    """A text without its marks."""

    text: str
    spans: tuple[tuple[int, int], tuple[int, int]]
    """The characters of the first span and of the second."""


def marked(text: str) -> Marked:
    """Read a text with two marked spans, which may be nested. Raises: InputError if it has none."""
    plain, places, end = "", dict[str, int](), 0
    tags = [match[0] for match in _TAG.finditer(text)]
    for match in _TAG.finditer(text):
        plain += text[end : match.start()]
        places[match[0]] = len(plain)
        end = match.end()
    plain += text[end:]
    spans = [(places.get(f"<{name}>", 0), places.get(f"</{name}>", 0)) for name in ("e1", "e2")]
    if sorted(tags) != sorted(_TAGS) or not all(plain[start:end].strip() for start, end in spans):
        raise InputError(
            "wanted two marked spans, each once, such as 'The <e1>bank</e1> of <e2>England</e2>', "
            f"got {shown(text)}: mark them, or remove the row"
        )
    return Marked(plain, (spans[0], spans[1]))


@dataclass(frozen=True, kw_only=True)
class MarkedInput:
    """A text with two marked spans."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "json_schema_extra": {
            "examples": [{"text": "The <e1>bank</e1> of <e2>England</e2>."}],
        }
    }

    text: str
    """The text, with `<e1>` and `</e1>` around its first span, `<e2>` and `</e2>` around its
    second."""

    def __post_init__(self) -> None:
        marked(self.text)


@dataclass(frozen=True, kw_only=True)
class RelationOptions(TextClassificationOptions):
    """Options of text classification; `relation_f1` leaves the label `out_of_scope` out."""

    def __post_init__(self) -> None:
        if self.pairs:
            raise InputError(
                "pairs: wanted none, since both spans are marked in one text, got true: leave it "
                "out"
            )


@dataclass(frozen=True, kw_only=True)
class RelationParameters(TextClassificationParameters):
    """Parameters of text classification; a text that is too long is cut around its spans."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.truncation_direction is not None:
            raise InputError(
                "truncation_direction: wanted none, since a text that is too long is cut around "
                f"its marked spans, got {self.truncation_direction}: leave it out"
            )


class RelationClassification(TextClassification):
    """Rows are `{"text": "… <e1>…</e1> … <e2>…</e2> …", "label": …}`."""

    name = "relation-classification"
    objective = "relation_classification"
    graph_scores = RELATIONS
    inputs = MarkedInput
    kinds = (
        Kind(
            name="marked",
            rows=(
                {"text": "The <e1>ship</e1> left the <e2>port</e2>.", "label": "Origin(e1,e2)"},
                {"text": "The <e1>port</e1> received a <e2>ship</e2>.", "label": "Other"},
                {"text": "A <e1>port</e1> lost its <e2>ship</e2>.", "label": "Origin(e2,e1)"},
            ),
        ),
    )
    primary_metric = "relation_f1"
    pipeline_tag = "text-classification"
    replaceable = ()
    parameters = RelationParameters
    options = RelationOptions
    single = "The <e1>ship</e1> left the <e2>port</e2>."
    examples = (single,)
    cell_types: Mapping[str, pa.DataType] = {"label": pa.string(), "score": pa.float64()}

    @classmethod
    def shapes(cls, options: TextClassificationOptions | None = None) -> tuple[type, type]:
        return MarkedInput, SeveralLabels if options and options.multi_label else OneLabel

    @classmethod
    def from_huggingface(cls, entries: Mapping[str, Any], labels: list[str]) -> None:
        """Return None: no model of transformers has this head."""

    @classmethod
    def from_rows(
        cls, rows: Sequence[Row], options: TextClassificationOptions | None = None
    ) -> "TextClassification":
        """Return the task for these rows; `out_of_scope` is one of `NONE` if they have that label
        and nothing else is given."""
        options = replace(options or cls.options(), pairs=False)
        found = {row.get("label") for row in rows}
        none = next((label for label in NONE if label in found), None)
        if options.out_of_scope is None and none is not None and not options.multi_label:
            options = replace(options, out_of_scope=none)
        return super().from_rows(rows, options)

    def build_objective(self, config: EncoderConfig) -> "Relations":
        from bert_core.objectives.relation_classification import RelationClassification as Relations

        several = self.chosen.multi_label
        return Relations(
            config,
            len(self.labels),
            problem_type="multi_label_classification" if several else "single_label_classification",
        )

    def encode(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        *,
        labelled: bool = False,
        parameters: Any = None,
    ) -> list[Window]:
        labels = self._label_ids(rows) if labelled else None
        texts = [marked(row["text"]) for row in rows]
        marks = [_id_of(tokenizer, mark) for mark in MARKS]
        windows = []
        for number, (text, pieces) in enumerate(
            zip(texts, pieces_of(tokenizer, [text.text for text in texts]), strict=True)
        ):
            spans = [_pieces_in(span, pieces) for span in text.spans]
            kept = np.arange(len(pieces.ids))
            if parameters is None or parameters.truncation:
                kept = _kept(len(pieces.ids), spans, max_length - 2 - 2 * len(MARKS))
            ids, places = _with_marks(pieces.ids, kept, spans, marks)
            sequence = with_special_tokens(tokenizer, ids)
            if parameters is not None:
                check_length(number, len(sequence.ids), max_length, parameters)
            first, second = (np.array([1 + place]) for place in places)
            windows.append(
                Window(
                    row=number,
                    ids=(sequence.ids,),
                    segment_b_start=(sequence.segment_b_start,),
                    positions={"first_positions": first, "second_positions": second},
                    labels={} if labels is None else {"labels": labels[number : number + 1]},
                    cuts=_cuts(text.text, kept, len(pieces.ids)),
                )
            )
        return windows

    def metrics(self, columns: Columns) -> dict[str, float]:
        """Return the metrics of text classification and `relation_f1`."""
        none = self.chosen.out_of_scope
        f1 = relation_f1(columns["predicted"], columns["label"], self.labels, none)
        return super().metrics(columns) | {"relation_f1": f1}


def _id_of(tokenizer: Tokenizer, mark: str) -> int:
    """Return the id of a mark, or that of a separator if the tokenizer removes it."""
    [ids] = ids_of(tokenizer, [mark])
    return int(ids[-1]) if len(ids) else tokenizer.sep_id


def _pieces_in(span: tuple[int, int], pieces: Pieces) -> tuple[int, int]:
    """Return the first piece of a span and the one after its last; those are equal if none is
    left of it."""
    first = int(np.searchsorted(pieces.offsets[:, 1], span[0], side="right"))
    return first, max(first, int(np.searchsorted(pieces.offsets[:, 0], span[1], side="left")))


def _kept(pieces: int, spans: Sequence[tuple[int, int]], room: int) -> Int[np.ndarray, "kept"]:
    """Return the pieces that are read: all, or as many as there is room for, with the spans in the
    middle; if the spans are too far apart for that, some from the start of each."""
    if pieces <= room:
        return np.arange(pieces)
    begin, end = min(start for start, _ in spans), max(end for _, end in spans)
    if end - begin <= room:
        first = min(max(0, (begin + end - room) // 2), pieces - room)
        return np.arange(first, first + room)
    later, half = max(start for start, _ in spans), room // 2
    if later - begin < half or pieces - later < room - half:
        begin, later = min(begin, pieces - room), min(later, pieces - (room - half))
    parts = np.arange(begin, begin + half), np.arange(later, later + room - half)
    return np.union1d(*parts)


def _with_marks(
    ids: Ids,
    kept: Int[np.ndarray, "kept"],
    spans: Sequence[tuple[int, int]],
    marks: Sequence[int],
) -> tuple[Ids, list[int]]:
    """Return the ids of the pieces that are kept, with marks around the spans, and where the first
    mark of each span is."""
    # At one place, spans end before others begin, and the inner one of two is inside.
    bounds = sorted(
        bound
        for owner, (start, end) in enumerate(spans)
        for bound in ((start, 1, -end, owner), (end, 0 if end > start else 2, -start, -owner))
    )
    places = np.searchsorted(kept, [place for place, _, _, _ in bounds])
    values = [marks[abs(owner)] for _, _, _, owner in bounds]
    result = np.insert(ids[kept], places, np.array(values, dtype=ids.dtype))
    opening = {owner: at for at, (_, kind, _, owner) in enumerate(bounds) if kind == 1}
    return result.astype(np.uint32), [int(places[opening[at]]) + opening[at] for at in (0, 1)]


def _cuts(text: str, kept: Int[np.ndarray, "kept"], pieces: int) -> tuple[Cut, ...]:
    """Return where a text is cut: before and after the pieces that are kept."""
    if len(kept) == pieces or not len(kept):
        return ()
    cuts = []
    if kept[-1] < pieces - 1:
        cuts.append(Cut(text, int(kept[-1]) + 1, prompt=-sum(map(len, _TAGS))))
    if kept[0] > 0:
        cuts.append(Cut(text, pieces - int(kept[0]), from_end=True))
    return tuple(cuts) or (Cut(text, int(np.argmax(kept != np.arange(len(kept))))),)
