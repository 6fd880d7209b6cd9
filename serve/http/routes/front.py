"""The paths at the root: health and metrics of the server, and the paths of every surface, whose
requests are forwarded to the model that they name, or else to the first that does the task."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from bert_core.wording import shown
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
    forward,
    handler,
    json_response,
    unknown_model,
    usable,
)
from serve.model.card import ServedModel
from serve.model.sizes import SMALL
from serve.observe.records import record_of
from serve.request.auth import Keys
from serve.request.body import kind_of, receive
from serve.request.disconnects import while_connected
from serve.request.errors import NotReadyError, RequestError, WrongTaskError
from serve.request.limits import Limits
from serve.surfaces.base import Endpoint, Probe, Surface, parsed
from serve.surfaces.catalog import SURFACES

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of metrics."""

Metrics = Callable[[], Awaitable[str]]
"""Gives the metrics of all processes, in Prometheus' text format."""


def front_routes(
    models: Mapping[str, ServedModel], limits: Limits, keys: Keys | None = None
) -> APIRouter:
    """Return the routes of `/healthz`, `/readyz` for all models, and the paths of every surface."""
    router, front = APIRouter(), _Front(models, limits, keys)

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
                continue  # `list_routes` has this path
            router.add_api_route(
                endpoint.path or "/",
                front.handler(surface, endpoint),
                methods=[endpoint.method],
                tags=[surface.name],
                summary=endpoint.summary or None,
                response_model=None,
                route_class_override=SurfaceRoute,
                **documented(surface, endpoint, keys=keys),
            )
    return router


@dataclass(frozen=True)
class _Front:
    """Answers requests to a surface's paths at the root."""

    models: Mapping[str, ServedModel]
    limits: Limits
    keys: Keys | None

    def handler(self, surface: Surface, endpoint: Endpoint) -> Handler:
        if endpoint.at_root is None:
            answer = partial(self._forward, surface, endpoint)
            return handler(surface, answer, endpoint.answer.__doc__)
        probe = endpoint.at_root
        about = "200 if every model has just run a forward pass." if probe.runs_passes else None
        answer = partial(self._probe, surface, endpoint, probe)
        return handler(surface, answer, about or "About all models.")

    async def _forward(self, surface: Surface, endpoint: Endpoint, request: Request) -> Response:
        record = record_of(request)
        record.surface, record.is_probe = surface.name, endpoint.is_open
        # The model counts the request.
        caller = None if endpoint.is_open else admit(self.keys, request, None)
        models = usable(self.models, caller)
        body = b"" if endpoint.method == "GET" else await receive(request, self.limits)
        name = request.path_params.get("model")
        if name is None and body and kind_of(request) not in endpoint.nameless:
            in_thread = len(body) > SMALL
            name = await asyncio.to_thread(_model_in, body) if in_thread else _model_in(body)
        if name is None and caller is not None and not models:
            raise caller.forbidden("a server that has none of them")
        if name is None:
            name = await _first_for(endpoint.task, models)
        elif name not in self.models:
            raise unknown_model(name, models)
        record.model = name
        path = (endpoint.path or "/").format(**request.path_params)
        return await while_connected(request, forward(request, self.models[name], path, body))

    async def _probe(
        self, surface: Surface, endpoint: Endpoint, probe: Probe, request: Request
    ) -> Response:
        record = record_of(request)
        record.surface, record.is_probe = surface.name, endpoint.is_open
        if not endpoint.is_open:
            admit(self.keys, request, None)
        if probe.runs_passes:
            await check_ready(self.models)
        return json_response(200, probe.content)


async def _first_for(task: str | None, models: Mapping[str, ServedModel]) -> str:
    """Return the first of the models that a caller may use that does a task; None stands for any
    task.

    Raises: WrongTaskError if no model does the task; NotReadyError if a model that might does not
        answer.
    """
    known: dict[str, Sequence[str]] = {}
    for name, model in models.items():
        if task is None:
            return name
        try:
            known[name] = await asyncio.wait_for(model.tasks(), READY_TIMEOUT_S)
        except Exception:  # another model may do the task
            continue
        if task in known[name]:
            return name
    if down := [name for name in models if name not in known]:
        raise NotReadyError(
            f"no model here that answers is for {task}, and {', '.join(down)} did not say "
            "what it is for: try again, or see /readyz"
        )
    listed = ", ".join(f"{name} ({', '.join(tasks)})" for name, tasks in known.items())
    raise WrongTaskError(f"no model that you may use is for {task}: there are {listed}")


def _model_in(body: bytes) -> str | None:
    """Return the model that a body names; None if it names none. Raises: NotJSONError,
    RequestError."""
    # The model parses the body again: 4 µs for 64 texts of 20 words. It may be in another process.
    value = parsed(body)
    name = value.get("model") if isinstance(value, dict) else None
    if not isinstance(name, str | None):
        raise RequestError(
            f"model: wanted the name of a model, got {shown(name)}: see those in {LIST}"
        )
    return name


def metrics_route(metrics: Metrics, keys: Keys | None = None) -> APIRouter:
    """Return the route of `GET /metrics`."""
    router = APIRouter(tags=["front"])

    @router.get("/metrics", response_class=PlainTextResponse, responses=errors_of(keys))
    async def show(request: Request) -> Response:
        """Metrics of all models and of Ray Serve, for Prometheus."""
        admit(keys, request, None)
        return Response(await metrics(), media_type=PROMETHEUS)

    return router
