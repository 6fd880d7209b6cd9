"""Finds changes of a model's answers, besides their numbers, that clients must know of.

Answers of two versions always differ in numbers. But a client's code may not know new labels, and
vectors of two versions cannot be compared, so that an index must be made again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.sparse_embedding import SparseEmbedding
from bert_core.wording import shortened

Change = Literal["labels", "vectors"]
VECTOR_TASKS = frozenset({FeatureExtraction.name, SparseEmbedding.name})
VECTORS_NOTE = (
    "vectors of different versions cannot be compared: keep their space (X-Vector-Space) with an "
    "index, and make it again when that changes"
)


@runtime_checkable
class Version(Protocol):
    """The parts of a loaded model that matter here."""

    digest: str
    task: Task
    predictors: Mapping[str, Any]

    @property
    def version_label(self) -> str: ...


def change_between(former: Version, model: Version) -> Change | None:
    """Return the kind of change in the answers; None if only numbers changed."""
    if former.digest == model.digest:
        return None
    if former.task.labels != model.task.labels:
        return "labels"
    return "vectors" if gives_vectors(model) and gives_vectors(former) else None


def gives_vectors(model: Version) -> bool:
    return not VECTOR_TASKS.isdisjoint(model.predictors)


def told(change: Change, former: Version, model: Version) -> str:
    """Return the change in words."""
    if change == "labels":
        other = difference(former.task.labels, model.task.labels)
        return f"{model.version_label} has other labels than {former.version_label}: {other}"
    return (
        f"vectors of {model.version_label} cannot be compared with those of "
        f"{former.version_label}: make indexes again"
    )


def difference(before: Sequence[str], after: Sequence[str]) -> str:
    """Return the difference between two lists of labels, in words."""
    parts = [
        f"{what} {shortened(', '.join(labels))}"
        for what, labels in (
            ("without", [label for label in before if label not in after]),
            ("with", [label for label in after if label not in before]),
        )
        if labels
    ]
    return " and ".join(parts) or "the same in another order"
