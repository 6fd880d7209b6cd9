"""Words of rows and texts for token classification: how they are read, and how their tags become
answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from bert_core.data.ragged import starts_of
from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Ids, Pieces, Slice, pieces_of
from bert_core.data.words import (
    Spans,
    Units,
    crossed,
    glue_of,
    in_one_word,
    is_evidence,
    is_inner,
    joined,
    parts_of,
    units_of,
)
from bert_core.metrics.entities import (
    NAMELESS,
    OUTSIDE,
    PREFIXES,
    Entity,
    Scheme,
    entities_of,
    name_of,
    runs_of,
    tag_of,
    tags_of,
    type_of,
)
from bert_core.tasks.shapes import Row
from bert_core.tasks.span_rows import Mark
from bert_core.tasks.texts import softmax

AggregationStrategy = Literal["none", "simple", "first", "average", "max"]


@dataclass(frozen=True, slots=True)
class Reading:
    """A row as it is read."""

    text: str
    """The text that the answer is about."""
    spans: Spans
    """Its words: those that the row names, else its units."""
    ids: Ids
    units: Units
    words: Int[np.ndarray, "units"]
    """The word of each unit."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The words of a text, and the units and words of the pieces that a window scores."""

    text: str
    spans: Spans
    units: Int[np.ndarray, "scored"]
    """The unit of each scored piece."""
    words: Int[np.ndarray, "scored"]
    """The word of each scored piece."""


@dataclass(frozen=True, slots=True)
class Tagged:
    """The words of a text with their tags."""

    text: str
    spans: Spans
    tags: list[str]
    shares: Float[np.ndarray, "words"]
    """The probability of each tag; NaN for a word without pieces."""


def read(rows: Sequence[Row], tokenizer: Tokenizer, *, by_parts: bool) -> list[Reading]:
    """Read rows with `tokens`, or else a `text`.

    Args:
        by_parts: whether the units are the parts of words; otherwise they are the words that a row
            names or, in a text, those that the tokenizer finds.
    """
    readings = dict[int, Reading]()
    plain = [place for place, row in enumerate(rows) if row.get("tokens") is None]
    texts = [rows[place]["text"] for place in plain]
    for place, text, pieces in zip(plain, texts, pieces_of(tokenizer, texts), strict=True):
        units = units_of(parts_of(text) if by_parts else _words_in(text, pieces), pieces.offsets)
        words = np.arange(len(units.spans))
        readings[place] = Reading(text, units.spans, pieces.ids, units, words)
    known = [place for place in range(len(rows)) if place not in readings]
    lists = [rows[place]["tokens"] for place in known]
    for place, tokens, (text, starts, pieces) in zip(
        known, lists, _known_words(tokenizer, lists, as_written=by_parts), strict=True
    ):
        shown, spans = joined(tokens)
        if by_parts:
            units = units_of(parts_of(text), pieces.offsets)
            words = np.searchsorted(starts, units.spans[:, 0], side="right") - 1
        else:
            full = np.flatnonzero([is_evidence(token) for token in tokens])
            units = units_of(spans[full], pieces.offsets)
            words = full[units.parts]
        readings[place] = Reading(shown, spans, pieces.ids, units, words)
    return [readings[place] for place in range(len(rows))]


def full_words(tokens: Sequence[str]) -> Int[np.ndarray, "words"]:
    """Return the indices of the words that are not empty after normalisation."""
    return np.flatnonzero([is_evidence(token) for token in tokens])


def _words_in(text: str, pieces: Pieces) -> Spans:
    """Return the character span of each word that the tokenizer finds in a text."""
    known = (pieces.words >= 0) & (pieces.offsets[:, 1] > pieces.offsets[:, 0])
    offsets = pieces.offsets[known]
    _, firsts, counts = np.unique(pieces.words[known], return_index=True, return_counts=True)
    spans = np.stack([offsets[firsts, 0], offsets[firsts + counts - 1, 1]], axis=1)
    return spans[[is_evidence(text[start:end]) for start, end in spans]]


def _known_words(
    tokenizer: Tokenizer, lists: Sequence[Sequence[str]], *, as_written: bool
) -> list[tuple[str, Int[np.ndarray, "words"], Pieces]]:
    """Return for each list of words the text that is tokenized, where the words start in it, and
    its pieces.

    Args:
        as_written: whether to join words as people write them, so that a tokenizer that sees spaces
            makes the same pieces as in a text. No piece belongs to two words: where one would, a
            space separates them.
    """
    glued = [glue_of(each) if as_written else np.zeros(len(each), bool) for each in lists]
    known = dict[int, tuple[str, np.ndarray, Pieces]]()
    left = list(range(len(lists)))
    while left:
        texts = [joined(lists[place], glued[place]) for place in left]
        pieces = pieces_of(tokenizer, [text for text, _ in texts])
        for place, (text, spans), of_text in zip(left, texts, pieces, strict=True):
            apart = glued[place] & crossed(spans[:, 0], of_text.offsets)
            glued[place] = glued[place] & ~apart
            if not apart.any():
                known[place] = text, spans[:, 0], of_text
        left = [place for place in left if place not in known]
    return [known[place] for place in range(len(lists))]


