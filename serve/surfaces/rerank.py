"""Cohere's and Jina's reranking and embedding, as their clients and Open WebUI call them.

`return_documents` is Jina's and that of Cohere's first API. Cohere does not say how its `int8` come
about: here each vector is scaled by its own largest number, so that cosines are kept, lengths not.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from fastapi import Response

from serve.model.answers import Answered
from serve.request.errors import RequestError
from serve.request.limits import check_count, check_numbers
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
    check_distinct,
)
from serve.surfaces.vectors import EVEN, VECTORS, vectors_of

RANKING = "text-ranking"
PROMPTS = {"search_query": "query", "search_document": "document"}
"""Cohere's `input_type` → name of a sentence-transformers prompt."""

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class Document(Body):
    """A document: its text, and fields that are only sent back."""

    model_config = pydantic.ConfigDict(extra="allow")

    text: str


class Rerank(Body):
    """A query and documents."""

    query: str
    documents: Annotated[list[str | Document], pydantic.Field(min_length=1)]
    top_n: Count | None = None
    return_documents: bool | None = None
    truncation: bool = True
    max_tokens_per_doc: Count | None = None
    rank_fields: list[Literal["text"]] | None = None
    max_chunks_per_doc: Literal[1] | None = None
    model: Ignored = None
    user: Ignored = None
    priority: Ignored = None


class Part(Body):
    """A part of an input: a text."""

    type: Literal["text"]
    text: str


class Parted(Body):
    """An input as a list of parts, here of one text."""

    content: Annotated[list[Part], pydantic.Field(min_length=1, max_length=1)]


class Embed(Body):
    """Cohere's request for embeddings."""

    texts: Texts | None = None
    inputs: Annotated[list[Parted], pydantic.Field(min_length=1)] | None = None
    input_type: str | None = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: Count | None = None
    max_tokens: Count | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    model: Ignored = None
    priority: Ignored = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A document's score."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


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
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: dict[EmbeddingType, list[list[float]] | list[str]] | list[list[float]]
    texts: list[str]
    meta: dict[str, Any]


async def rerank(call: Call) -> Response:
    """The documents by relevance, best first."""
    request = await call.read(Rerank)
    check_count(request.documents, call.model.limits)
    _check_length(call, "max_tokens_per_doc", request.max_tokens_per_doc)
    documents = [
        {"text": item} if isinstance(item, str) else item.model_dump() for item in request.documents
    ]
    texts = [document["text"] for document in documents]
    answered = await ranked(call, request.query, texts, {"truncation": request.truncation})

    def content() -> dict[str, Any]:
        results = [
            {"index": index, "relevance_score": score}
            | ({"document": documents[index]} if request.return_documents else {})
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


async def ranked(call: Call, query: str, texts: list[str], values: Mapping[str, Any]) -> Answered:
    """Return the score of each text, in order."""
    parameters = call.parameters(RANKING, values)
    check_count(texts, call.model.limits)
    rows = [{"text": query, "text_pair": text} for text in texts]
    return await call.answer(RANKING, rows, parameters)


def best_first(answered: Answered) -> list[tuple[int, float]]:
    """Return index and score of each text, sorted by score, best first."""
    scores = [answer["score"] for answer in answered.answers]
    return sorted(enumerate(scores), key=lambda item: -item[1])


async def embed(call: Call) -> Response:
    """One vector per text, in the requested types."""
    return await _embed(call, "2")


async def embed_v1(call: Call) -> Response:
    """One vector per text, as a list of them unless types are requested."""
    return await _embed(call, "1")


async def _embed(call: Call, version: Literal["1", "2"]) -> Response:
    request = await call.read(Embed)
    kinds: list[EmbeddingType] = request.embedding_types or ["float"]
    is_plain = version == "1" and not request.embedding_types
    texts = _texts_of(request)
    check_count(texts, call.model.limits)
    check_distinct("embedding_types", kinds)
    _check_length(call, "max_tokens", request.max_tokens)
    predictor = call.model.predictor_for(VECTORS)
    size = request.output_dimension or predictor.bundle.encoder_config.hidden_size
    check_numbers(len(texts) * size * len(kinds), call.model.limits)
    prompts = getattr(predictor.task.chosen, "prompts", None) or {}
    prompt = PROMPTS.get(request.input_type or "")
    values = {
        "truncate": request.truncate != "NONE",
        "truncation_direction": "left" if request.truncate == "START" else "right",
        "dimensions": request.output_dimension,
        "prompt_name": prompt if prompt in prompts else None,
    }
    parameters = call.parameters(VECTORS, values)

    def content(answered: Answered) -> dict[str, Any]:
        by_type = {kind: _TYPES[kind](answered.answers) for kind in kinds}
        return {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
            "embeddings": by_type["float"] if is_plain else by_type,
            "texts": texts,
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": answered.tokens},
                **_warnings(answered, "texts" if request.texts else "inputs"),
            },
        }

    return await vectors.embed(call, [{"text": text} for text in texts], parameters, content)


