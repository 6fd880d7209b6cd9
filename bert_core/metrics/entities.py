"""Entities in tags, and how many of them are right. Pure functions.

An entity is read off tags as conlleval reads it (Tjong Kim Sang and Buchholz 2000): it begins at a
`B`, or where the type is another one than before; so `I` without a `B` begins one too (IOB1), and
nothing is lost of tags that break their scheme. `E` and `S`, which conlleval has not, end one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Entity(NamedTuple):
    """A type, and the tokens it spans."""

    type: str
    first: int
    end: int
    """The token after the last."""


def entities_of(tags: Sequence[str]) -> list[Entity]:
    """The entities in the tags of a sentence, in IOB1, BIO (IOB2) or BIOES (IOBES, BILOU)."""
    found: list[Entity] = []
    open_type, first, ended = None, 0, True
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        inside = prefix != "O" and bool(tag)
        begins = inside and (prefix in "BSU" or kind != open_type or ended)
        if open_type is not None and (begins or not inside):
            found.append(Entity(open_type, first, place))
            open_type = None
        if begins:
            open_type, first = kind, place
        ended = prefix in "ESLU"
    return found


def breaks(tags: Sequence[str]) -> int:
    """How many tags continue an entity that has not begun: `I` or `E` after `O` or another type."""
    count, before = 0, "O"
    for tag in tags:
        prefix, _, kind = tag.partition("-")
        open_before = before[:1] in ("B", "I") and before[2:] == kind
        count += prefix in ("I", "E", "L") and not open_before
        before = tag
    return count


def entity_metrics(counts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """`precision`, `recall` and `f1` of the counts of all rows added (conlleval's overall).

    Args:
        counts: `correct`, `predicted` and `wanted` entities of each row.
    """
    correct, predicted, wanted = (
        int(counts[name].sum()) for name in ("correct", "predicted", "wanted")
    )
    precision = correct / predicted if predicted else 0.0
    recall = correct / wanted if wanted else 0.0
    both = precision + recall
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / both if both else 0.0,
    }
