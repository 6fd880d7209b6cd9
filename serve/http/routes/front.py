"""The routes at the root: the list of models, metrics, readiness of all models, and the paths of
every surface, which are passed on to a model."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.exceptions import HTTPException

from bert_core.wording import shortened, shown
from serve.http.routes.base import (
    LIST,
    READY_TIMEOUT_S,
    Handler,
    Status,
    SurfaceRoute,
    admit,
    check_ready,
    documented,
    errors_of,
    json_response,
    refused,
)
from serve.model.card import Card, ServedModel, State
from serve.model.card import Response as Passed
from serve.model.sizes import SMALL
from serve.observe.records import record_of
from serve.request.auth import Keys
from serve.request.body import CODING, receive
from serve.request.disconnects import while_connected
from serve.request.errors import NotReadyError, RequestError, UnknownModelError, WrongTaskError
from serve.request.limits import Limits
from serve.surfaces import openai
from serve.surfaces.base import Endpoint, Probe, Surface, parsed
from serve.surfaces.catalog import SURFACES
from serve.surfaces.openapi import refusals, remember

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of metrics."""

Metrics = Callable[[], Awaitable[str]]
"""Gives the metrics of all processes, in Prometheus' text format."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model in the list of models, which has the shape of OpenAI's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "raybert"
    url: str
    """Path of the model, to which requests are posted."""
    task: str | None
    """None if the model does not answer."""
    state: State | Literal["down"]
    """`down` if the model does not answer."""
    problem: str | None
    """Why it does not answer, or is not what it should be."""
    card: Card | None
    """None if the model does not answer."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The body of `/v1/models`."""

    object: str = "list"
    data: list[Entry]


remember(Listing)


async def listing_of(models: Mapping[str, ServedModel]) -> Listing:
    """The list of models, whatever is wrong with some of them."""
    return Listing(data=await asyncio.gather(*(_entry(*item) for item in models.items())))


async def _entry(name: str, model: ServedModel) -> Entry:
    card, problem = None, None
    try:
        card = await asyncio.wait_for(model.card(), READY_TIMEOUT_S)
    except RequestError as error:
        problem = str(error)
    except Exception as error:
        problem = f"it does not answer ({type(error).__name__})"
    return Entry(
        id=name,
        created=0 if card is None else card.created,
        url=f"/v1/models/{name}",
        task=None if card is None else card.task,
        state="down" if card is None else card.state,
        problem=problem if card is None else card.problem,
        card=card,
    )


def list_routes(
    models: Mapping[str, ServedModel], keys: Keys | None = None, limits: Limits | None = None
) -> APIRouter:
    """`GET /v1/models`, and for unknown names a 404 that lists the existing ones."""
    router = APIRouter(tags=["models"])

    @router.get(LIST, responses=errors_of(keys))
    async def listing(request: Request) -> Listing:
        """The models served here that the key may use."""
        caller = admit(keys, request, None)
        return await listing_of(
            {
                name: model
                for name, model in models.items()
                if caller is None or caller.key.allows(name)
            }
        )

    unknown = refusals(openai.SURFACE, [UnknownModelError])
    errors = unknown | errors_of(keys, RequestError, NotReadyError)

    @router.get("/v1/models/{name}", responses=errors)
    async def card(name: str, request: Request) -> Card:
        """The card of one model."""
        admit(keys, request, name, counts=False)
        if name not in models:
            raise unknown_model(name, models)
        return await models[name].card()

    async def elsewhere(name: str, request: Request, path: str = "") -> Response:
        # Requests to a model's own application do not come here, but while it is being added.
        admit(keys, request, None)  # the model counts the request
        if name not in models:
            raise unknown_model(name, models)
        if models[name].is_local:  # all of its paths are here
            raise HTTPException(404)
        body = b"" if request.method == "GET" else await receive(request, limits or Limits())
        return await while_connected(request, _pass_on(request, models[name], f"/{path}", body))

    methods = ["POST", "PUT", "PATCH", "DELETE"]
    router.add_api_route("/v1/models/{name}", elsewhere, methods=methods, include_in_schema=False)
    router.add_api_route(
        "/v1/models/{name}/{path:path}",
        elsewhere,
        methods=["GET", *methods],
        include_in_schema=False,
    )
    return router


def unknown_model(name: str, models: Mapping[str, ServedModel]) -> UnknownModelError:
    return UnknownModelError(
        f'there is no model "{shortened(name)}": those served here are {", ".join(models)}'
    )


