"""What all routes share: who is admitted, how errors are told, what shows a model to be ready."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from bert_core.errors import InputError
from bert_core.wording import shortened
from serve.auth import Caller, Keys
from serve.errors import InternalError, NotReadyError, RequestError
from serve.observing import log_failure, seen
from serve.surfaces.base import Endpoint, Surface, refusal, responses

READY_TIMEOUT_S = 10.0
"""Timeout of the forward pass that shows a model to be ready."""

LIST = "/v1/models"

Handler = Callable[[Request], Awaitable[Response]]


class SurfaceRoute(APIRoute):
    """A path of a surface: its handler takes nothing but the request, and tells all errors."""


@dataclass(frozen=True)
class Error:
    """The body of every error."""

    error: str
    error_type: str


@dataclass(frozen=True)
class Status:
    """The body of `/healthz` and `/readyz`."""

    status: str


def admit(keys: Keys | None, request: Request, model: str | None) -> Caller | None:
    """Whose request it is; None where no keys are asked for. Raises: see `Keys.admit`."""
    return None if keys is None else keys.admit(request.headers, model)


def refused(surface: Surface, request: Request, error: Exception) -> Response:
    """An error as this surface's clients read it; what is our own fault is logged, not told."""
    if not isinstance(error, RequestError | InputError):
        log_failure(request, error)
        error = InternalError(f"{place_of(request)} failed in the server: its log says why")
    return told(surface, request, error)


def place_of(request: Request) -> str:
    """What was asked for, as messages name it."""
    return f"{request.method} {shortened(request.url.path)}"


def told(surface: Surface, request: Request, error: Exception) -> Response:
    """An error that is the caller's to know, in the surface's shape."""
    seen(request).error_type = getattr(error, "error_type", RequestError.error_type)
    return refusal(surface, error)


def documented(endpoint: Endpoint, prepared: Any) -> dict[str, Any]:
    """What the API's documentation says of a path, besides its docstring."""
    if endpoint.document is not None:
        return endpoint.document(prepared)
    if endpoint.body is None:
        return {}
    content = {"application/json": {"schema": endpoint.body.model_json_schema()}}
    return {
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
        "responses": responses(endpoint.forms),
    }


async def check_ready(models: Mapping[str, Any]) -> None:
    """Run a pass of all models concurrently. Raises: NotReadyError naming those that failed."""
    results = await asyncio.gather(
        *(asyncio.wait_for(model.check_ready(), READY_TIMEOUT_S) for model in models.values()),
        return_exceptions=True,
    )
    failed = [
        f"{name} ({type(result).__name__})"
        for name, result in zip(models, results, strict=True)
        if isinstance(result, BaseException)
    ]
    if failed:
        raise NotReadyError(
            f"wanted a forward pass of every model within {READY_TIMEOUT_S:.0f} s, "
            f"got none from {', '.join(failed)}: try again, or see the server's log"
        )


def json_response(status: int, content: Any) -> Response:
    # ASCII: a lone surrogate from a caller, repeated in a message, cannot be encoded as UTF-8.
    return Response(json.dumps(content), status, media_type="application/json")
