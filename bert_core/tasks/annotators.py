"""Records of several annotators of the same texts: which of them are taken, and how far their
labels agree. Pure: no files.

Readers of formats with annotators name them in the column `annotator`, and the task that they
worked on in `item`.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from bert_core.data.labelled.lines import Record, with_labels
from bert_core.data.words import parts_of
from bert_core.metrics.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha

EACH, MAJORITY = "each", "majority"
TIED = "without a majority"


@dataclass
class Taken:
    """What is taken of the records."""

    records: list[Record | None]
    """Each record, or what is read in its place; None for one that is left out."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Why records are left out → how many; those that a majority stands for are not counted."""


def items_of(records: Sequence[Record], texts: Sequence[str]) -> list[list[int]]:
    """Return the places of the records of each item that several annotators labelled.

    Args:
        texts: the text of each record, which tells items of the same number in two files apart.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for place, (record, text) in enumerate(zip(records, texts, strict=True)):
        if record.get("annotator") is not None and record.get("item") is not None:
            places.setdefault((f"{record['item']}", text), []).append(place)
    return [
        item for item in places.values() if len({records[place]["annotator"] for place in item}) > 1
    ]


def names_of(records: Sequence[Record]) -> list[str]:
    """Return the names of all annotators, those with most records first."""
    names = Counter(
        str(each) for record in records if (each := record.get("annotator")) is not None
    )
    return [name for name, _ in names.most_common()]


def taken_of(records: Sequence[Record], items: Sequence[Sequence[int]], choice: str) -> Taken:
    """Return the records that a choice takes.

    A majority is more than half of an item's annotators, for each span and each of several labels;
    where each record has one label, the most frequent, if there is only one such.

    Args:
        items: as `items_of` returns them.
        choice: `EACH`, `MAJORITY`, or the name of an annotator, whose records alone are taken.
    """
    if choice == EACH:
        return Taken([*records])
    if choice != MAJORITY:
        own = [record if str(record.get("annotator")) == choice else None for record in records]
        others = sum(record is None for record in own)
        return Taken(own, Counter({"of other annotators": others} if others else {}))
    found = Taken([*records])
    for item in items:
        last_of = {str(records[place]["annotator"]): place for place in item}
        agreed = _agreed([records[place] for place in last_of.values()])
        for place in item:
            found.records[place] = None
        found.records[item[0]] = agreed
        found.left_out[TIED] += agreed is None
    return found


def _agreed(records: Sequence[Record]) -> Record | None:
    """Return the first record with what most annotators say; None if no single label has most."""
    agreed = dict(records[0])
    if all(isinstance(record.get("label"), str) for record in records):
        label = _most_frequent([record["label"] for record in records])
        if label is None:
            return None
        said = next(record for record in records if record["label"] == label)
        agreed |= {name: said[name] for name in ("label", "labels") if name in said}
    elif "labels" in agreed:
        labels = _by_more_than_half([record.get("labels") for record in records])
        agreed = with_labels(agreed, labels)
    if "spans" in agreed:
        agreed["spans"] = _by_more_than_half([record.get("spans") for record in records])
    for name in agreed.keys() - {"item", "annotator", "label", "labels", "spans"}:
        cells = [record.get(name) for record in records]
        if all(isinstance(cell, str) for cell in cells):
            agreed[name] = _most_frequent(cells)
    return agreed


def _most_frequent(cells: Sequence[Any]) -> Any:
    """Return the most frequent of these values; None if there are several."""
    (best, count), *others = Counter(cells).most_common(2)
    return None if others and others[0][1] == count else best


def _by_more_than_half(cells: Sequence[Any]) -> list[Any]:
    """Return the items that are in more than half of the lists, in the order of their first."""
    first: dict[Hashable, Any] = {}
    counts = Counter[Hashable]()
    for cell in cells:
        own = {_key(one): one for one in cell or ()}
        counts.update(own.keys())
        first = own | first
    return [one for key, one in first.items() if 2 * counts[key] > len(cells)]


def _key(one: Any) -> Hashable:
    """Return what makes a span, or a label, the same as another."""
    if isinstance(one, Mapping):
        return one.get("start"), one.get("end"), one.get("label")
    return tuple(one) if isinstance(one, list) else one


def agreement(
    records: Sequence[Record], items: Sequence[Sequence[int]], texts: Sequence[str]
) -> str:
    """Return how far annotators agree, for a message: in the labels of texts, and in the spans that
    each part of a word is in; for spans also the F1 of two annotators, averaged over all pairs.

    Args:
        items: as `items_of` returns them, at least one.
        texts: the text of each record.
    """
    by_item = [
        {str(records[place]["annotator"]): records[place] for place in item} for item in items
    ]
    annotators = sorted({name for of in by_item for name in of})
    told = []
    if any(_marks(record) for of in by_item for record in of.values()):
        units = [
            unit
            for of, item in zip(by_item, items, strict=True)
            for unit in _spans_of_parts(of, texts[item[0]])
        ]
        told.append(f"{_figures(units, annotators)}, F1 {_mean_f1(by_item):.3f} for spans")
    labels = [{name: _label(record) for name, record in of.items()} for of in by_item]
    if any(label not in (None, ()) for of in labels for label in of.values()):
        told.append(f"{_figures(labels, annotators)} for labels")
    what = f"{len(annotators)} annotators of {len(items):,} text{'s' * (len(items) > 1)}"
    return f"{what}: {'; '.join(told) or 'no labels'}"


def _label(record: Record) -> Hashable:
    labels = record.get("labels")
    return tuple(sorted(map(str, labels))) if isinstance(labels, list) else record.get("label")


def _marks(record: Record) -> set[tuple[int, int, str]]:
    """Return start, end and label of the spans of a record that have positions."""
    keys = (_key(span) for span in record.get("spans") or ())
    return {
        key
        for key in keys
        if isinstance(key, tuple) and len(key) == 3 and {type(key[0]), type(key[1])} == {int}
    }


def _spans_of_parts(of: Mapping[str, Record], text: str) -> list[dict[str, Hashable]]:
    """Return for each part of a word the labels of the spans that have it, by annotator."""
    parts = parts_of(text)
    found: list[dict[str, Hashable]] = [dict.fromkeys(of, "") for _ in parts]
    for name, record in of.items():
        for start, end, label in sorted(_marks(record)):
            first = int(np.searchsorted(parts[:, 1], start, side="right"))
            for part in found[first : int(np.searchsorted(parts[:, 0], end, side="left"))]:
                part[name] = f"{part[name]} {label}"
    return found


def _mean_f1(by_item: Sequence[Mapping[str, Record]]) -> float:
    shared, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for of in by_item:
        marks = {name: _marks(record) for name, record in of.items()}
        for one, other in combinations(sorted(marks), 2):
            shared[one, other] += 2 * len(marks[one] & marks[other])
            sizes[one, other] += len(marks[one]) + len(marks[other])
    scores = [shared[pair] / size if size else 1.0 for pair, size in sizes.items()]
    return sum(scores) / len(scores)


def _figures(items: Sequence[Mapping[str, Hashable]], annotators: Sequence[str]) -> str:
    """Return alpha, and the kappa that fits: Cohen's for two annotators, Fleiss' for more, if all
    have labelled all items."""
    told = f"Krippendorff's alpha {krippendorff_alpha([[*item.values()] for item in items]):.3f}"
    if any(len(item) < len(annotators) for item in items):
        return told
    ordered = [[item[name] for name in annotators] for item in items]
    if len(annotators) == 2:
        return f"{told}, Cohen's kappa {cohen_kappa(ordered):.3f}"
    return f"{told}, Fleiss' kappa {fleiss_kappa(ordered):.3f}"