def front_routes(
    models: Mapping[str, ServedModel], limits: Limits, keys: Keys | None = None
) -> APIRouter:
    """The routes in front of the models: `/healthz`, `/readyz` for all of them, and every surface's
    paths, which are passed on."""
    router = APIRouter()

    @router.get("/healthz", responses=errors_of(None), tags=["front"])
    async def health() -> Status:
        """The process is up."""
        return Status("ok")

    @router.get("/readyz", responses=errors_of(None, NotReadyError), tags=["front"])
    async def readiness() -> Status:
        """Every model has just run a forward pass."""
        await check_ready(models)
        return Status("ready")

    for surface in SURFACES:
        for endpoint in surface.endpoints:
            if endpoint.path == LIST:
                continue  # the front lists all of them
            if endpoint.at_root is None:
                handler = _forwarder(models, keys, surface, endpoint, limits)
            else:
                handler = _prober(models, keys, surface, endpoint, endpoint.at_root)
            router.add_api_route(
                endpoint.path or "/",
                handler,
                methods=[endpoint.method],
                tags=[surface.name],
                summary=endpoint.summary or None,
                response_model=None,
                route_class_override=SurfaceRoute,
                **documented(surface, endpoint, keys=keys),
            )
    return router


def _forwarder(
    models: Mapping[str, ServedModel],
    keys: Keys | None,
    surface: Surface,
    endpoint: Endpoint,
    limits: Limits,
) -> Handler:
    async def handle(request: Request) -> Response:
        record = record_of(request)
        record.surface, record.is_probe = surface.name, endpoint.is_open
        try:
            if not endpoint.is_open:
                admit(keys, request, None)  # the model counts the request
            body = b"" if endpoint.method == "GET" else await receive(request, limits)
            name = request.path_params.get("model")
            if name is None and body:
                name = _named(body) if len(body) <= SMALL else await asyncio.to_thread(_named, body)
            chosen = record.model = await _chosen(models, name, endpoint)
            path = (endpoint.path or "/").format(**request.path_params)
            return await while_connected(request, _pass_on(request, models[chosen], path, body))
        except Exception as error:
            return refused(surface, request, error)

    handle.__doc__ = endpoint.answer.__doc__
    return handle


async def _pass_on(request: Request, model: ServedModel, path: str, body: bytes) -> Response:
    """What a model answers. It records the request too, unless it cannot be asked."""
    record = record_of(request)
    record.was_forwarded = True  # if it is cancelled here, it is there
    target = quote(path) + (f"?{request.url.query}" if request.url.query else "")
    try:
        passed = await model.request(request.method, target, passed_on(request), body)
    except Exception:
        record.was_forwarded = False
        raise
    return _as_response(passed)


def passed_on(request: Request) -> list[tuple[str, str]]:
    """A request's headers for a model, which gets the body as it was read here."""
    return [(name, value) for name, value in request.headers.items() if name != CODING]


def _as_response(passed: Passed) -> Response:
    response = Response(passed.body, passed.status)
    response.raw_headers[:] = [
        (key.encode("latin-1"), value.encode("latin-1"))
        for key, value in (*passed.headers, ("content-length", str(len(passed.body))))
    ]
    return response


def _prober(
    models: Mapping[str, ServedModel],
    keys: Keys | None,
    surface: Surface,
    endpoint: Endpoint,
    probe: Probe,
) -> Handler:
    async def handle(request: Request) -> Response:
        try:
            if not endpoint.is_open:
                admit(keys, request, None)
            if probe.runs_passes:
                await check_ready(models)
        except Exception as error:
            return refused(surface, request, error)
        return json_response(200, probe.content)

    handle.__doc__ = "About all models."
    if probe.runs_passes:
        handle.__doc__ = "200 if every model has just run a forward pass."
    return handle


def _named(body: bytes) -> str | None:
    """The model that a body names, if it does. Raises: NotJSONError, RequestError."""
    value = parsed(body)
    name = value.get("model") if isinstance(value, dict) else None
    if not isinstance(name, str | None):
        raise RequestError(
            f"model: wanted the name of a model, got {shown(name)}: see those in {LIST}"
        )
    return name


async def _chosen(models: Mapping[str, ServedModel], name: str | None, endpoint: Endpoint) -> str:
    """The model that is to answer. Raises: UnknownModelError, WrongTaskError."""
    if name is not None:
        if name not in models:
            raise unknown_model(name, models)
        return name
    tasks: dict[str, Sequence[str]] = {}
    down = []
    for known, model in models.items():
        if endpoint.task is None:
            return known
        try:
            tasks[known] = await asyncio.wait_for(model.tasks(), READY_TIMEOUT_S)
        except Exception:  # another model may do the task
            down.append(known)
            continue
        if endpoint.task in tasks[known]:
            return known
    if down:
        raise NotReadyError(
            f"no model here that answers is for {endpoint.task}, and {', '.join(down)} did not say "
            "what it is for: try again, or see /readyz"
        )
    listed = ", ".join(f"{known} ({', '.join(names)})" for known, names in tasks.items())
    raise WrongTaskError(f"no model here is for {endpoint.task}: those served here are {listed}")


def metrics_route(metrics: Metrics, keys: Keys | None = None) -> APIRouter:
    """`GET /metrics`."""
    router = APIRouter(tags=["front"])

    @router.get("/metrics", response_class=PlainTextResponse, responses=errors_of(keys))
    async def show(request: Request) -> Response:
        """Metrics of all models and of Ray Serve, for Prometheus."""
        admit(keys, request, None)
        return Response(await metrics(), media_type=PROMETHEUS)

    return router