def _texts_of(request: Embed) -> list[str]:
    """Return the texts of a request. Raises: RequestError if it has neither texts nor inputs, or
    both."""
    if (request.texts is None) == (request.inputs is None):
        got = "both" if request.texts else "neither"
        raise RequestError(f"the body: wanted one of texts, inputs, got {got}")
    return request.texts or [each.content[0].text for each in request.inputs or []]


def _check_length(call: Call, name: str, tokens: int | None) -> None:
    """Check that texts need not be cut at fewer tokens than the model reads.
    Raises: RequestError."""
    longest = call.model.predictor.max_length
    if tokens is not None and tokens < longest:
        raise RequestError(
            f"{name}: wanted at least {longest}, the tokens that {call.model.name} reads, since a "
            f"text is cut there and nowhere else, got {tokens}: leave it out, or send shorter texts"
        )


def _warnings(answered: Answered, name: str) -> dict[str, list[str]]:
    """Return, in Cohere's field for warnings, which texts were cut, by their names in the
    request."""
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
    """Return the sign of each number as a bit, (texts, size / 8)."""
    return np.packbits(vectors_of(answers) > 0, axis=-1)


def _scaled(answers: list[str]) -> np.ndarray:
    """Return each vector as whole numbers, scaled so that its largest is 127 or -127: (texts,
    size)."""
    numbers = vectors_of(answers)
    largest = np.abs(numbers).max(-1, keepdims=True)
    return np.rint(numbers * (127 / np.maximum(largest, np.finfo(np.float32).tiny))).astype(int)


_TYPES: dict[EmbeddingType, Any] = {  # from answers in base64
    "float": vectors_of,
    "base64": lambda answers: answers,
    "int8": lambda answers: _scaled(answers).tolist(),
    "uint8": lambda answers: (_scaled(answers) + 128).tolist(),
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


def _cut_ranked(name: str) -> dict[str, Any]:
    return {"truncation": True}


def _cut_embedded(name: str) -> dict[str, Any]:
    return {"truncate": "END"}


SURFACE = Surface(
    name="rerank",
    endpoints=(
        Endpoint(
            path="/v1/rerank",
            answer=rerank,
            task=RANKING,
            body=Rerank,
            shape=Reranked,
            cut=_cut_ranked,
        ),
        Endpoint(
            path="/v2/rerank",
            answer=rerank,
            task=RANKING,
            body=Rerank,
            shape=Reranked,
            cut=_cut_ranked,
        ),
        Endpoint(
            path="/v1/embed",
            answer=embed_v1,
            task=VECTORS,
            body=Embed,
            shape=Embedded,
            forms=EVEN,
            cut=_cut_embedded,
        ),
        Endpoint(
            path="/v2/embed",
            answer=embed,
            task=VECTORS,
            body=Embed,
            shape=Embedded,
            forms=EVEN,
            cut=_cut_embedded,
        ),
    ),
    refuse=refuse,
    error=RerankError,
    prefixes=("/v1/classify", "/v1/detokenize", "/v1/tokenize", "/v2/chat"),
)
