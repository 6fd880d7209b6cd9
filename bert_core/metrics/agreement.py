"""How far annotators agree, beyond what chance would give. Pure functions of nominal labels.

Cohen's kappa is for two annotators of the same items, Fleiss' for items with equally many labels,
Krippendorff's alpha for any number of annotators and missing labels.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import chain

Labels = Sequence[Sequence[Hashable]]
"""The labels of each item, one for each annotator who gave one; of Cohen's two in their order."""


def cohen_kappa(labels: Labels) -> float:
    """Return Cohen's kappa (1960): 1 for full agreement, 0 for that of chance; NaN if both
    annotators only ever use one label.

    Args:
        labels: two per item, the same annotator's first.
    """
    first, second = Counter(one for one, _ in labels), Counter(other for _, other in labels)
    observed = sum(one == other for one, other in labels) / len(labels)
    expected = sum(count * second[label] for label, count in first.items()) / len(labels) ** 2
    return _beyond_chance(observed, expected)


def fleiss_kappa(labels: Labels) -> float:
    """Return Fleiss' kappa (1971); NaN if all labels are the same.

    Args:
        labels: equally many per item, at least two.
    """
    (raters,) = {len(item) for item in labels}
    agreeing = sum(_pairs(item) for item in labels)
    observed = agreeing / (len(labels) * raters * (raters - 1))
    shares = Counter(chain.from_iterable(labels))
    expected = sum((count / (len(labels) * raters)) ** 2 for count in shares.values())
    return _beyond_chance(observed, expected)


def krippendorff_alpha(labels: Labels) -> float:
    """Return Krippendorff's alpha for nominal labels (2011); NaN if all labels are the same, or no
    item has two.

    Args:
        labels: any number per item; an item with fewer than two says nothing.
    """
    paired = [item for item in labels if len(item) > 1]
    shares = Counter(chain.from_iterable(paired))
    total = shares.total()
    if total < 2:
        return float("nan")
    observed = sum(_pairs(item) / (len(item) - 1) for item in paired) / total
    expected = sum(count * (count - 1) for count in shares.values()) / (total * (total - 1))
    return _beyond_chance(observed, expected)


def _pairs(item: Sequence[Hashable]) -> int:
    """Return the number of ordered pairs of equal labels of an item."""
    return sum(count * (count - 1) for count in Counter(item).values())


def _beyond_chance(observed: float, expected: float) -> float:
    return float("nan") if expected == 1 else (observed - expected) / (1 - expected)
