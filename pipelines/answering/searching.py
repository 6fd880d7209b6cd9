"""Searches a retrieval set with a model's vectors in several forms, and with BM25 beside them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from bert_core.checks import PositiveInt, check_fields
from bert_core.errors import ConfigError
from bert_core.metrics.judged import (
    SHOWN,
    batches_of,
    first_of,
    id_order,
    judged_columns,
    judged_metrics,
    ranks_of_judged,
)
from bert_core.metrics.vector_forms import FULL, Form, Quantized, forms_of
from bert_core.tasks.searching import Searching
from pipelines.answering.bm25 import NAME as BM25
from pipelines.answering.bm25 import Language, bm25_scores

if TYPE_CHECKING:
    from bert_core.tasks.base import Task
    from bert_core.tasks.searching import Matrix
    from pipelines.corpus.retrieval_sets import RetrievalSet

NEAREST = 10
"""Documents that are kept of each query."""
Scores = Callable[[slice], Float[np.ndarray, "queries documents"]]
"""Scores of some queries with all documents."""


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """How the documents of a retrieval set are searched."""

    quantized: tuple[Quantized, ...] = ("int8", "binary")
    """Forms in which vectors are also searched: `int8` stores the documents in 8 bits per number,
    `binary` compares the signs."""
    dimensions: tuple[PositiveInt, ...] = ()
    """Lengths to which vectors are also cut, besides those that the model was trained for."""
    bm25: Language | None = "english"
    """Language of the stemmer with which BM25 searches, to compare; null leaves BM25 out."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="retrieval.")


class Hit(NamedTuple):
    """A document near a query."""

    place: int
    score: float


@dataclass(frozen=True)
class Searched:
    """What one form finds."""

    form: str
    bytes_per_vector: float | None
    """None for BM25; the mean of sparse vectors, at 8 bytes per entry."""
    columns: dict[str, np.ndarray]
    """A column per metric, with an entry per query."""
    ranks: list[np.ndarray]
    """The rank of each relevant document of each query."""
    nearest: list[list[Hit]]
    """The first `NEAREST` documents of each query."""

    @property
    def metrics(self) -> dict[str, float]:
        return judged_metrics(self.columns)


def search(
    retrieval_set: "RetrievalSet", documents: "Matrix", queries: "Matrix", config: RetrievalConfig,
    trained: Sequence[int] = (),
) -> Iterator[Searched]:  # fmt: skip
    """Yield what each form finds, the full vectors first and BM25 last.

    Args:
        trained: lengths to which the model's vectors may be cut.
    """
    if isinstance(documents, np.ndarray):
        for make in forms_of(documents, queries, config.quantized, {*trained, *config.dimensions}):
            form = make()
            yield _searched(retrieval_set, form.name, form.bytes_per_vector, _dense(form))
    else:
        bytes_per_vector = 8 * documents.nnz / documents.shape[0]
        yield _searched(
            retrieval_set,
            FULL,
            bytes_per_vector,
            lambda batch: (queries[batch] @ documents.T).toarray(),
        )
    if config.bm25 is not None:
        scores = bm25_scores(retrieval_set.documents, retrieval_set.queries, config.bm25)
        yield _searched(
            retrieval_set,
            BM25,
            None,
            lambda batch: np.stack([scores(query) for query in range(batch.start, batch.stop)]),
        )


def _dense(form: Form) -> Scores:
    return lambda batch: form.queries[batch] @ form.documents.T


def _searched(
    retrieval_set: "RetrievalSet", form: str, bytes_per_vector: float | None, scores: Scores
) -> Searched:
    ids, judgements = retrieval_set.document_ids, retrieval_set.judgements
    order = id_order(ids)
    ranks: list[np.ndarray] = []
    nearest: list[list[Hit]] = []
    for batch in batches_of(len(judgements), len(ids)):
        for row, judged in zip(scores(batch), judgements[batch], strict=True):
            ranks.append(ranks_of_judged(row, judged.places, order))
            first = first_of(row, order, NEAREST)
            pairs = zip(first.tolist(), row[first].tolist(), strict=True)
            nearest.append([Hit(*pair) for pair in pairs])
    return Searched(form, bytes_per_vector, judged_columns(ranks, judgements), ranks, nearest)


def check_searches(task: "Task", source: str) -> None:
    """Raise ConfigError unless the answers of the task are vectors."""
    if not isinstance(task, Searching):
        raise ConfigError(
            f"held_out.source: wanted labelled rows for {task.name}, got {source}, which has a "
            "corpus, queries and qrels: give such rows, or, for the model's vectors, "
            "--task feature-extraction"
        )


def check_dimensions(config: RetrievalConfig, size: int | None) -> None:
    """Raise ConfigError for a length that is not below that of the vectors.

    Args:
        size: their length; None for sparse vectors, which are not cut.
    """
    for length in config.dimensions:
        if size is None:
            raise ConfigError(
                f"retrieval.dimensions: wanted none for sparse vectors, got {length}: leave it out"
            )
        if length >= size:
            raise ConfigError(
                f"retrieval.dimensions: wanted lengths below {size}, that of the model's vectors, "
                f"got {length}: leave it out"
            )


def table_of(found: Sequence[Searched]) -> list[str]:
    """Return the lines of a table with a row per form."""
    rows = [["", "bytes", *(name.replace("_at_", "@") for name in SHOWN)]]
    for each in found:
        size = "" if each.bytes_per_vector is None else f"{each.bytes_per_vector:,.0f}"
        metrics = each.metrics
        rows.append([each.form, size, *(f"{metrics[name]:.4f}" for name in SHOWN)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]


def as_json(found: Sequence[Searched]) -> list[dict[str, Any]]:
    """Return the table with every metric, for a file."""
    return [
        {"form": each.form, "bytes_per_vector": each.bytes_per_vector, "metrics": each.metrics}
        for each in found
    ]
