"""Serves `POST /v1/predict`: one set of inputs for several models, each answered as at the model's
URL.

If a model refuses its part, or cannot answer it, the whole request is refused.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Annotated, Any

import orjson
import pydantic
from fastapi import APIRouter, Request, Response

from serve.http.routes.base import (
    ALWAYS,
    BY_BODY,
    SurfaceRoute,
    admit,
    errors_of,
    handler,
    headers_to_model,
    json_response,
    unknown_model,
    usable,
)
from serve.model.card import Response as ModelResponse
from serve.model.card import ServedModel
from serve.model.shared_passes import SharedPasses
from serve.model.sizes import SMALL
from serve.observe.records import PART, record_of
from serve.request.accept import chosen
from serve.request.auth import Keys
from serve.request.body import receive
from serve.request.disconnects import while_connected
from serve.request.errors import NotAcceptableError, NotJSONError
from serve.request.limits import Limits
from serve.surfaces import huggingface
from serve.surfaces.base import JSON, Body, read
from serve.surfaces.openapi import request_body, responses, schema_of

PATH = "/v1/predict"
MOST_ENTRIES = 100
"""Entries of a header: it must be short, however many models and cut texts there are."""


class JointRequest(Body):
    """Inputs, and the models that are to answer them."""

    models: (
        Annotated[list[str], pydantic.Field(min_length=1)]
        | Annotated[dict[str, dict[str, Any]], pydantic.Field(min_length=1)]
    )
    """Their names, or by name parameters that one alone is given."""
    inputs: Any
    """An input or a list of them, as every one of the models takes it."""
    parameters: dict[str, Any] = pydantic.Field(default_factory=dict)
    """For all of the models."""

    def bodies(self) -> dict[str, bytes]:
        """Return the body of the request to each model. Raises: NotJSONError."""
        named = self.models
        by_model = named if isinstance(named, dict) else {name: {} for name in named}
        try:
            inputs = orjson.dumps(self.inputs)
            parameters = {
                name: orjson.dumps(self.parameters | values) for name, values in by_model.items()
            }
        except orjson.JSONEncodeError as error:  # orjson reads deeper values
            raise NotJSONError(f"the body: wanted JSON of less depth ({error})") from error
        return {
            name: b'{"inputs":%b,"parameters":%b}' % (inputs, values)
            for name, values in parameters.items()
        }


class _RefusedError(Exception):
    """A model has refused its part of a request."""

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self.response = response


def joint_routes(
    models: Mapping[str, ServedModel], limits: Limits, keys: Keys | None = None
) -> APIRouter:
    """Return the route to several models at once."""
    router = APIRouter(tags=["front"])

    async def predict(request: Request) -> Response:
        """The answers of several models to the same inputs, by model: what each answers at its own
        URL. What models with one encoder read alike goes through it once."""
        record_of(request).surface = huggingface.SURFACE.name
        caller = admit(keys, request, None)  # each model counts its part
        _check_form(request)
        content = await receive(request, limits)
        in_thread = len(content) > SMALL
        bodies = await asyncio.to_thread(_parsed, content) if in_thread else _parsed(content)
        for name in bodies:
            if name not in models:
                raise unknown_model(name, usable(models, caller))
        return await while_connected(request, _ask_all(models, request, bodies))

    router.add_api_route(
        PATH,
        handler(huggingface.SURFACE, predict, predict.__doc__),
        name="predict",
        methods=["POST"],
        summary="Several models",
        response_model=None,
        route_class_override=SurfaceRoute,
        openapi_extra=request_body(schema_of(JointRequest)),
        responses=responses((JSON,), dict[str, Any]) | errors_of(keys, *ALWAYS, *BY_BODY),
    )
    return router


def _parsed(content: bytes) -> dict[str, bytes]:
    """Return the body of the request to each model. Raises: NotJSONError, RequestError."""
    return read(JointRequest, content).bodies()


def _check_form(request: Request) -> None:
    """Check that the client accepts JSON. Raises: NotAcceptableError."""
    accept = ", ".join(request.headers.getlist("accept"))
    if chosen(accept, (JSON,)) is None:
        raise NotAcceptableError(
            f"Accept: wanted {JSON}, got {accept[:100]!r}: ask for it, or leave the header out"
        )


async def _ask_all(
    models: Mapping[str, ServedModel], request: Request, bodies: Mapping[str, bytes]
) -> Response:
    """Return the answers of all models, or the first refusal, which cancels the others."""
    record, shared = record_of(request), SharedPasses(bodies)
    headers = [(name, value) for name, value in headers_to_model(request) if name != "accept"]
    headers.append((PART, "1"))

    async def ask(name: str) -> ModelResponse:
        with shared.part_of(name):
            answer = await models[name].request("POST", "/", headers, bodies[name])
            if answer.status != 200:
                raise _RefusedError(_with_name(name, answer))
            return answer

    record.was_forwarded = True  # each model records its part, also one that is dropped
    try:
        async with asyncio.TaskGroup() as group:
            parts = {name: group.create_task(ask(name)) for name in bodies}
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
        if isinstance(first, _RefusedError):
            return first.response
        record.was_forwarded = False
        raise first from None
    except asyncio.CancelledError:  # the client is gone, and each part is dropped
        record.was_forwarded = False
        raise
    finally:
        shared.close()
    return _combined({name: part.result() for name, part in parts.items()})


def _with_name(name: str, refusal: ModelResponse) -> Response:
    """Return a model's refusal, with the model's name in the message."""
    content = json.loads(refusal.body)
    response = json_response(refusal.status, {**content, "error": f"{name}: {content['error']}"})
    repeated = {"retry-after", "www-authenticate"}
    response.headers.update({key: value for key, value in refusal.headers if key in repeated})
    return response


def _combined(parts: Mapping[str, ModelResponse]) -> Response:
    """Return an object of the answers by model. Entries of headers get the name of their model."""
    answers = [b"%b:%b" % (orjson.dumps(name), part.body) for name, part in parts.items()]
    entries: dict[str, list[str]] = {}
    for name, part in parts.items():
        for key, value in part.headers:
            if key.startswith("x-"):
                entries.setdefault(key, []).extend(f"{name}={each}" for each in value.split(","))
            elif key == "server-timing":
                entries.setdefault(key, []).extend(f"{name}.{each}" for each in value.split(", "))
    entries["x-model"] = list(parts)
    headers = {key: ", ".join(values[:MOST_ENTRIES]) for key, values in entries.items()}
    return Response(b"{%b}" % b",".join(answers), 200, headers, JSON)
