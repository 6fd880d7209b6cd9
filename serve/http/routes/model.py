"""The routes below a model's URL: its card, whether it is ready, and the paths of every surface."""

from collections.abc import Container
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from bert_core.wording import shortened
from serve.http.routes.base import (
    Handler,
    Status,
    SurfaceRoute,
    admit,
    check_ready,
    documented,
    errors_of,
    refused,
)
from serve.model.card import Card
from serve.observe.records import record_of
from serve.request.auth import Keys, presented_key
from serve.request.body import deadline_of, receive
from serve.request.disconnects import while_connected
from serve.request.errors import NotReadyError, UnknownModelError
from serve.surfaces.base import Call, Endpoint, Surface
from serve.surfaces.catalog import SURFACES
from serve.versions.slot import CALLER, Candidate, Current, Slot


def model_routes(
    slot: Slot, keys: Keys | None = None, prefix: str = "", without: Container[str] = ()
) -> APIRouter:
    """Return the routes of one model: its card, `/healthz` and `/readyz`, and those of every
    surface.

    Args:
        without: paths of surfaces to leave out.
    """
    # NOTE: a route that kept the model itself would keep its weights after it is replaced.
    router, name, tasks = APIRouter(prefix=prefix), slot.model.name, tuple(slot.model.predictors)

    # With a prefix, the path of the card is documented without the slash, by the list of models.
    @router.get("/", responses=errors_of(keys), tags=["model"], include_in_schema=not prefix)
    async def card(request: Request) -> Card:
        """The card of this model."""
        admit(keys, request, name, counts=False)
        return slot.card()

    @router.get("/healthz", responses=errors_of(None), tags=["model"])
    async def health() -> Status:
        """The process is up."""
        return Status("ok")

    @router.get("/readyz", responses=errors_of(None, NotReadyError), tags=["model"])
    async def readiness() -> Status:
        """The model has just run a forward pass."""
        await check_ready({name: slot})
        return Status("ready")

    for surface in SURFACES:
        prepared = _prepared(slot.current, surface)
        for endpoint in surface.endpoints:
            if endpoint.path in without:
                continue
            shown = endpoint.path or ("" if prefix else "/")
            for path in dict.fromkeys([shown, endpoint.path or "/"]):  # a URL may end with a slash
                is_shown = path == shown and (endpoint.task is None or endpoint.task in tasks)
                described = (
                    documented(surface, endpoint, keys=keys, model=slot.model, prepared=prepared)
                    if is_shown
                    else {}
                )
                router.add_api_route(
                    path,
                    _handler(slot, keys, surface, endpoint),
                    methods=[endpoint.method],
                    include_in_schema=is_shown,
                    tags=[surface.name],
                    summary=endpoint.summary or None,
                    response_model=None,
                    route_class_override=SurfaceRoute,
                    **described,
                )
    return router


def _prepared(current: Current, surface: Surface) -> Any:
    """Return the surface's own data about a model, made on first use and then kept."""
    if surface.name not in current.prepared:
        current.prepared[surface.name] = surface.prepare(current.model)
    return current.prepared[surface.name]


def _handler(slot: Slot, keys: Keys | None, surface: Surface, endpoint: Endpoint) -> Handler:
    async def handle(request: Request) -> Response:
        candidate, current = slot.candidate, slot.current
        # NOTE: clients send some key even to a server without keys, and all of them the same.
        caller = request.headers.get(CALLER) if keys is None else presented_key(request.headers)
        if candidate is not None and candidate.takes(caller):
            current = candidate.slot.current
        record = record_of(request)
        record.surface, record.is_probe = surface.name, endpoint.is_open
        record.model, record.version = current.model.name, current.model.version_label
        with current.model.in_use():  # one version answers all of a request
            try:
                call = await _call(current, request, candidate)
                return await while_connected(request, endpoint.answer(call))
            except Exception as error:
                return refused(surface, request, endpoint.explained(error))

    async def _call(current: Current, request: Request, candidate: Candidate | None) -> Call:
        model = current.model
        named = request.path_params.get("model", model.name)
        if named != model.name:
            raise UnknownModelError(
                f'there is no model "{shortened(named)}" here: this is {model.name}'
            )
        caller = None if endpoint.is_open else admit(keys, request, model.name)
        body = b"" if endpoint.method == "GET" else await receive(request, model.limits)
        return Call(
            model=model,
            request=request,
            body=body,
            deadline_s=deadline_of(request, model.limits),
            prepared=_prepared(current, surface),
            caller=caller,
            shadow=None if candidate is None else partial(candidate.shadow, model),
            card=slot.card,
        )

    handle.__doc__ = endpoint.answer.__doc__
    return handle
