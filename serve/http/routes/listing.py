"""Serves the list of models at `/v1/models`, and paths below the URLs of models in other
processes."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from serve.http.routes.base import (
    LIST,
    READY_TIMEOUT_S,
    admit,
    errors_of,
    forward,
    unknown_model,
    usable,
)
from serve.model.card import Card, ServedModel, State
from serve.request.auth import Keys
from serve.request.body import receive
from serve.request.disconnects import while_connected
from serve.request.errors import NotReadyError, RequestError, UnknownModelError
from serve.request.limits import Limits
from serve.surfaces import openai
from serve.surfaces.openapi import refusals, remember
from serve.surfaces.rerank import RANKING
from serve.surfaces.vectors import VECTORS


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model in the list of models, which has the shape of OpenAI's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "raybert"
    url: str
    """Path of the model, to which requests are posted."""
    task: str | None
    """None if the model does not answer."""
    state: State | Literal["down", "failed"]
    """`failed` if the model could not be loaded, else `down` if it does not answer."""
    problem: str | None
    """Why the model does not answer, or is not the one that it should be."""
    card: Card | None
    """None if the model does not answer."""


CohereEndpoint = Literal["embed", "rerank"]
COHERE_ENDPOINTS: Mapping[str, CohereEndpoint] = {VECTORS: "embed", RANKING: "rerank"}
"""Task → what Cohere calls it."""


@dataclass(frozen=True, kw_only=True)
class CohereEntry:
    """A model in Cohere's list of models."""

    name: str
    endpoints: list[CohereEndpoint]
    """What Cohere's client can ask of it."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The body of `/v1/models`, where OpenAI's clients and Cohere's ask."""

    object: str = "list"
    data: list[ModelEntry]
    models: list[CohereEntry]


remember(Listing)


async def list_models(models: Mapping[str, ServedModel]) -> Listing:
    """Return the list of models, with those that do not answer."""
    data = await asyncio.gather(*(_entry(*item) for item in models.items()))
    return Listing(data=data, models=[_in_coheres_way(entry) for entry in data])


def _in_coheres_way(entry: ModelEntry) -> CohereEntry:
    tasks = () if entry.card is None else (entry.card.task, *entry.card.also)
    endpoints = [COHERE_ENDPOINTS[task] for task in tasks if task in COHERE_ENDPOINTS]
    return CohereEntry(name=entry.id, endpoints=endpoints)


async def _entry(name: str, model: ServedModel) -> ModelEntry:
    card, problem = None, None
    absent: Literal["down", "failed"] = "failed" if model.has_failed else "down"
    try:
        card = await asyncio.wait_for(model.card(), READY_TIMEOUT_S)
    except RequestError as error:
        problem = str(error)
    except Exception as error:
        problem = f"it does not answer ({type(error).__name__})"
    return ModelEntry(
        id=name,
        created=0 if card is None else card.created,
        url=f"/v1/models/{name}",
        task=None if card is None else card.task,
        state=absent if card is None else card.state,
        problem=problem if card is None else card.problem,
        card=card,
    )


def list_routes(
    models: Mapping[str, ServedModel], keys: Keys | None = None, limits: Limits | None = None
) -> APIRouter:
    """Return the routes of `GET /v1/models`, and a 404 for unknown names that lists the existing
    models."""
    router = APIRouter(tags=["models"])

    @router.get(LIST, responses=errors_of(keys))
    async def listing(request: Request) -> Listing:
        """The models served here that the key may use."""
        return await list_models(usable(models, admit(keys, request, None)))

    unknown = refusals(openai.SURFACE, [UnknownModelError])
    errors = unknown | errors_of(keys, RequestError, NotReadyError)

    @router.get("/v1/models/{name}", responses=errors)
    async def card(name: str, request: Request) -> Card:
        """The card of one model."""
        caller = admit(keys, request, name, counts=False)
        if name not in models:
            raise unknown_model(name, usable(models, caller))
        return await models[name].card()

    async def elsewhere(name: str, request: Request, path: str = "") -> Response:
        # A model's own application gets these requests, except while the model is being added.
        caller = admit(keys, request, None)  # the model counts the request
        if name not in models:
            raise unknown_model(name, usable(models, caller))
        if models[name].is_local:  # this app has all paths of the model
            raise HTTPException(404)
        body = b"" if request.method == "GET" else await receive(request, limits or Limits())
        return await while_connected(request, forward(request, models[name], f"/{path}", body))

    methods = ["POST", "PUT", "PATCH", "DELETE"]
    router.add_api_route("/v1/models/{name}", elsewhere, methods=methods, include_in_schema=False)
    router.add_api_route(
        "/v1/models/{name}/{path:path}",
        elsewhere,
        methods=["GET", *methods],
        include_in_schema=False,
    )
    return router
