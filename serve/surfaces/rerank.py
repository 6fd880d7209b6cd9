"""Cohere's and Jina's reranking and embedding, as their clients and Open WebUI call them.

`return_documents` is Jina's; Cohere's clients ignore what it adds.
"""

import uuid
from typing import Any, Literal

import numpy as np
from fastapi import Response

from serve.errors import RequestError
from serve.model import Answered
from serve.surfaces import vectors
from serve.surfaces.base import (
    Body,
    Call,
    Endpoint,
    Ignored,
    Surface,
    as_bad_request,
)
from serve.surfaces.tei import RANKING, best_first, check_top_n, ranked
from serve.surfaces.vectors import EVEN, VECTORS, vectors_of

PROMPTS = {"search_query": "query", "search_document": "document"}
"""Cohere's `input_type` → name of a sentence-transformers prompt."""


class Document(Body):
    """A document."""

    text: str


class Rerank(Body):
    """A query and documents."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool = False
    truncation: bool = True
    model: Ignored = None
    user: Ignored = None
    priority: Ignored = None


class Embed(Body):
    """Cohere's request for embeddings."""

    texts: list[str]
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    model: Ignored = None
    priority: Ignored = None


async def rerank(call: Call) -> Response:
    """The documents by relevance, best first."""
    request = await call.read(Rerank)
    check_top_n(request.top_n)
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
    if not request.texts:
        raise RequestError("texts: wanted at least one text, got an empty list")
    task = call.model.predictor_for(VECTORS).task
    prompts = getattr(task.chosen, "prompts", None) or {}
    prompt = PROMPTS.get(request.input_type or "")
    values = {
        "truncate": None if request.truncate == "NONE" else True,
        "truncation_direction": "left" if request.truncate == "START" else None,
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


def refuse(error: RequestError) -> tuple[int, Any]:
    status = as_bad_request(error)
    # Cohere's clients read `message`, Jina's `detail`.
    return status, {"message": str(error), "detail": str(error)}


SURFACE = Surface(
    name="rerank",
    endpoints=(
        Endpoint(path="/v1/rerank", answer=rerank, task=RANKING, body=Rerank),
        Endpoint(path="/v2/rerank", answer=rerank, task=RANKING, body=Rerank),
        Endpoint(path="/v2/embed", answer=embed, task=VECTORS, body=Embed, forms=EVEN),
    ),
    refuse=refuse,
)
