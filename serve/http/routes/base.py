"""Shared by all routes: access by keys, forwarding, responses to errors, readiness checks."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.routing import APIRoute

from bert_core.errors import InputError
from bert_core.wording import shortened
from serve.model.card import Card, ServedModel
from serve.observe.records import PART, log_failure, record_of
from serve.request.auth import Caller, Keys
from serve.request.body import CODING
from serve.request.errors import (
    CodingError,
    DeadlineError,
    ForbiddenError,
    InternalError,
    MediaTypeError,
    NotAcceptableError,
    NotJSONError,
    NotReadyError,
    OverloadedError,
    RequestError,
    SlowRequestError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
)
from serve.surfaces import huggingface, vectors
from serve.surfaces.base import Endpoint, Surface, refusal
from serve.surfaces.openapi import refusals, remember, request_body, responses, schema_of

if TYPE_CHECKING:
    from serve.model.model import Model

READY_TIMEOUT_S = 10.0
"""Timeout of the forward pass that shows a model to be ready."""

LIST = "/v1/models"

Handler = Callable[[Request], Awaitable[Response]]
Value = TypeVar("Value")


class SurfaceRoute(APIRoute):
    """A path of a surface: its handler takes only the request, and answers all errors itself."""


@dataclass(frozen=True)
class Status:
    """The body of `/healthz` and `/readyz`."""

    status: str


remember(Status)
remember(Card)


def admit(
    keys: Keys | None, request: Request, model: str | None, *, counts: bool = True
) -> Caller | None:
    """Return the caller whose key a request has; None on a server without keys. See
    `Keys.admit`."""
    return None if keys is None else keys.admit(request.headers, model, counts=counts)


def usable(models: Mapping[str, Value], caller: Caller | None) -> dict[str, Value]:
    """Return the models that a caller may use: those that its key names, or all."""
    return {
        name: model for name, model in models.items() if caller is None or caller.key.allows(name)
    }


def unknown_model(name: str, models: Mapping[str, Any]) -> UnknownModelError:
    """Return the error for a request that names a model not served here; `models` are those that
    the caller may know of."""
    listed = ", ".join(models)
    usable = f"those that you may use are {listed}" if models else "your key may use none"
    return UnknownModelError(f'there is no model "{shortened(name)}": {usable}')


async def forward(request: Request, model: ServedModel, path: str, body: bytes) -> Response:
    """Return a model's response to a request that came to the front, with its query.

    The model's own application records the request, unless that application cannot be reached.
    """
    record = record_of(request)
    record.was_forwarded = True  # also if cancelled: then the model's request is, too
    target = quote(path) + (f"?{request.url.query}" if request.url.query else "")
    try:
        answer = await model.request(request.method, target, headers_to_model(request), body)
    except Exception:
        record.was_forwarded = False
        raise
    response = Response(answer.body, answer.status)
    response.raw_headers[:] = [
        (name.encode("latin-1"), value.encode("latin-1"))
        for name, value in (*answer.headers, ("content-length", str(len(answer.body))))
    ]
    return response


def headers_to_model(request: Request) -> list[tuple[str, str]]:
    """Return a request's headers for a model. The body that goes with them is already
    decompressed, and only the front says what is a part of a request."""
    return [(name, value) for name, value in request.headers.items() if name not in (CODING, PART)]


def handler(surface: Surface, answer: Handler, about: str | None) -> Handler:
    """Return a route's function, which answers, or refuses in the surface's shape.

    Args:
        about: what the API's documentation says of the path.
    """

    async def handle(request: Request) -> Response:
        try:
            return await answer(request)
        except Exception as error:
            return refused(surface, request, error)

    handle.__doc__ = about
    return handle


def refused(surface: Surface, request: Request, error: Exception) -> Response:
    """Return the response to any error; an error of the server itself is logged, and its message is
    shown in neither log nor response."""
    if not isinstance(error, RequestError | InputError):
        log_failure(request, error)
        error = InternalError(f"{place_of(request)} failed in the server: its log says why")
    return error_response(surface, request, error)


def place_of(request: Request) -> str:
    """Return method and path of a request, as messages name them."""
    return f"{request.method} {shortened(request.url.path)}"


def error_response(surface: Surface, request: Request, error: Exception) -> Response:
    """Return the response to an error that the caller may read, in the surface's shape."""
    record_of(request).error_type = getattr(error, "error_type", RequestError.error_type)
    return refusal(surface, error)


ALWAYS = (RequestError, InternalError, NotReadyError, OverloadedError, DeadlineError)
"""Errors that any request to a surface may get."""
BY_KEY = (UnauthorizedError, ForbiddenError)
BY_BODY = (
    NotJSONError,
    MediaTypeError,
    CodingError,
    NotAcceptableError,
    SlowRequestError,
    TooLargeError,
    UnknownModelError,
)


def documented(
    surface: Surface,
    endpoint: Endpoint,
    *,
    keys: Keys | None,
    model: "Model | None" = None,
    prepared: Any = None,
) -> dict[str, Any]:
    """Return the OpenAPI entries of a path, besides its docstring.

    Args:
        model: the model that answers; None at the front.
        prepared: what the surface prepared for the model.
    """
    if endpoint.document is not None:
        described = endpoint.document(prepared)
    else:
        described = {"responses": responses(endpoint.forms, endpoint.shape)}
        if endpoint.body is not None:
            described["openapi_extra"] = request_body(schema_of(endpoint.body))
    kinds: list[type[RequestError]] = [*ALWAYS]
    kinds += BY_KEY if keys is not None and not endpoint.is_open else ()
    kinds += BY_BODY if endpoint.method == "POST" else ()
    extra = described.get("openapi_extra", {})
    if "{model}" in endpoint.path:
        kinds.append(UnknownModelError)
        known = {} if model is None else {"model": model.name, "version": model.version or "1"}
        named = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "schema": {"const": known[name]} if known else {"type": "string"},
            }
            for name in ("model", "version")
            if f"{{{name}}}" in endpoint.path
        ]
        extra = extra | {"parameters": named}
    if model is not None:
        extra = _narrowed(extra, vectors.known_values(model))
    answers = described["responses"] | refusals(surface, kinds)
    return {"openapi_extra": extra, "responses": answers}


def _narrowed(schema: Any, values: Mapping[str, Any]) -> Any:
    """Return a JSON Schema in which properties of these names allow only these values."""
    if isinstance(schema, list):
        return [_narrowed(item, values) for item in schema]
    if not isinstance(schema, dict):
        return schema
    narrowed = {name: _narrowed(item, values) for name, item in schema.items()}
    if isinstance(properties := narrowed.get("properties"), dict):
        properties |= {name: {"enum": values[name]} for name in properties if name in values}
    return narrowed


def errors_of(keys: Keys | None, *kinds: type[RequestError]) -> dict[int | str, dict[str, Any]]:
    """Return the errors of a path that belongs to no surface, for the API's documentation."""
    return refusals(huggingface.SURFACE, [InternalError, *(() if keys is None else BY_KEY), *kinds])


async def check_ready(models: Mapping[str, Any]) -> None:
    """Run a pass of all models concurrently. Raises: NotReadyError with the names of those that
    failed."""
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
