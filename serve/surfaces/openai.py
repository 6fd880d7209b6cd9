"""OpenAI's embeddings, as `openai`, LangChain, LiteLLM and Open WebUI call them.

The client asks for base64 unless told otherwise: little-endian fp32. LangChain sends ids of
tiktoken's vocabulary unless told not to: these are refused, since as ids of another vocabulary they
would give vectors that look right.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from fastapi import Response

from serve.model.answers import Answered
from serve.model.card import Card
from serve.request.errors import RequestError
from serve.request.limits import check_count
from serve.surfaces.base import (
    Body,
    Call,
    Count,
    Endpoint,
    Ignored,
    Surface,
    Texts,
    as_bad_request,
    json_response,
)
from serve.surfaces.vectors import EVEN, VECTORS, embed, vectors_of

Filled = pydantic.Field(min_length=1)
Ids = Annotated[list[int], Filled] | Annotated[list[list[int]], Filled]
"""Token ids, which are refused with a reason of their own."""


class Embeddings(Body):
    """OpenAI's request for embeddings."""

    input: Annotated[
        str | Texts | Ids,
        pydantic.WithJsonSchema(pydantic.TypeAdapter(str | Texts).json_schema()),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    truncate: bool | None = None
    """Whether texts that are too long are cut. OpenAI's API has no word for it."""
    truncate_prompt_tokens: Literal[-1] | None = None
    """vLLM's word: -1 cuts texts at what the model reads."""
    model: Ignored = None
    user: Ignored = None
    options: Ignored = None


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """A vector, as numbers or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, kw_only=True)
class EmbeddingList:
    """OpenAI's answer to a request for embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class Models:
    """OpenAI's list of models."""

    object: Literal["list"]
    data: list[Card]


async def embeddings(call: Call) -> Response:
    """One vector per input, in order."""
    request = await call.read(Embeddings)
    texts = request.input if isinstance(request.input, list) else [request.input]
    check_count(texts, call.model.limits)
    if any(not isinstance(text, str) for text in texts):
        raise RequestError(
            "input: wanted texts, got token ids, which belong to the vocabulary of another model: "
            "send texts (in LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False))"
        )
    truncate = request.truncate
    if truncate is None and request.truncate_prompt_tokens is not None:
        truncate = True
    values = {"dimensions": request.dimensions, "truncate": truncate}
    parameters = call.parameters(VECTORS, values)

    def content(answered: Answered) -> dict[str, Any]:
        in_base64 = request.encoding_format == "base64"
        vectors = answered.answers if in_base64 else vectors_of(answered.answers)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors)
            ],
            "model": call.model.name,
            "usage": {"prompt_tokens": answered.tokens, "total_tokens": answered.tokens},
        }

    return await embed(call, [{"text": text} for text in texts], parameters, content)


async def models(call: Call) -> Response:
    """The list of models, which has this one."""
    return json_response(call.model, {"object": "list", "data": [call.card()]})


@dataclass(frozen=True)
class Problem:
    """An error as OpenAI's clients read it."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: None
    code: str


@dataclass(frozen=True)
class OpenAIError:
    """The body of an error, as OpenAI's clients read it."""

    error: Problem


def refuse(error: RequestError) -> tuple[int, Any]:
    # The client raises BadRequestError for 400, and retries 408, 409, 429 and 5xx.
    status = as_bad_request(error)
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    message = {"message": str(error), "type": kind, "param": None, "code": error.error_type}
    return status, {"error": message}


def cut(name: str) -> dict[str, Any]:
    return {"truncate": True}


SURFACE = Surface(
    name="openai",
    endpoints=(
        Endpoint(path="/v1/embeddings", answer=embeddings, task=VECTORS, body=Embeddings,
                 shape=EmbeddingList, forms=EVEN, cut=cut, summary="OpenAI's embeddings"),
        Endpoint(path="/embeddings", answer=embeddings, task=VECTORS, body=Embeddings,
                 shape=EmbeddingList, forms=EVEN, cut=cut, summary="OpenAI's embeddings"),
        Endpoint(path="/v1/models", answer=models, method="GET", shape=Models,
                 summary="OpenAI's list of models"),
    ),
    refuse=refuse,
    error=OpenAIError,
    prefixes=("/v1", "/openai"),  # the latter is Azure's, which its client calls
)  # fmt: skip
