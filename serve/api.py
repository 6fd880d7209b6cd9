"""HTTP: which path answers what.

Below a model's URL are its card, `/healthz` and `/readyz`, and the paths of every surface
(`serve.surfaces`). The front answers the same surface paths at the root, by passing them on to the
model that the request names, or else to the first that can do the task. Errors on surface paths
have the surface's shape; all others are `{"error": …, "error_type": …}`. `ServedModel` hides where
a model runs: no Ray here.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from bert_core.errors import InputError
from serve import forward
from serve.auth import Caller, Keys
from serve.errors import (
    InternalError,
    NotReadyError,
    RequestError,
    UnknownModelError,
    WrongTaskError,
)
from serve.following import Current, Slot
from serve.limits import Limits
from serve.model import SMALL, Card, ServedModel
from serve.model import Response as Passed
from serve.observing import NO_RECORDER, Observed, Recorder, log_failure, seen
from serve.surfaces import huggingface
from serve.surfaces.base import Call, Endpoint, Surface, deadline_of, receive, refusal
from serve.surfaces.catalog import SURFACES

READY_TIMEOUT_S = 10.0
"""Timeout of the forward pass that shows a model to be ready."""

LIST = "/v1/models"

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of metrics."""

Handler = Callable[[Request], Awaitable[Response]]
Metrics = Callable[[], Awaitable[str]]
"""Gives the metrics of all processes, in Prometheus' text format."""


@dataclass(frozen=True)
class Error:
    """The body of every error."""

    error: str
    error_type: str


@dataclass(frozen=True)
class Status:
    """The body of `/healthz` and `/readyz`."""

    status: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model in the list of models, which has the shape of OpenAI's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "raybert"
    url: str
    """Path of the model, to which requests are posted."""
    card: Card | None
    """None if the model does not answer."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The body of `/v1/models`."""

    object: str = "list"
    data: list[Entry]


class LocalModel(ServedModel):
    """A model in this process."""

    def __init__(self, slot: Slot, keys: Keys | None = None) -> None:
        self.tasks = tuple(slot.model.predictors)
        self.slot, self.keys = slot, keys
        self._app = create_model_app(slot, alone=False, keys=keys)

    async def card(self) -> Card:
        return card_of(self.slot)

    async def check_ready(self) -> None:
        await self.slot.model.check_ready()

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> Passed:
        return await forward.call(self._app, method, path, headers, body)


def card_of(slot: Slot) -> Card:
    return replace(slot.model.card(), problem=slot.problem)


def model_routes(
    slot: Slot, keys: Keys | None = None, prefix: str = "", without: Container[str] = ()
) -> APIRouter:
    """The routes of one model: its card, `/healthz` and `/readyz`, and those of every surface.

    Args:
        without: paths of surfaces to leave out.
    """
    router, model = APIRouter(prefix=prefix), slot.model

    @router.get("/", tags=["model"])
    async def card(request: Request) -> Card:
        """The card of this model."""
        _admit(keys, request, None)
        return card_of(slot)

    @router.get("/healthz", tags=["model"])
    async def health() -> Status:
        """The process is up."""
        return Status("ok")

    @router.get("/readyz", responses={503: {"model": Error}}, tags=["model"])
    async def readiness() -> Status:
        """The model has just run a forward pass."""
        await _check_ready({model.name: slot.model})
        return Status("ready")

    for surface in SURFACES:
        prepared = _prepared(slot.current, surface)
        for endpoint in surface.endpoints:
            if endpoint.path in without:
                continue
            router.add_api_route(
                endpoint.path or ("" if prefix else "/"),
                _handler(slot, keys, surface, endpoint),
                methods=[endpoint.method],
                include_in_schema=endpoint.task is None or endpoint.task in model.predictors,
                tags=[surface.name],
                summary=endpoint.summary or None,
                response_model=None,
                **_documented(endpoint, prepared),
            )
    return router


def _admit(keys: Keys | None, request: Request, model: str | None) -> Caller | None:
    """Whose request it is; None where no keys are asked for. Raises: see `Keys.admit`."""
    return None if keys is None else keys.admit(request.headers, model)


def _prepared(current: Current, surface: Surface) -> Any:
    """What a surface needs of a model, made once."""
    if surface.name not in current.prepared:
        current.prepared[surface.name] = surface.prepare(current.model)
    return current.prepared[surface.name]


