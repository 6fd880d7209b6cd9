"""The official metric of relations between two marked spans: a pure function of label ids."""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

_DIRECTED = re.compile(r"(.+)\((?:e1,e2|e2,e1)\)")


def relation_f1(
    predicted: Int[np.ndarray, "rows *labels"],
    wanted: Int[np.ndarray, "rows *labels"],
    labels: Sequence[str],
    none: str | None,
) -> float:
    """Return macro-F1 over the relations, of which `Cause-Effect(e1,e2)` and `Cause-Effect(e2,e1)`
    are one: a relation is right if its direction is too, and counts as predicted whatever its
    direction. The official score of SemEval-2010 task 8 (Hendrickx et al. 2010, section 5: nine-way
    evaluation with directionality), in 0 to 1.

    Args:
        predicted: the label of each row, -1 if it is another one; or 1 for each of several labels.
        wanted: likewise.
        none: the label of pairs without a relation, which is none of the relations.
    """
    predicted, wanted = (
        each if each.ndim > 1 else (each[:, None] == np.arange(len(labels))).astype(np.int64)
        for each in (predicted, wanted)
    )
    places: dict[str, list[int]] = {}
    for place, label in enumerate(labels):
        if label != none:
            match = _DIRECTED.fullmatch(label)
            places.setdefault(match[1] if match else label, []).append(place)
    scores = []
    for of_relation in places.values():
        ours, theirs = predicted[:, of_relation], wanted[:, of_relation]
        both = ours.sum() + theirs.sum()
        scores.append(2 * (ours * theirs).sum() / both if both else 0.0)
    return float(np.mean(scores)) if scores else 0.0
