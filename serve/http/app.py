"""Builds the HTTP applications of a model and of the front from their routes.

Below a model's URL are its card, `/healthz` and `/readyz`, and the paths of every surface
(`serve.surfaces`). The front answers the same surface paths at the root, by passing them on to the
model that the request names, or else to the first that can do the task. Errors on surface paths
have the surface's shape. So do errors for unknown paths and models, if the surface's clients call
them; all other errors are `{"error": …, "error_type": …}`. `ServedModel` hides where a model runs:
nothing here depends on Ray.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bert_core.errors import InputError
from serve.http.asgi_call import call
from serve.http.routes.base import LIST, SurfaceRoute, error_response, json_response, place_of
from serve.http.routes.front import Metrics, front_routes, metrics_route
from serve.http.routes.index_shapes import Indexes
from serve.http.routes.indexes import index_routes
from serve.http.routes.joint import joint_routes
from serve.http.routes.listing import list_routes
from serve.http.routes.model import model_routes
from serve.http.routes.page import page_routes
from serve.model.card import Card, ServedModel
from serve.model.card import Response as ModelResponse
from serve.observe.records import NO_RECORDER, Observed, Recorder
from serve.request.auth import Keys
from serve.request.errors import (
    Error,
    MethodError,
    RequestError,
    UnknownModelError,
    UnknownPathError,
)
from serve.request.limits import Limits
from serve.request.local_hosts import LocalHosts
from serve.surfaces import huggingface, openai
from serve.surfaces.catalog import surface_of
from serve.surfaces.openapi import error_content
from serve.versions.slot import Slot


class LocalModel(ServedModel):
    """A model in this process."""

    is_local = True

    def __init__(self, slot: Slot, keys: Keys | None = None) -> None:
        self.slot, self.keys = slot, keys

    @cached_property
    def _app(self) -> FastAPI:
        return create_model_app(self.slot, alone=False, keys=self.keys)

    async def tasks(self) -> Sequence[str]:
        return tuple(self.slot.model.predictors)

    async def card(self) -> Card:
        return self.slot.card()

    async def check_ready(self) -> None:
        await self.slot.check_ready()

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> ModelResponse:
        return await call(self._app, method, path, headers, body)


def create_model_app(
    slot: Slot,
    *,
    alone: bool,
    keys: Keys | None = None,
    metrics: Metrics | None = None,
    local_only: bool = False,
) -> FastAPI:
    """Return the application of one model.

    Args:
        alone: whether there is no front, so that the model also lists itself and has the metrics.
        metrics: returns what `/metrics` shows; without it there is no such path.
        local_only: whether requests must call it by a name of this machine
            (`serve.request.local_hosts`).
    """
    name = slot.model.name
    routes = model_routes(slot, keys, without=(LIST,) if alone else ())
    app = _create_app(f"raybert: {name}", slot.recorder, routes, local_only=local_only)
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
    *,
    local_only: bool = False,
    indexes: Indexes | None = None,
) -> FastAPI:
    """Return the application at `/`, which handles every path that does not belong to a model
    elsewhere.

    Args:
        recorder: records the requests that are answered here.
        metrics: returns what `/metrics` shows; without it there is no such path.
        local_only: as in `create_model_app`.
        indexes: those that can be searched here; without any there are no such paths.
    """
    here = [
        model_routes(model.slot, model.keys, f"/v1/models/{name}")
        for name, model in models.items()
        if isinstance(model, LocalModel)
    ]
    here += [] if metrics is None else [metrics_route(metrics, keys)]
    here.append(joint_routes(models, limits or Limits(), keys))
    if indexes:
        here.append(index_routes(indexes, models, limits or Limits(), keys))
    front = front_routes(models, limits or Limits(), keys)
    routers = [*here, list_routes(models, keys, limits), page_routes(), front]
    return _create_app("raybert", recorder, *routers, local_only=local_only)


class _Shortcut:
    """Hands a request for a surface's path directly to its handler.

    Trying dozens of routes, and resolving dependencies that these handlers do not have, takes as
    long as tokenizing. All other requests go through the application.
    """

    def __init__(self, app: ASGIApp, routers: Sequence[APIRouter]) -> None:
        self._app = app
        self._routes = {
            (method, route.path): route
            for router in reversed(routers)  # the first route of a path counts
            for route in reversed(router.routes)
            if isinstance(route, SurfaceRoute) and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            route = self._routes.get((scope["method"], path))
            if route is not None:
                scope["route"], scope["path_params"] = route, {}
                response = await route.endpoint(Request(scope, receive, send))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Slashes:
    """Serves a path with a slash at its end like the path without it.

    A model's URL, whose own path is `/`, is also served without its slash. Starlette would redirect
    to an absolute address, with the server's name as this process sees it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root = scope.get("root_path", "")
            path = scope["path"].removesuffix("/")
            scope = {**scope, "path": f"{root}/" if path == root else path}
        await self._app(scope, receive, send)


