"""Entities from tags, tags from entities, and how many entities are right. Pure functions.

Entities are read as conlleval reads them (Tjong Kim Sang and Buchholz 2000): an entity begins at a
`B`, or where the type changes; so an `I` without a `B` begins an entity too, and nothing is lost
from tags that break their scheme. An `E` ends an entity, as in conlleval, and so do `S`, `L` and
`U`, which conlleval does not know. One case differs: after an `E`, a `B` of the same type begins
another entity, as in seqeval; conlleval (version of 2004-01-26) has no rule for it and continues
the first. All schemes are read by this same rule, so the entities do not change if a scheme is
recognised wrongly or several fit.

Tags may consist of a prefix only, `B`, `I` and `O`: entities of a single type without a name.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int

OUTSIDE = "O"
Scheme = Literal["BIO", "IOB1", "BIOES", "BILOU"]
"""How tags mark the words of an entity.

BIO (also IOB2): `B-` on the first word, `I-` on the others. IOB1, as CoNLL-2003 is published: `I-`
on all, except `B-` on the first if another entity of the same type ends right before it. BIOES
(also IOBES): BIO with `E-` on the last of several words, and `S-` on a single one. BILOU: the same
with `L-` and `U-`.
"""
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
PREFIXES = ("B", "I", "E", "S", "L", "U")
NAMELESS = "_"
"""The name that answers and figures give to the type without one, as seqeval does."""


class Entity(NamedTuple):
    """A type, and the tokens it spans."""

    type: str
    """Empty if it has no name."""
    first: int
    end: int
    """The token after the last."""


def is_of_entity(tag: str) -> bool:
    """Whether a tag belongs to any of the schemes: `O`, or a prefix and a type."""
    return tag == OUTSIDE or (tag[:1] in PREFIXES and tag[1:2] == "-" and len(tag) > 2)


def are_nameless(tags: Collection[str]) -> bool:
    """Whether these tags mark entities with prefixes only. They must include `B` or `I`: `S` and
    `O` may be something else."""
    return {*tags} <= {OUTSIDE, *PREFIXES} and not {"B", "I"}.isdisjoint(tags)


def type_of(tag: str) -> str:
    """Return the type in a tag of an entity; empty if it has no name, and for `O`."""
    return tag.partition("-")[2]


def types_of(tags: Iterable[str]) -> set[str]:
    """Return the types in tags of entities, without that of `O`."""
    return {type_of(tag) for tag in tags if tag != OUTSIDE}


def tag_of(prefix: str, kind: str) -> str:
    """Return the tag of a word in an entity of type `kind`, which may be empty."""
    return f"{prefix}-{kind}" if kind else prefix


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """Return the entities in the tags of a sentence, ascending, whatever the scheme."""
    entities: list[Entity] = []
    open_type, first, ended = None, 0, True
    for place, tag in enumerate([*tags, OUTSIDE]):
        prefix, _, kind = tag.partition("-")
        inside = prefix != OUTSIDE and bool(tag)
        begins = inside and (prefix in "BSU" or kind != open_type or ended)
        if open_type is not None and (begins or not inside):
            entities.append(Entity(open_type, first, place))
            open_type = None
        if begins:
            open_type, first = kind, place
        ended = prefix in "ESLU"
    return entities


def tags_of(entities: Iterable[Entity], words: int, scheme: Scheme) -> list[str]:
    """Return the tags of a sentence of `words` words in a scheme: the inverse of `entities_of`.

    Args:
        entities: ascending and not overlapping.
    """
    tags = [OUTSIDE] * words
    before = None
    for entity in entities:
        inner = entity.end - entity.first - 1
        touches = before is not None and (before.type, before.end) == (entity.type, entity.first)
        if scheme == "IOB1":
            prefixes = ("B" if touches else "I") + "I" * inner
        elif scheme == "BIO":
            prefixes = "B" + "I" * inner
        else:
            last, single = ("E", "S") if scheme == "BIOES" else ("L", "U")
            prefixes = "B" + "I" * (inner - 1) + last if inner else single
        tags[entity.first : entity.end] = [tag_of(prefix, entity.type) for prefix in prefixes]
        before = entity
    return tags


def scheme_of(labels: Sequence[str]) -> Scheme:
    """Return the tag scheme of a model with these entity labels.

    If a type has no `B-` label, it is IOB1, which uses `B-` only directly after an entity of the
    same type.
    """
    prefixes = {label.partition("-")[0] for label in labels}
    if prefixes & {"L", "U"}:
        return "BILOU"
    if prefixes & {"E", "S"}:
        return "BIOES"
    begin = {tag_of("B", kind) for kind in types_of(labels)}
    return "BIO" if begin <= {*labels} else "IOB1"


def runs_of(tags: Sequence[str]) -> list[Entity]:
    """Return the entities in tags of which some or all belong to no scheme. Adjacent words with the
    same such tag form one entity, as in transformers."""
    return entities_of([tag if is_of_entity(tag) else f"I-{tag}" for tag in tags])


def name_of(kind: str) -> str:
    """Return the name of a type in answers; `NAMELESS` if it has none."""
    return kind or NAMELESS


def breaks(tags: Sequence[str], scheme: Scheme) -> int:
    """Count the tags of a sentence that differ from those that the scheme has for its entities."""
    written = tags_of(entities_of(tags), len(tags), scheme)
    return sum(tag != other for tag, other in zip(tags, written, strict=True))


def recognised(
    sentences: Iterable[Sequence[str]], usual: Scheme | None = None
) -> tuple[Scheme, int]:
    """Return the scheme that the fewest tags break, and how many tags break it.

    Args:
        usual: the scheme to prefer among those that fit equally well; otherwise the first of them
            in the order of `SCHEMES` is taken.
    """
    sentences = list(sentences)
    counts = {scheme: sum(breaks(tags, scheme) for tags in sentences) for scheme in SCHEMES}
    best = min(SCHEMES, key=lambda scheme: (counts[scheme], scheme != usual))
    return best, counts[best]


def entity_metrics(counts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return `precision`, `recall` and `f1` from the counts summed over all rows (conlleval's
    overall figures).

    Args:
        counts: `correct`, `predicted` and `wanted` entities per row.
    """
    correct, predicted, expected = (
        int(counts[name].sum()) for name in ("correct", "predicted", "wanted")
    )
    precision = correct / predicted if predicted else 0.0
    recall = correct / expected if expected else 0.0
    both = precision + recall
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / both if both else 0.0,
    }


