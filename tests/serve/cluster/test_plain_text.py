"""What Ray Serve itself would say in plain text reaches clients as JSON."""

import asyncio

import httpx
import pytest
from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.cluster.plain_text import DECODED, JSONErrors, ReadableHeaders

OF_RAY = {
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
}


def answering(response: Response | None) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if response is None:
            raise RuntimeError("on purpose")
        await response(scope, receive, send)

    return app


def asked(app: ASGIApp, path: str = "/v1/models/docs") -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(JSONErrors(app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("status", "came", "error_type"),
    [
        # ray 2.60, serve/_private/proxy.py, not_found_response: the application has gone.
        (404, 503, "not_ready"),
        (429, 429, "overloaded"),
        (500, 500, "internal"),
        (503, 503, "not_ready"),
        (408, 408, "invalid_request"),
    ],
)
def test_an_error_in_plain_text_becomes_json(status: int, came: int, error_type: str) -> None:
    text = "Path '/v1/models/docs' not found. Ping http://.../-/routes for available routes."
    response = asked(answering(PlainTextResponse(text, status, {"X-Request-ID": "7"})))
    assert response.status_code == came
    assert response.json()["error_type"] == error_type
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["X-Request-ID"] == "7"
    assert ("Retry-After" in response.headers) == (came in (429, 503))


def test_an_exception_becomes_json() -> None:
    response = asked(answering(None))
    assert (response.status_code, response.json()["error_type"]) == (500, "internal")


@pytest.mark.parametrize(
    "response",
    [
        PlainTextResponse("ray_serve_num_requests 7\n"),
        JSONResponse({"error": "there is no such path", "error_type": "not_found"}, 404),
        JSONResponse({"error": "a"}, 429, {"Retry-After": "9"}),
    ],
    ids=["plain text", "an error in JSON", "one with Retry-After"],
)
def test_every_other_answer_passes_as_it_is(response: Response) -> None:
    came = asked(answering(response))
    assert (came.status_code, came.content) == (response.status_code, response.body)
    assert came.headers.get("Retry-After") == response.headers.get("Retry-After")


@pytest.mark.parametrize("name", [*sorted(OF_RAY), "X-Request-ID", "Authorization", "traceparent"])
def test_a_header_that_serve_could_not_decode_is_dropped(name: str) -> None:
    """Serve decodes these as UTF-8; RFC 9110, 5.5 allows any byte from 0x80 on."""

    def passed(value: bytes) -> list[bytes]:
        seen: list[bytes] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.extend(dict(scope["headers"]).values())
            assert Request(scope).url.path == "/"

        raw = [(name.lower().encode(), value)]
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": raw}
        asyncio.run(ReadableHeaders(app)(scope, None, None))  # type: ignore[arg-type]
        return seen

    assert passed("é".encode()) == ["é".encode()]
    is_decoded = name.lower().replace("-", "_") in DECODED
    assert passed("é".encode("latin-1")) == ([] if is_decoded else [b"\xe9"])
    assert is_decoded == (name != "Authorization")