def _handler(slot: Slot, keys: Keys | None, surface: Surface, endpoint: Endpoint) -> Handler:
    async def handle(request: Request) -> Response:
        current = slot.current  # one version answers all of a request
        noted = seen(request)
        noted.surface, noted.is_probe = surface.name, endpoint.is_open
        noted.model, noted.version = current.model.name, current.model.version_label
        with current.model.in_use():
            try:
                return await endpoint.answer(await _call(current, request))
            except Exception as error:
                return _refused(surface, request, error)

    async def _call(current: Current, request: Request) -> Call:
        model = current.model
        named = request.path_params.get("model", model.name)
        if named != model.name:
            raise UnknownModelError(f'there is no model "{named}" here: this is {model.name}')
        caller = None if endpoint.is_open else _admit(keys, request, model.name)
        body = b"" if endpoint.method == "GET" else await receive(request, model.limits)
        return Call(
            model=model,
            request=request,
            body=body,
            deadline_s=deadline_of(request, model.limits),
            prepared=_prepared(current, surface),
            caller=caller,
        )

    handle.__doc__ = endpoint.answer.__doc__
    return handle


def _refused(surface: Surface, request: Request, error: Exception) -> Response:
    if not isinstance(error, RequestError | InputError):
        log_failure(request, error)
        here = f"{request.method} {request.url.path}"
        error = InternalError(f"{here} failed in the server: its log says why")
    return _refusal(surface, request, error)


def _refusal(surface: Surface, request: Request, error: Exception) -> Response:
    seen(request).error_type = getattr(error, "error_type", RequestError.error_type)
    return refusal(surface, error)


