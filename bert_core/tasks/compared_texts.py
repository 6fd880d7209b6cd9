"""Texts with the texts that they are compared with: rows of the tasks that turn each text into a
vector of its own, dense or sparse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from bert_core.checks import check_fields
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import (
    Cut,
    Ids,
    first_ids_of,
    ids_of,
    kept_of,
    with_special_tokens,
)
from bert_core.errors import InputError
from bert_core.tasks.base import Kind, Options, Parameters, Remarks, numbered
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import Side, cuts_beginning, numbers_of
from bert_core.wording import shown

DISTILLED = Kind(
    name="distilled",
    rows=(
        {
            "text": "how do I open a file",
            "text_pair": "Use open to read a file.",
            "negatives": ["A list holds objects in order."],
            "scores": [8.5, -3.0],
        },
        {
            "text": "what is a list",
            "text_pair": "A list holds objects in order.",
            "negatives": ["Use open to read a file.", "A set has no order."],
            "scores": [9.0, -4.5, 1.5],
        },
    ),
)
"""Rows with a teacher's scores."""


@dataclass(frozen=True, kw_only=True)
class OtherPassages:
    """The passages from which a text's own, its `text_pair`, is to be told apart."""

    one_or_more: ClassVar = frozenset({"negatives"})

    negatives: list[str] | None = None
    """Texts that do not belong to the first text."""
    scores: list[float] | None = None
    """A teacher's scores of `text_pair` and of each of the negatives."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
    """Prompts of a model, by sentence-transformers' names."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Texts to put before a text, by name, such as `query`."""
    default_prompt: str | None = None
    """Name of the prompt that is used by default."""

    def prompt(self, name: str | None) -> str:
        """Return the text of the prompt `name`, or of the default prompt; empty if there is
        neither.

        Raises: InputError if the model has no prompt of this name.
        """
        field, name = ("prompt_name", name) if name else ("default_prompt", self.default_prompt)
        if name is None:
            return ""
        if name not in self.prompts:
            there_are = ", ".join(self.prompts) or "none"
            raise InputError(
                f"{field}: wanted one of the model's prompts ({there_are}), got {name!r}: "
                "leave it out, or put the prompt before the text yourself"
            )
        return self.prompts[name]


@dataclass(frozen=True, kw_only=True)
class TowerOptions(PromptOptions):
    """Prompts of a model that embeds queries and passages differently."""

    query_prompt: str | None = None
    """Name of the prompt to put before `text` where a row has texts to compare it with, as in
    training and evaluation; by default, the default prompt."""
    passage_prompt: str | None = None
    """Name of the prompt to put before those other texts."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)
        for name in ("query_prompt", "passage_prompt"):
            prompt = getattr(self, name)
            if prompt is not None and prompt not in self.prompts:
                there_are = ", ".join(self.prompts) or "none"
                raise InputError(
                    f"{name}: wanted one of the option prompts ({there_are}), got {prompt!r}: add "
                    "it there"
                )

    def prompts_before(self, texts: int, name: str | None) -> list[str]:
        """Return the prompts of a row's texts.

        Args:
            texts: their number.
            name: of the prompt that is asked for; None uses those of the options.
        Raises: InputError if the model has no prompt of this name.
        """
        if name is not None or texts == 1:
            return [self.prompt(name)] * texts
        return [self.prompt(self.query_prompt), *[self.prompt(self.passage_prompt)] * (texts - 1)]


@dataclass(frozen=True, kw_only=True)
class VectorParameters(Parameters):
    """Which prompt a text gets, and how it is cut if it is too long, by Hugging Face's names."""

    cut_by: ClassVar[str | None] = "truncate"

    truncate: bool = False
    """Cut texts that are longer than the model reads; otherwise they are rejected."""
    truncation_direction: Side | None = None
    """Which end of the text is cut off; None cuts as the tokenizer does, usually `right`."""
    prompt_name: str | None = None
    """Name of the model's prompt to put before each text."""

    def __post_init__(self) -> None:
        check_fields(self, error=InputError)


def texts_of(row: Row) -> list[str]:
    """Return a row's `text`, and the texts that it is compared with."""
    pair = row.get("text_pair")
    return [row["text"], *([] if pair is None else [pair]), *(row.get("negatives") or ())]


