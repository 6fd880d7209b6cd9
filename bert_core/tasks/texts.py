"""Base of the tasks over one text or a pair of texts: the input, its window, and whether training
rows are pairs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int, Shaped

from bert_core.checks import check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Window, first_ids_of, ids_of, with_special_tokens
from bert_core.errors import CorpusError, InputError
from bert_core.tasks.base import CuttingParameters, Options, Task, check_length
from bert_core.tasks.evaluation import Evaluated
from bert_core.tasks.shapes import Row
from bert_core.wording import shown

Side = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True)
class TextParameters(CuttingParameters):
    """How a text, or a pair of texts, is cut if it is too long."""

    truncation_direction: Side | None = None
    """Which end of a text is cut off; None cuts as the tokenizer does, usually `right`."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


def cuts_beginning(tokenizer: Tokenizer, side: Side | None) -> bool:
    """Whether texts that are too long lose their beginning rather than their end."""
    return tokenizer.keeps_end if side is None else side == "left"


@dataclass(frozen=True, kw_only=True)
class TextInput:
    """A text, or a pair of texts."""

    text: str
    """The first text."""
    text_pair: str | None = None
    """The second text, if the task is about pairs."""


@dataclass(frozen=True, kw_only=True)
class PairInput:
    """A pair of texts."""

    text: str
    """The first text."""
    text_pair: str
    """The second text."""


@dataclass(frozen=True, kw_only=True)
class SingleInput(TextInput):
    """A single text."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "json_schema_extra": {"allOf": [{"properties": {"text_pair": {"maxLength": 0}}}]}
    }

    def __post_init__(self) -> None:
        if self.text_pair:
            raise InputError(
                f"wanted no text_pair, as training rows had none, got {shown(self.text_pair)}: "
                "leave it out, or use a model for pairs"
            )


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """Options of tasks over texts."""

    pairs: bool | None = field(default=None, compare=False)
    """Whether each row has a text_pair; by default, as in the training rows."""


AnyOptions = TypeVar("AnyOptions", bound=TextOptions)


class TextTask(Task):
    """A task over single texts or pairs of texts, whichever its training rows have."""

    inputs: type = TextInput
    replaceable: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    options = TextOptions
    single: ClassVar[str]
    """Example input for single texts, as a caller sends it."""
    pair: ClassVar[dict[str, str]]
    """Example input for pairs."""

    chosen: TextOptions

    def __init__(self, labels: Sequence[str] = (), options: Any = None) -> None:
        super().__init__(labels, options)
        self.inputs, _ = self.shapes(self.chosen)
        if self.chosen.pairs is not None:
            self.examples = (self.pair if self.chosen.pairs else self.single,)

    @classmethod
    def shapes(cls, options: Any = None) -> tuple[type, type]:
        if options is None or options.pairs is None:
            return cls.inputs, cls.target
        return PairInput if options.pairs else SingleInput, cls.target

    @classmethod
    def with_pairs(cls, rows: Sequence[Row], options: AnyOptions) -> AnyOptions:
        """Return the options, with `pairs` detected from these rows if it is unset.

        Raises: CorpusError if some rows are pairs and others are not.
        """
        if options.pairs is not None:
            return options
        are_pairs = [row.get("text_pair") is not None for row in rows]
        if len(set(are_pairs)) > 1:
            with_one, without = are_pairs.index(True) + 1, are_pairs.index(False) + 1
            raise CorpusError(
                f"row {without}: wanted a text_pair, as row {with_one} has one, got none: add it "
                "(an empty text if there is nothing to say), or remove the row"
            )
        return replace(options, pairs=any(are_pairs))

    def is_comparable(self, other: Evaluated) -> bool:
        if not (super().is_comparable(other) and isinstance(other, TextTask)):
            return False
        return {self.chosen.pairs, other.chosen.pairs} != {True, False}

    def windows(
        self,
        rows: Sequence[Row],
        tokenizer: Tokenizer,
        max_length: int,
        labels: Mapping[str, Shaped[np.ndarray, "rows ..."]],
        parameters: CuttingParameters | None = None,
    ) -> list[Window]:
        """Return the `text_windows` of the rows; only of `text` if the task is about single texts.

        If it is unknown whether the task is about pairs, an empty second text is ignored, as in
        transformers.
        """
        if self.chosen.pairs is False:
            rows = [{"text": row["text"]} for row in rows]
        elif self.chosen.pairs is None:
            rows = [row if row.get("text_pair") else {"text": row["text"]} for row in rows]
        cut_at = None if parameters is None else tokenizer.longest
        return text_windows(rows, tokenizer, max_length, labels, parameters, cut_at)


def text_windows(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    max_length: int,
    labels: Mapping[str, Shaped[np.ndarray, "rows ..."]],
    parameters: CuttingParameters | None = None,
    cut_at: int | None = None,
) -> list[Window]:
    """Return one window per row: `[CLS] text [SEP]`, or `[CLS] text [SEP] text_pair [SEP]`.

    Args:
        labels: entry of the batch → the rows' labels; empty if there are none.
        parameters: those of the request; None cuts texts that are too long.
        cut_at: number of tokens to which texts are cut, if lower than `max_length`.
    """
    cuts_texts = parameters is None or parameters.truncation
    limit = min(max_length, cut_at or max_length) if cuts_texts else None
    # Each text once: in a ranking, all rows have the same query.
    texts = list(dict.fromkeys(text for row in rows for text in _texts_of(row)))
    side = parameters.truncation_direction if isinstance(parameters, TextParameters) else None
    from_end = cuts_beginning(tokenizer, side)
    all_ids = first_ids_of(tokenizer, texts, limit, from_end=from_end)
    known = dict(zip(texts, all_ids, strict=True))
    whole: dict[str, Ids] = {}
    windows = []
    for number, row in enumerate(rows):
        text, pair = row["text"], row.get("text_pair")
        ids, second_ids = known[text], None if pair is None else known[pair]
        if limit is not None and second_ids is not None and min(len(ids), len(second_ids)) > limit:
            # The odd token goes to the longer text, so the full lengths are needed.
            missing = [each for each in _texts_of(row) if each not in whole]
            whole |= zip(missing, ids_of(tokenizer, missing), strict=True)
            ids, second_ids = whole[text], whole[pair or ""]
        sequence = with_special_tokens(tokenizer, ids, second_ids, limit, from_end=from_end)
        if parameters is not None:
            check_length(number, len(sequence.ids), max_length, parameters)
        if pair is None or second_ids is None:
            cuts = sequence.cuts(("", text, ids))
        else:
            cuts = sequence.cuts(("text", text, ids), ("text_pair", pair, second_ids))
        windows.append(
            Window(
                row=number,
                ids=(sequence.ids,),
                segment_b_start=(sequence.segment_b_start,),
                labels={name: ids[number : number + 1] for name, ids in labels.items()},
                cuts=cuts,
            )
        )
    return windows


def numbers_of(texts: Iterable[str]) -> Int[np.ndarray, "texts"]:
    """Return a number for each text, from 0 in the order of first occurrence; equal texts have
    equal numbers. `np.unique` would take four bytes per character of the longest text, for every
    text."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)


def _texts_of(row: Row) -> list[str]:
    pair = row.get("text_pair")
    return [row["text"]] if pair is None else [row["text"], pair]


def softmax(logits: Float[np.ndarray, "*rows classes"]) -> Float[np.ndarray, "*rows classes"]:
    """Return the probabilities of the classes, fp64."""
    wide = logits.astype(np.float64)
    shifted = np.exp(wide - wide.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def sigmoid(logits: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Return the probability for each logit, fp64, computed in a form that does not overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64)))