def _documented(endpoint: Endpoint, prepared: Any) -> dict[str, Any]:
    """What the API's documentation says of a path, besides its docstring."""
    if endpoint.document is not None:
        return endpoint.document(prepared)
    if endpoint.body is None:
        return {}
    content = {"application/json": {"schema": endpoint.body.model_json_schema()}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def list_routes(models: Mapping[str, ServedModel], keys: Keys | None = None) -> APIRouter:
    """`GET /v1/models`, and for unknown names a 404 that lists the existing ones."""
    router = APIRouter(tags=["models"])

    async def entry(name: str, model: ServedModel) -> Entry:
        try:
            card = await asyncio.wait_for(model.card(), READY_TIMEOUT_S)
        except Exception:  # whatever is wrong with one model, the others are listed
            card = None
        created = 0 if card is None else card.created
        return Entry(id=name, created=created, url=f"/v1/models/{name}", card=card)

    @router.get(LIST)
    async def listing(request: Request) -> Listing:
        """The models served here."""
        _admit(keys, request, None)
        return Listing(data=await asyncio.gather(*(entry(*item) for item in models.items())))

    @router.get("/v1/models/{name}")
    async def card(name: str, request: Request) -> Card:
        """The card of one model."""
        _admit(keys, request, None)
        if name not in models:
            raise unknown_model(name, models)
        return await models[name].card()

    @router.api_route(
        "/v1/models/{name}/{path:path}",
        methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        include_in_schema=False,
    )
    async def elsewhere(name: str, path: str) -> None:
        raise HTTPException(404) if name in models else unknown_model(name, models)

    return router


def unknown_model(name: str, models: Mapping[str, ServedModel]) -> UnknownModelError:
    return UnknownModelError(
        f'there is no model "{name}": those served here are {", ".join(models)}'
    )


def front_routes(
    models: Mapping[str, ServedModel], limits: Limits, keys: Keys | None = None
) -> APIRouter:
    """The routes in front of the models: the page, `/healthz`, `/readyz` for all of them, and every
    surface's paths, which are passed on."""
    router = APIRouter()
    page = files("serve").joinpath("page/index.html").read_text(encoding="utf-8")

    @router.get("/", response_class=HTMLResponse, tags=["front"])
    async def show() -> str:
        """A page for trying the models."""
        return page

    @router.get("/healthz", tags=["front"])
    async def health() -> Status:
        """The process is up."""
        return Status("ok")

    @router.get("/readyz", responses={503: {"model": Error}}, tags=["front"])
    async def readiness() -> Status:
        """Every model has just run a forward pass."""
        await _check_ready(models)
        return Status("ready")

    for surface in SURFACES:
        for endpoint in surface.endpoints:
            if endpoint.path == LIST:
                continue  # the front lists all of them
            router.add_api_route(
                endpoint.path or "/",
                _forwarder(models, keys, surface, endpoint, limits),
                methods=[endpoint.method],
                tags=[surface.name],
                summary=endpoint.summary or None,
                response_model=None,
                **_documented(endpoint, None),
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
        noted = seen(request)
        noted.surface, noted.is_probe = surface.name, endpoint.is_open
        try:
            if not endpoint.is_open:
                _admit(keys, request, None)  # the model counts the request
            body = b"" if endpoint.method == "GET" else await receive(request, limits)
            name = request.path_params.get("model")
            if name is None:
                name = _named(body) if len(body) <= SMALL else await asyncio.to_thread(_named, body)
            chosen = noted.model = _chosen(models, name, endpoint)
            path = (endpoint.path or "/").replace("{model}", name or "")
            noted.is_passed_on = True
            passed = await models[chosen].request(
                request.method, path, list(request.headers.items()), body
            )
        except Exception as error:
            noted.is_passed_on = False
            return _refused(surface, request, error)
        response = Response(passed.body, passed.status)
        response.raw_headers[:] = [
            (key.encode("latin-1"), value.encode("latin-1"))
            for key, value in (*passed.headers, ("content-length", str(len(passed.body))))
        ]
        return response

    handle.__doc__ = endpoint.answer.__doc__
    return handle


def _named(body: bytes) -> str | None:
    """The model that a body names, if it does."""
    if b'"model"' not in body:
        return None
    try:
        name = json.loads(body).get("model")
    except (ValueError, RecursionError, AttributeError):
        return None
    return name if isinstance(name, str) else None


def _chosen(models: Mapping[str, ServedModel], name: str | None, endpoint: Endpoint) -> str:
    """The model that is to answer. Raises: UnknownModelError, WrongTaskError."""
    if name is not None:
        if name not in models:
            raise unknown_model(name, models)
        return name
    for known, model in models.items():
        if endpoint.task is None or endpoint.task in model.tasks:
            return known
    listed = ", ".join(f"{known} ({', '.join(model.tasks)})" for known, model in models.items())
    raise WrongTaskError(f"no model here is for {endpoint.task}: those served here are {listed}")


def metrics_route(metrics: Metrics, keys: Keys | None = None) -> APIRouter:
    """`GET /metrics`."""
    router = APIRouter(tags=["front"])

    @router.get("/metrics", response_class=PlainTextResponse)
    async def show(request: Request) -> Response:
        """Metrics of all models and of Ray Serve, for Prometheus."""
        _admit(keys, request, None)
        return Response(await metrics(), media_type=PROMETHEUS)

    return router


def create_model_app(
    slot: Slot, *, alone: bool, keys: Keys | None = None, metrics: Metrics | None = None
) -> FastAPI:
    """The application of one model; if `alone`, without a front, it also lists itself and has the
    metrics."""
    name = slot.model.name
    routes = model_routes(slot, keys, without=(LIST,) if alone else ())
    app = _create_app(f"raybert: {name}", slot.recorder, routes)
    if alone:
        app.include_router(model_routes(slot, keys, f"/v1/models/{name}"))
        if metrics is not None:
            app.include_router(metrics_route(metrics, keys))
        app.include_router(list_routes({name: LocalModel(slot, keys)}, keys))
    return app


def create_front_app(
    models: Mapping[str, ServedModel],
    limits: Limits | None = None,
    keys: Keys | None = None,
    recorder: Recorder = NO_RECORDER,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The application at `/`, which handles every path that belongs to no model elsewhere.

    Args:
        recorder: is told of the requests that are answered here.
        metrics: what `/metrics` shows; without it there is no such path.
    """
    here = [
        model_routes(model.slot, model.keys, f"/v1/models/{name}")
        for name, model in models.items()
        if isinstance(model, LocalModel)
    ]
    here += [] if metrics is None else [metrics_route(metrics, keys)]
    front = front_routes(models, limits or Limits(), keys)
    return _create_app("raybert", recorder, *here, list_routes(models, keys), front)


class _EmptyPath:
    """Answers a model's URL without a trailing slash like the one with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == scope.get("root_path", ""):
            scope = {**scope, "path": f"{scope['path']}/"}
        await self._app(scope, receive, send)


def _create_app(title: str, recorder: Recorder, *routers: APIRouter) -> FastAPI:
    """The routes, their OpenAPI at `/openapi.json`, and all errors in our format."""
    # The API page with its scripts, which FastAPI's own fetches from a CDN.
    # NOTE: FastAPI's spans have the path and query of a request, and its log records exceptions.
    silent = {"tracing": False, "metrics": False, "logs": False}
    app = FastAPIOffline(title=title, redoc_url=None, telemetry=silent)
    # NOTE: what is added last comes first, and `Observed` sees the route only below `_EmptyPath`.
    app.add_middleware(Observed, recorder=recorder, apology=_apology)
    app.add_middleware(_EmptyPath)
    for router in routers:
        app.include_router(router)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        return _refusal(huggingface.SURFACE, request, error)

    @app.exception_handler(InputError)
    async def refuse_input(request: Request, error: InputError) -> Response:
        return _refusal(huggingface.SURFACE, request, error)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        here = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another")
            message, error_type = f"{here}: wanted the method {allowed}", "method_not_allowed"
        else:
            message, error_type = f"{here}: there is no such path, see /openapi.json", "not_found"
        seen(request).error_type = error_type
        return _json(error.status_code, {"error": message, "error_type": error_type})

    return app


def _apology(request: Request) -> Response:
    message = f"{request.method} {request.url.path} failed in the server: its log says why"
    return _json(500, {"error": message, "error_type": "internal"})


async def _check_ready(models: Mapping[str, Any]) -> None:
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


def _json(status: int, content: Any) -> Response:
    # ASCII: a lone surrogate from a caller, repeated in a message, cannot be encoded as UTF-8.
    return Response(json.dumps(content), status, media_type="application/json")
