"""Cohere's and Jina's reranking and embedding, as their clients and Open WebUI call them.

`return_documents` is Jina's; Cohere's clients ignore what it adds.
"""

import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from fastapi import Response

from serve.answers import Answered
from serve.errors import RequestError
from serve.surfaces import vectors
from serve.surfaces.base import (
    Body,
    Call,
    Count,
    Endpoint,
    Ignored,
    Surface,
    Texts,
    as_bad_request,
)
from serve.surfaces.tei import RANKING, best_first, ranked
from serve.surfaces.vectors import EVEN, VECTORS, vectors_of

PROMPTS = {"search_query": "query", "search_document": "document"}
"""Cohere's `input_type` → name of a sentence-transformers prompt."""

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class Document(Body):
    """A document."""

    text: str


class Rerank(Body):
    """A query and documents."""

    query: str
    documents: Annotated[list[str | Document], pydantic.Field(min_length=1)]
    top_n: Count | None = None
    return_documents: bool = False
    truncation: bool = True
    model: Ignored = None
    user: Ignored = None
    priority: Ignored = None


class Embed(Body):
    """Cohere's request for embeddings."""

    texts: Texts
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Count | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    model: Ignored = None
    priority: Ignored = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A document's score."""

    index: int
    relevance_score: float
    document: dict[Literal["text"], str] | None = None


@dataclass(frozen=True, kw_only=True)
class Reranked:
    """Cohere's and Jina's answer to a request to rank documents."""

    id: str
    model: str
    results: list[Result]
    usage: dict[Literal["total_tokens"], int]
    meta: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """Cohere's answer to a request for embeddings."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[EmbeddingType, list[list[float]] | list[str]]
    texts: list[str]
    meta: dict[str, Any]


async def rerank(call: Call) -> Response:
    """The documents by relevance, best first."""
    request = await call.read(Rerank)
    texts = [item if isinstance(item, str) else item.text for item in request.documents]
    answered = await ranked(call, request.query, texts, {"truncation": request.truncation})

    def content() -> dict[str, Any]:
        results = [
            {"index": index, "relevance_score": score}
            | ({"document": {"text": texts[index]}} if request.return_documents else {})
            for index, score in best_first(answered)[: request.top_n]
        ]
        return {
            "id": str(uuid.uuid4()),
            "model": call.model.name,
            "results": results,
            "usage": {"total_tokens": answered.tokens},
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1},
                **_warnings(answered, "documents"),
            },
        }

    return await call.respond(answered, content)


async def embed(call: Call) -> Response:
    """One vector per text, in the requested types."""
    request = await call.read(Embed)
    task = call.model.predictor_for(VECTORS).task
    prompts = getattr(task.chosen, "prompts", None) or {}
    prompt = PROMPTS.get(request.input_type or "")
    values = {
        "truncate": None if request.truncate == "NONE" else True,
        "truncation_direction": {"START": "left", "END": "right"}.get(request.truncate),
        "dimensions": request.output_dimension,
        "prompt_name": prompt if prompt in prompts else None,
    }
    parameters = call.parameters(VECTORS, values)
    rows = [{"text": text} for text in request.texts]

    def content(answered: Answered) -> dict[str, Any]:
        kinds = request.embedding_types or ["float"]
        return {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_by_type",
            "embeddings": {kind: _TYPES[kind](answered.answers) for kind in kinds},
            "texts": request.texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": answered.tokens},
                **_warnings(answered, "texts"),
            },
        }

    return await vectors.embed(call, rows, parameters, content)


def _warnings(answered: Answered, name: str) -> dict[str, list[str]]:
    """Cohere's place to say which texts were cut, by the names that the request gave them."""
    if not answered.cut:
        return {}
    warnings = []
    for place in answered.cut:
        text = f"{name}[{place.row}]"
        if place.name == "text":
            text = f"query, with {text}"
        side = "from" if place.from_end else "up to"
        warnings.append(f"{text}: read {side} character {place.character}, the rest was cut")
    return {"warnings": warnings}


def _signs(answers: list[str]) -> np.ndarray:
    """The sign of each number as a bit, (texts, size / 8)."""
    return np.packbits(vectors_of(answers) > 0, axis=-1)


_TYPES: dict[str, Any] = {  # from answers in base64
    "float": vectors_of,
    "base64": lambda answers: answers,
    "ubinary": lambda answers: _signs(answers).tolist(),
    "binary": lambda answers: (_signs(answers).astype(np.int16) - 128).tolist(),
}


@dataclass(frozen=True)
class RerankError:
    """The body of an error: Cohere's clients read `message`, Jina's `detail`."""

    message: str
    detail: str


def refuse(error: RequestError) -> tuple[int, Any]:
    status = as_bad_request(error)
    return status, {"message": str(error), "detail": str(error)}


SURFACE = Surface(
    name="rerank",
    endpoints=(
        Endpoint(path="/v1/rerank", answer=rerank, task=RANKING, body=Rerank, shape=Reranked),
        Endpoint(path="/v2/rerank", answer=rerank, task=RANKING, body=Rerank, shape=Reranked),
        Endpoint(
            path="/v2/embed", answer=embed, task=VECTORS, body=Embed, shape=Embedded, forms=EVEN
        ),
    ),
    refuse=refuse,
    error=RerankError,
    prefixes=("/v1/classify", "/v1/detokenize", "/v1/tokenize", "/v2/chat"),
)
