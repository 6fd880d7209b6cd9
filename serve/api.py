"""HTTP: which path answers what, and every error as JSON that says how to fix it.

An error is `{"error": …, "error_type": …}` with one of these statuses: 400 the body is not JSON,
422 it is JSON of the wrong shape, 404 no such model or path, 405 wrong method, 503 a model does not
answer, 500 our fault. `ServedModel` hides where a model runs: no Ray here.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from bert_core.errors import InputError
from serve.model import Card, Model, ServedModel
from serve.schema import NotReadyError, RequestError, Shapes, UnknownModelError

READY_TIMEOUT_S = 10.0
"""Timeout of the forward pass that shows a model to be ready."""


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
    predict: str
    """Path to post requests to."""
    card: Card | None
    """None if the model does not answer."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The body of `/v1/models`."""

    object: str = "list"
    data: list[Entry]


def model_routes(model: Model) -> APIRouter:
    """The routes of one model: `POST /predict`, `GET /` (its card), `/healthz` and `/readyz`."""
    router = APIRouter(tags=[model.name])
    shapes = Shapes(model.task)
    responses: dict[int | str, dict[str, Any]] = {
        200: {"model": shapes.response},
        400: {"model": Error},
        422: {"model": Error},
    }

    @router.get("/")
    async def card() -> Card:
        """The card of this model."""
        return await model.card()

    @router.post(
        "/predict",
        response_model=None,
        responses=responses,
        openapi_extra=shapes.openapi,
    )
    async def predict(request: Request) -> Response:
        """A list of answers to a list of inputs, in order. A single input is answered as Hugging
        Face's clients expect for the task: with a bare answer, or with a list of one."""
        checked = shapes.parse(await request.body())
        answers = await model.predict(checked.inputs, checked.parameters)
        return _json(200, shapes.body(checked, answers))

    @router.get("/healthz")
    async def health() -> Status:
        """The process is up."""
        return Status("ok")

    @router.get("/readyz", responses={503: {"model": Error}})
    async def readiness() -> Status:
        """The model has just run a forward pass."""
        await _check_ready({model.name: model})
        return Status("ready")

    return router


def list_routes(models: Mapping[str, ServedModel]) -> APIRouter:
    """`GET /v1/models`, and for unknown names a 404 that lists the existing ones."""
    router = APIRouter(tags=["models"])

    async def entry(name: str, model: ServedModel) -> Entry:
        try:
            card = await asyncio.wait_for(model.card(), READY_TIMEOUT_S)
        except Exception:  # whatever is wrong with one model, the others are listed
            card = None
        return Entry(id=name, predict=f"/v1/models/{name}/predict", card=card)

    @router.get("/v1/models")
    async def listing() -> Listing:
        """The models served here."""
        return Listing(data=await asyncio.gather(*(entry(*item) for item in models.items())))

    @router.get("/v1/models/{name}")
    async def card(name: str) -> Card:
        """The card of one model."""
        if name not in models:
            raise unknown(name)
        return await models[name].card()

    @router.api_route(
        "/v1/models/{name}/{path:path}",
        methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        include_in_schema=False,
    )
    async def elsewhere(name: str, path: str) -> None:
        raise HTTPException(404) if name in models else unknown(name)

    def unknown(name: str) -> UnknownModelError:
        return UnknownModelError(
            f'there is no model "{name}": those served here are {", ".join(models)}'
        )

    return router


def front_routes(models: Mapping[str, ServedModel]) -> APIRouter:
    """The routes in front of the models: the page, `/healthz`, and `/readyz` for all of them."""
    router = APIRouter(tags=["front"])
    page = files("serve").joinpath("page/index.html").read_text(encoding="utf-8")

    @router.get("/", response_class=HTMLResponse)
    async def show() -> str:
        """A page for trying the models."""
        return page

    @router.get("/healthz")
    async def health() -> Status:
        """The process is up."""
        return Status("ok")

    @router.get("/readyz", responses={503: {"model": Error}})
    async def readiness() -> Status:
        """Every model has just run a forward pass."""
        await _check_ready(models)
        return Status("ready")

    return router


def create_model_app(model: Model, *, alone: bool) -> FastAPI:
    """The application of one model; if `alone`, without a front, it also lists itself."""
    routes = model_routes(model)
    app = _create_app(f"raybert: {model.name}", routes)
    if alone:
        app.include_router(routes, prefix=f"/v1/models/{model.name}")
        app.include_router(list_routes({model.name: model}))
    return app


def create_front_app(models: Mapping[str, ServedModel]) -> FastAPI:
    """The application at `/`, which handles every path that belongs to no model."""
    return _create_app("raybert", front_routes(models), list_routes(models))


def _create_app(title: str, *routers: APIRouter) -> FastAPI:
    """The routes, their OpenAPI at `/openapi.json`, and all errors in our format."""
    app = FastAPI(title=title)
    for router in routers:
        app.include_router(router)

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return _json(error.status, {"error": str(error), "error_type": error.error_type})

    @app.exception_handler(InputError)
    async def refuse_input(request: Request, error: InputError) -> Response:
        return await refuse(request, RequestError(str(error)))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        here = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another")
            message, error_type = f"{here}: wanted the method {allowed}", "method_not_allowed"
        else:
            message, error_type = f"{here}: there is no such path, see /openapi.json", "not_found"
        return _json(error.status_code, {"error": message, "error_type": error_type})

    @app.exception_handler(Exception)
    async def apologise(request: Request, error: Exception) -> Response:
        message = f"{request.method} {request.url.path} failed in the server: its log says why"
        return _json(500, {"error": message, "error_type": "internal"})

    return app


async def _check_ready(models: Mapping[str, ServedModel]) -> None:
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