def by_owner(
    firsts: Int[np.ndarray, "words"], parts: Sequence[Slice]
) -> list[Int[np.ndarray, "_"]]:
    """Return for every slice the words whose first pieces it owns.

    Args:
        firsts: the first piece of each word, ascending.
    """
    ends = np.array([part.own_end for part in parts])
    owners = np.searchsorted(ends, firsts, side="right")
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(1, len(parts)))
    return np.split(order, bounds)


def counted(sizes: Int[np.ndarray, "runs"]) -> Int[np.ndarray, "_"]:
    """Return 0, 1, … within each run, for runs of these sizes."""
    return np.arange(sizes.sum()) - np.repeat(starts_of(sizes), sizes)


def by_unit(
    scored: Scored,
    probabilities: Float[np.ndarray, "scored classes"],
    strategy: AggregationStrategy,
) -> tuple[Int[np.ndarray, "units"], Float[np.ndarray, "units classes"]]:
    """Return the word of each unit, and its probabilities, computed from those of its pieces as in
    transformers' aggregation strategies."""
    if strategy not in ("average", "max") or not len(scored.units):
        return scored.words, probabilities
    _, firsts, counts = np.unique(scored.units, return_index=True, return_counts=True)
    words = scored.words[firsts]
    if strategy == "average":
        return words, np.add.reduceat(probabilities, firsts) / counts[:, None]
    # The most certain piece of each unit first.
    order = np.lexsort((-probabilities.max(-1), scored.units))
    return words, probabilities[order[firsts]]


def best_tags(
    parts: Sequence[tuple[Scored, Float[np.ndarray, "_ classes"]]],
    labels: Sequence[str],
    strategy: AggregationStrategy,
    *,
    of_entities: bool,
) -> Tagged:
    """Return the best tag of each word of a text and its probability; if a word has several parts,
    those of the first part.

    A word without pieces is outside any entity, or in the entity of the words around it.

    Args:
        parts: the text's windows, with their logits.
        of_entities: whether the labels mark entities.
    """
    origin = parts[0][0]
    tags = [OUTSIDE if OUTSIDE in labels else labels[0]] * len(origin.spans)
    shares = np.full(len(tags), np.nan)
    for part, logits in parts:
        words, probabilities = by_unit(part, softmax(logits), strategy)
        best = probabilities.argmax(-1)
        for word, index, row in zip(words, best, probabilities, strict=True):
            if np.isnan(shares[word]):
                tags[word], shares[word] = labels[index], row[index]
    places = np.flatnonzero(~np.isnan(shares))
    known = [tags[place] for place in places]
    for entity in (entities_of if of_entities else runs_of)(known):
        first, last = places[[entity.first, entity.end - 1]]
        tag = tags[first]
        inside = tag_of("I", type_of(tag)) if of_entities else tag
        for place in range(first, last + 1):
            tags[place] = inside if np.isnan(shares[place]) else tags[place]
    return Tagged(origin.text, origin.spans, tags, shares)


def tags_of_units(
    row: Row, words: Int[np.ndarray, "units"], scheme: Scheme | None
) -> list[str | None]:
    """Return the tag that each unit of a labelled row is trained with, from the tag of its word;
    None for a unit without a label.

    The first unit of an entity begins it and the others are inside. In a word outside any entity,
    only the first unit has a tag: long words, such as URLs, would teach little but `O`.

    Args:
        words: the word of each unit.
        scheme: the scheme of the learned tags; None if tags do not mark entities.
    """
    full = full_words(row["tokens"])
    tags, places = [row["tags"][word] for word in full], np.searchsorted(full, words)
    if scheme is None:
        return [tags[place] for place in places]
    entities = []
    for entity in entities_of(tags):
        first, end = np.searchsorted(places, [entity.first, entity.end]).tolist()
        entities += [Entity(entity.type, first, end)] if end > first else []
    is_later = np.append(False, words[1:] == words[:-1])
    return [
        None if later and tag == OUTSIDE else tag
        for tag, later in zip(tags_of(entities, len(words), scheme), is_later, strict=False)
    ]