def named(row: Row, cuts: Sequence[Cut | None]) -> list[tuple[Cut, ...]]:
    """Return the cut of each text of a row, empty if the text was not cut. If the row has several
    texts, cuts have the names of their texts."""
    names = ["text", *(["text_pair"] if row.get("text_pair") is not None else [])]
    names += [f"negatives[{place}]" for place in range(len(cuts) - len(names))]
    return [
        () if cut is None else (replace(cut, name=name if len(cuts) > 1 else ""),)
        for cut, name in zip(cuts, names, strict=True)
    ]


def check_passages(row: Row) -> None:
    """Check a labelled row's other passages.

    Raises: InputError if it has no `text_pair`, if its negatives have it, or if a teacher's scores
        are not of the `text_pair` and each negative.
    """
    _check_pair(row)
    negatives, scores = row.get("negatives") or (), row.get("scores")
    if row.get("text_pair") in negatives:
        raise InputError(
            f"wanted negatives other than the text_pair, got {shown(row['text_pair'])} as both: "
            "remove it from the negatives"
        )
    if scores is None:
        return
    if not negatives:
        raise InputError("wanted negatives with scores, a teacher's, got none: add them")
    if len(scores) != 1 + len(negatives):
        raise InputError(
            f"wanted {1 + len(negatives)} scores, of the text_pair and then of each of the "
            f"negatives, got {len(scores)}: correct the row"
        )


def remarks_on_negatives(rows: Sequence[Row]) -> Remarks:
    """Return the number of rows with a negative that other rows have as the right one for the same
    text; it never counts as wrong."""
    right = {(row["text"], row.get("text_pair")) for row in rows}
    return {
        "rows_with_negatives_that_are_right_elsewhere": sum(
            any((row["text"], negative) in right for negative in row.get("negatives") or ())
            for row in rows
        )
    }


def sequences_of(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    limit: int,
    parameters: VectorParameters,
    prompts: Sequence[str],
) -> Iterator[tuple[Ids, Cut | None]]:
    """Yield the ids of each text, with its prompt before it and special tokens, and how it was cut;
    None if it was not. Texts are cut to `limit` tokens if the parameters say so."""
    from_end = cuts_beginning(tokenizer, parameters.truncation_direction)
    texts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    if parameters.truncate:
        all_ids = first_ids_of(tokenizer, texts, limit, from_end=from_end)
    else:
        all_ids = ids_of(tokenizer, texts)
    room = limit - 2
    for prompt, text, ids in zip(prompts, texts, all_ids, strict=True):
        if not parameters.truncate or len(ids) <= room:
            yield with_special_tokens(tokenizer, ids).ids, None
            continue
        cut_ids = kept_of(ids, room, from_end=from_end)
        cut = Cut(text, room, from_end=from_end, prompt=len(prompt))
        yield with_special_tokens(tokenizer, cut_ids).ids, cut


@dataclass(frozen=True)
class Search:
    """Rows as a search task: each row's `text_pair` is to be found among all texts with which any
    of the rows is compared."""

    places: Int[np.ndarray, "passages"]
    """Where each different text is first compared with, counted over all rows in order."""
    targets: Int[np.ndarray, "rows"]
    """Which of `places` each row's `text_pair` is."""
    queries: Int[np.ndarray, "rows"]
    """Equal numbers for rows with the same `text`."""


def search_of(rows: Sequence[Row]) -> Search:
    """Return the rows as a search task. Raises: CorpusError if a row has no `text_pair`."""
    check_pairs(rows)
    texts = [texts_of(row) for row in rows]
    passages = [text for row_texts in texts for text in row_texts[1:]]
    numbers = numbers_of(passages)
    _, places = np.unique(numbers, return_index=True)
    sizes = np.array([len(row_texts) - 1 for row_texts in texts])
    queries = numbers_of(row_texts[0] for row_texts in texts)
    return Search(places, numbers[np.cumsum(sizes) - sizes], queries)


def check_pairs(rows: Sequence[Row]) -> None:
    """Check that each row has a `text_pair`. Raises: CorpusError naming the first without one."""
    for number, row in enumerate(rows, 1):
        with numbered(number):
            _check_pair(row)


def _check_pair(row: Row) -> None:
    if row.get("text_pair") is None:
        raise InputError(
            "wanted a text_pair, the text to compare with the first, got none: name its column, or "
            "remove the row"
        )
