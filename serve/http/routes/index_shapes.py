"""The shapes of a search in an index, of its answer and of the list of indexes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic

from bert_core.indexes.record import Kind
from bert_core.indexes.table import Index
from serve.request.errors import RequestError, TooLargeError
from serve.request.limits import Limits, check_count
from serve.surfaces.base import Body, Count, Texts, check_top_k
from serve.surfaces.openapi import remember

RERANKED = 50
"""Rows of a search that a ranker reads, unless a request says otherwise."""


class IndexSearch(Body):
    """Texts or vectors to search for, one search each."""

    texts: Texts | None = None
    vectors: Annotated[list[list[float]], pydantic.Field(min_length=1)] | None = None
    space: str | None = None
    """With vectors: what made them, as in the header `X-Vector-Space` of the answer with them."""
    top_k: Count = 10
    filter: dict[str, Any] | None = None
    """Conditions on columns, which must all hold: `{"kind": "guide", "year": {"at_least": 2020}}`.
    A condition is a value, null, a list of values, or an object of `at_least`, `above`, `at_most`,
    `below` and `not`."""
    hybrid: bool = False
    """Search by words too (BM25), and fuse both rankings."""
    rerank: str | None = None
    """Name of a served model for text ranking, which reads the best rows with the text."""
    rerank_rows: Count = RERANKED
    """How many of the best rows it reads, at least `top_k`."""
    columns: list[str] | None = None
    """Columns to return; by default all."""
    prompt_name: str | None = None
    """Prompt for the texts; by default the model's own for queries."""

    @property
    def rows_per_search(self) -> int:
        """How many rows are searched for: those that are wanted, or that a ranker reads."""
        return self.top_k if self.rerank is None else max(self.top_k, self.rerank_rows)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A row that was found, with its scores by each step."""

    id: int
    score: float
    """The last step's: the ranker's, the sum of reciprocal ranks, or the cosine."""
    cosine: float | None
    bm25: float | None
    row: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class IndexAnswer:
    """The nearest rows of every text or vector, best first."""

    index: str
    space: str
    results: list[list[Found]]


@dataclass(frozen=True, kw_only=True)
class IndexCard:
    """An index, or a version of one."""

    id: str
    object: str = "index"
    digest: str
    space: str
    """Digest of what made its vectors."""
    model_digest: str
    """The bundle that made them."""
    rows: int
    dimensions: int
    kind: Kind
    recall: float
    columns: list[str]
    text: str | None
    """The column whose words are searched."""


@dataclass(frozen=True, kw_only=True)
class IndexList:
    """The indexes that are served."""

    object: str = "list"
    data: list[IndexCard]


remember(IndexList)
Indexes = Mapping[str, Sequence[Index]]
"""The versions of each index by its name."""


def card_of(name: str, index: Index) -> IndexCard:
    record = index.record
    return IndexCard(
        id=name,
        digest=index.digest,
        space=index.space,
        model_digest=record.vectors.space.model,
        rows=record.rows,
        dimensions=record.vectors.space.dimensions,
        kind=record.kind,
        recall=record.recall,
        columns=record.columns,
        text=record.text,
    )


def check(asked: IndexSearch, limits: Limits) -> None:
    """Check what the fields of a search say together. Raises: RequestError, TooLargeError."""
    if (asked.texts is None) == (asked.vectors is None):
        got = "neither" if asked.texts is None else "both"
        raise RequestError(f"the body: wanted one of texts and vectors, got {got}")
    if asked.vectors is not None:
        if asked.space is None:
            raise RequestError(
                "space: wanted what made the vectors, got none: send the header X-Vector-Space of "
                "the answer that they came with"
            )
        for field in ("hybrid", "rerank", "prompt_name"):
            if getattr(asked, field):
                raise RequestError(f"{field}: wanted none with vectors, which have no words")
    check_count(asked.texts or asked.vectors or [], limits)
    check_top_k({"top_k": asked.top_k}, limits)
    texts, rows = len(asked.texts or asked.vectors or []), asked.rows_per_search
    if asked.rerank is not None and texts * rows > limits.max_inputs:
        raise TooLargeError(
            f"rerank_rows: wanted at most {limits.max_inputs} rows of all texts, got {rows} for "
            f"each of {texts}: ask for fewer, or send several requests"
        )
    if texts * rows > limits.max_candidates:
        raise TooLargeError(
            f"top_k: wanted at most {limits.max_candidates} rows of all searches, got {rows} for "
            f"each of {texts}: ask for fewer, or send several requests"
        )
