"""Entities from tags, tags from entities, and how many entities are right. Pure functions.

Entities are read as conlleval reads them (Tjong Kim Sang and Buchholz 2000): one begins at a `B`,
or where the type differs from the previous one; so an `I` without a `B` begins one too, and nothing
is lost from tags that break their scheme. An `E` ends one, as in conlleval, and so do `S`, `L` and
`U`, which it does not know. One case differs: after an `E`, a `B` of the same type begins another
entity, as in seqeval, where conlleval (version of 2004-01-26) has no rule and goes on with the
first. All schemes are read by this one rule, so no entity changes if a scheme is recognised wrongly
or several fit.

Tags may be a prefix alone, `B`, `I` and `O`: entities of one type without a name.
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
    """Whether these tags mark entities by prefixes alone; `S` and `O`, say, may be anything."""
    return {*tags} <= {OUTSIDE, *PREFIXES} and not {"B", "I"}.isdisjoint(tags)


def type_of(tag: str) -> str:
    """The type in a tag of an entity; empty if it has no name, and for `O`."""
    return tag.partition("-")[2]


def types_of(tags: Iterable[str]) -> set[str]:
    """The types in tags of entities."""
    return {type_of(tag) for tag in tags if tag != OUTSIDE}


def tag_of(prefix: str, kind: str) -> str:
    """The tag of an entity's word."""
    return f"{prefix}-{kind}" if kind else prefix


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The entities in the tags of a sentence, ascending, whatever the scheme."""
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
    """The tags of a sentence of `words` words in a scheme: the inverse of `entities_of`.

    Args:
        entities: ascending, none within another.
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
    """The scheme that a model with these entity labels writes.

    Only IOB1 lacks `B-` for types that never directly follow an entity of the same type.
    """
    prefixes = {label.partition("-")[0] for label in labels}
    if prefixes & {"L", "U"}:
        return "BILOU"
    if prefixes & {"E", "S"}:
        return "BIOES"
    begin = {tag_of("B", kind) for kind in types_of(labels)}
    return "BIO" if begin <= {*labels} else "IOB1"


def runs_of(tags: Sequence[str]) -> list[Entity]:
    """The entities in tags of which some or all are of no scheme; neighbours with one such tag are
    one, as in transformers."""
    return entities_of([tag if is_of_entity(tag) else f"I-{tag}" for tag in tags])


def name_of(kind: str) -> str:
    """The name of a type in answers."""
    return kind or NAMELESS


def breaks(tags: Sequence[str], scheme: Scheme) -> int:
    """How many tags of a sentence differ from those that the scheme has for its entities."""
    written = tags_of(entities_of(tags), len(tags), scheme)
    return sum(tag != other for tag, other in zip(tags, written, strict=True))


def recognised(
    sentences: Iterable[Sequence[str]], usual: Scheme | None = None
) -> tuple[Scheme, int]:
    """The scheme that the fewest tags break, and how many do.

    Args:
        usual: preferred among schemes that fit equally well; otherwise the first of them in the
            order of `SCHEMES` is taken.
    """
    sentences = list(sentences)
    counts = {scheme: sum(breaks(tags, scheme) for tags in sentences) for scheme in SCHEMES}
    best = min(SCHEMES, key=lambda scheme: (counts[scheme], scheme != usual))
    return best, counts[best]


def entity_metrics(counts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`precision`, `recall` and `f1` from the counts summed over all rows (conlleval's overall).

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


def entity_metrics_by_type(
    columns: Mapping[str, np.ndarray], types: Sequence[str]
) -> dict[str, dict[str, float]]:
    """`entity_metrics` and `support` (annotated entities) of each type by itself.

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
    """`entity_metrics`; `surface_f1` over distinct entities (WNUT 2017); and those of plain texts
    as `text_…`.

    Args:
        columns: counts of entities; `surfaces` and `wanted_surfaces`, a set of entities per row;
            counts in plain texts, if there are any, as `text_correct` and so on.
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
    """The share of words with the right tag, and that in plain texts as `text_accuracy`.

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
    """How many entities of each row are wrong; one predicted instead of another counts once.

    Args:
        columns: `correct`, `predicted` and `wanted`, (rows, types).
    """
    correct, predicted, expected = (
        columns[name].sum(axis=1) for name in ("correct", "predicted", "wanted")
    )
    return np.maximum(predicted, expected) - correct