class _Heads:
    """Answers HEAD like GET, without the body (RFC 9110, 9.1 and 9.3.2): monitors and load
    balancers use it to ask whether a server is up. It is recorded as GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, send_head)
        else:
            await self._app(scope, receive, send)


def _create_app(title: str, recorder: Recorder, *routers: APIRouter, local_only: bool) -> FastAPI:
    """Return an application with the routes, their OpenAPI at `/openapi.json`, and all errors in
    our format."""
    # Our own API page with its scripts, since FastAPI's page fetches them from a CDN.
    # NOTE: FastAPI's spans have the path and query of a request, and its log records exceptions.
    silent = {"tracing": False, "metrics": False, "logs": False}
    app = FastAPIOffline(
        title=title,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=silent,
        responses={421: {"content": error_content(Error)}} if local_only else None,
    )
    app.add_middleware(_Shortcut, routers=routers)
    # NOTE: what is added last runs first, and `Observed` sees the route only below `_Slashes`.
    app.add_middleware(Observed, recorder=recorder, apology=_apology)
    app.add_middleware(_Slashes)
    if local_only:
        app.add_middleware(LocalHosts)
    app.add_middleware(_Heads)
    for router in routers:
        app.include_router(router)

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        surface = huggingface.SURFACE
        if isinstance(error, UnknownPathError | UnknownModelError | MethodError):
            surface = surface_of(request.method, request.scope["path"])
        is_of_model = isinstance(error, UnknownModelError) and request.method in ("GET", "DELETE")
        if is_of_model and surface is huggingface.SURFACE:
            surface = openai.SURFACE  # the path of a model, whose name may have a slash
        return error_response(surface, request, error)

    @app.exception_handler(InputError)
    async def refuse_input(request: Request, error: InputError) -> Response:
        return error_response(huggingface.SURFACE, request, error)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        here, methods = place_of(request), _methods_at(request, routers)
        if error.status_code != 405 and (not methods or request.method in methods):
            missing = UnknownPathError(f"{here}: there is no such path, see /openapi.json")
            return await refuse(request, missing)
        # Starlette names only the methods of the path's first route.
        allowed = methods or sorted(
            (error.headers or {}).get("Allow", "").replace(" ", "").split(",")
        )
        response = await refuse(
            request, MethodError(f"{here}: wanted the method {' or '.join(allowed)}")
        )
        heads = {"HEAD"} if "GET" in allowed else set()
        response.headers["Allow"] = ", ".join(sorted({*allowed, *heads}))
        return response

    return app


def _methods_at(request: Request, routers: Sequence[APIRouter]) -> list[str]:
    """Return the methods that a request's path has in any of the routers. Undocumented routes,
    which stand for paths elsewhere, do not count."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    return sorted(
        {
            method
            for router in routers
            for route in router.routes
            if isinstance(route, SurfaceRoute)
            or (isinstance(route, APIRoute) and route.include_in_schema)
            if route.path_regex.match(path)
            for method in route.methods or ()
        }
    )


def _apology(request: Request) -> Response:
    message = f"{place_of(request)} failed in the server: its log says why"
    return json_response(500, {"error": message, "error_type": "internal"})
