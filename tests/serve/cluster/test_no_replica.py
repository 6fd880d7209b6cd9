"""A request is told when no answer to it has begun in time."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from serve.cluster.no_replica import GivesUp

AFTER_S = 0.2
cancelled: list[str] = []


async def at_once(request: Request) -> Response:
    return PlainTextResponse("answer")


async def never(request: Request) -> Response:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        cancelled.append(request.url.path)
        raise
    return PlainTextResponse("late")


async def in_parts(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"first "
        await asyncio.sleep(2 * AFTER_S)
        yield b"last"

    return StreamingResponse(parts())


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [("/at_once", 200, "answer"), ("/in_parts", 200, "first last"), ("/never", 503, "not_ready")],
)
def test_only_a_response_that_has_not_begun_is_abandoned(path: str, status: int, text: str) -> None:
    routes = [Route(f"/{each.__name__}", each) for each in (at_once, in_parts, never)]

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(GivesUp(Starlette(routes=routes), AFTER_S))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    response = asyncio.run(ask())
    assert response.status_code == status
    assert text in response.text
    assert ("Retry-After" in response.headers) == (status == 503)
    assert ("/never" in cancelled) == (path == "/never")