def in_words(
    tagged: Tagged, marks: str, *, of_entities: bool, begin_within: bool = False
) -> Tagged:
    """Join the parts of a text to words. Parts are joined at `marks` within words, and if there is
    no white space between them and they belong to the same entity or have the same tag. The tag of
    a word is that of its first part, as for words that a row names.

    Args:
        marks: the punctuation marks that may stand within words.
        of_entities: whether the tags mark entities.
        begin_within: whether an entity may begin right after another of its type, so that parts are
            joined only as far as their tags say.
    """
    goes_on = in_one_word(tagged.text, tagged.spans)
    inner, tags = is_inner(tagged.text, tagged.spans, marks), list(tagged.tags)
    for place in np.flatnonzero(goes_on):
        if inner[place]:
            tags[place] = tags[place - 1]
            continue
        before, tag = tags[place - 1 : place + 1]
        if of_entities:
            goes_on[place] = OUTSIDE not in (before, tag) and type_of(before) == type_of(tag)
            if begin_within:
                goes_on[place] &= len(entities_of([before, tag])) == 1
        else:
            goes_on[place] = before == tag
    firsts = np.flatnonzero(~goes_on)
    lasts = np.append(firsts, len(goes_on))[1:] - 1
    return Tagged(
        tagged.text,
        np.stack([tagged.spans[firsts, 0], tagged.spans[lasts, 1]], axis=1),
        [tagged.tags[place] for place in firsts],
        tagged.shares[firsts],
    )


def entity_answers(
    tagged: Tagged, ignored: Sequence[str], *, of_entities: bool
) -> list[dict[str, Any]]:
    """Return the entities of a text, each scored by the mean of its words' scores.

    As in transformers, the name of an entity is the part of its first tag after the hyphen. A type
    may itself be called `O`: it is kept even if the tag `O` is ignored.

    Args:
        ignored: names to leave out.
        of_entities: whether the tags mark entities.
    """
    entities = (entities_of if of_entities else runs_of)(tagged.tags)
    tags = [tagged.tags[entity.first] for entity in entities]
    names = [NAMELESS if of_entities and tag in PREFIXES else tag.split("-", 1)[-1] for tag in tags]
    left_out = {*ignored} - ({OUTSIDE} if of_entities else set())
    return [
        _answer(tagged, entity.first, entity.end, "entity_group", name)
        for entity, name in zip(entities, names, strict=True)
        if name not in left_out
    ]


def word_answers(tagged: Tagged, ignored: Sequence[str]) -> list[dict[str, Any]]:
    return [
        _answer(tagged, place, place + 1, "entity", tag)
        for place, tag in enumerate(tagged.tags)
        if tag not in ignored
    ]


def _answer(tagged: Tagged, first: int, end: int, key: str, label: str) -> dict[str, Any]:
    start, stop = int(tagged.spans[first, 0]), int(tagged.spans[end - 1, 1])
    shares = tagged.shares[first:end]
    shares = shares[~np.isnan(shares)]
    return {
        key: label,
        "score": float(shares.mean()) if len(shares) else 0.0,
        "word": tagged.text[start:stop],
        "start": start,
        "end": stop,
    }


def marks_of_row(row: Row, spans: Spans, *, of_entities: bool) -> set[Mark]:
    """Return the entities, or words, that the row's tags mark, with their characters. Words that
    are empty after normalisation are left out."""
    full = full_words(row["tokens"])
    tags, spans = [row["tags"][place] for place in full], spans[full]
    if of_entities:
        return {
            (name_of(entity.type), int(spans[entity.first, 0]), int(spans[entity.end - 1, 1]))
            for entity in entities_of(tags)
        }
    return {(tag, start, end) for tag, (start, end) in zip(tags, spans.tolist(), strict=True)}


def mark_of(answer: Mapping[str, Any], *, of_entities: bool) -> Mark:
    """Return the type and the characters of an entity, or word, in an answer."""
    return answer["entity_group" if of_entities else "entity"], answer["start"], answer["end"]


def marks_of_answer(answer: Sequence[Mapping[str, Any]], *, of_entities: bool) -> set[Mark]:
    return {mark_of(part, of_entities=of_entities) for part in answer}


def with_words_left_out(marks: set[Mark], row: Row, spans: Spans) -> set[Mark]:
    """Return the marks of all words of a row. Words that an answer leaves out get the tag `O`.

    Args:
        marks: those of the answer.
    """
    by_start = {start: (tag, start, end) for tag, start, end in marks}
    words = spans[full_words(row["tokens"])].tolist()
    return {by_start.get(start, (OUTSIDE, start, end)) for start, end in words}


def words_with_their_tags(annotated: set[Mark], predicted: set[Mark], text: str) -> set[Mark]:
    """Return the annotated words of which every part has the word's tag in the answer."""
    tags = np.full(len(text), OUTSIDE, dtype=object)
    for tag, start, end in predicted:
        tags[start:end] = tag
    parts = {mark: parts_of(text[mark[1] : mark[2]]) + mark[1] for mark in annotated}
    return {
        mark
        for mark, of_word in parts.items()
        if all((tags[start:end] == mark[0]).all() for start, end in of_word)
    }


def by_type(marks: set[Mark], places: Mapping[str, int]) -> Int[np.ndarray, "types_1"]:
    """Return the number of marks of each type; the last number counts all types that are not in
    `places`.

    Args:
        places: type → its index in the result.
    """
    counts = np.zeros(len(places) + 1, dtype=np.int64)
    for kind, _, _ in marks:
        counts[places.get(kind, -1)] += 1
    return counts