def partial_metrics(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return `partial_precision`, the share of the predicted spans that overlap an annotated one of
    the same label, `partial_recall`, the share of the annotated ones that a predicted one overlaps,
    and their harmonic mean.

    Args:
        columns: `predicted` and `wanted` spans, and of them those that overlap, `touching` and
            `touched`.
    """
    precision, recall = (
        float(columns[part].sum() / max(1, columns[whole].sum()))
        for part, whole in (("touching", "predicted"), ("touched", "wanted"))
    )
    both = precision + recall
    f1 = 2 * precision * recall / both if both else 0.0
    return {"partial_precision": precision, "partial_recall": recall, "partial_f1": f1}


def entity_metrics_by_type(
    columns: Mapping[str, np.ndarray], types: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return `entity_metrics` and `support` (the number of annotated entities) of each type.

    Args:
        columns: `correct`, `predicted` and `wanted`, (rows, types).
    """
    names = ("correct", "predicted", "wanted")
    return {
        kind: {
            **entity_metrics({name: columns[name][:, place] for name in names}),
            "support": int(columns["wanted"][:, place].sum()),
        }
        for place, kind in enumerate(types)
    }


def tagged_entity_metrics(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return `entity_metrics`, `surface_f1` over distinct entities (WNUT 2017), and the
    `entity_metrics` of plain texts as `text_…`.

    Args:
        columns: counts of entities as in `entity_metrics`; `surfaces` and `wanted_surfaces`, a set
            of entities per row; counts in plain texts, if there are any, as `text_correct` and so
            on.
    """
    found, wanted = (set().union(*columns[name]) for name in ("surfaces", "wanted_surfaces"))
    different = {"correct": len(found & wanted), "predicted": len(found), "wanted": len(wanted)}
    surfaces = entity_metrics({name: np.array([count]) for name, count in different.items()})
    plain = _of_plain_texts(columns)
    of_plain = entity_metrics(plain) if plain else {}
    return {
        **entity_metrics(columns),
        "surface_f1": surfaces["f1"],
        **{f"text_{name}": value for name, value in of_plain.items()},
    }


def tag_accuracy(columns: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the share of words with the right tag as `accuracy`, and that in plain texts as
    `text_accuracy`.

    Args:
        columns: counts of words, named as those of `tagged_entity_metrics`.
    """
    plain = _of_plain_texts(columns)
    return {
        name: float(counts["correct"].sum() / max(1, counts["wanted"].sum()))
        for name, counts in (("accuracy", columns), ("text_accuracy", plain))
        if counts
    }


def _of_plain_texts(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    prefix = "text_"
    return {
        name.removeprefix(prefix): values
        for name, values in columns.items()
        if name.startswith(prefix)
    }


def misplaced(columns: Mapping[str, np.ndarray]) -> Int[np.ndarray, "rows"]:
    """Return the number of wrong entities of each row. An entity predicted instead of another
    counts once.

    Args:
        columns: `correct`, `predicted` and `wanted`, (rows, types).
    """
    correct, predicted, expected = (
        columns[name].sum(axis=1) for name in ("correct", "predicted", "wanted")
    )
    return np.maximum(predicted, expected) - correct
