"""Calls an ASGI app in this process, without a socket, as the front calls a model."""

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from serve.model.card import Response

NOT_PASSED_ON = frozenset({"host", "connection", "content-length", "transfer-encoding"})
"""Headers of the connection rather than of the request."""


async def call(
    app: ASGIApp, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
) -> Response:
    """Return the app's whole response.

    Args:
        path: percent-encoded, with its query.
    Raises: whatever the app raises.
    """
    path, _, query = path.partition("?")
    raw = [
        (name.lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in headers
        if name.lower() not in NOT_PASSED_ON
    ]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode("latin-1"),
        "root_path": "",
        "query_string": query.encode("latin-1"),
        "headers": [*raw, (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": ("model", 0),
    }
    started: dict[str, Any] = {}
    parts: list[bytes] = []
    received = False

    async def receive() -> Message:
        nonlocal received
        if received:
            # No client can disconnect: the code that waits for the response cancels this call.
            await asyncio.Event().wait()
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    passed_on = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in started.get("headers", ())
        if name.decode("latin-1").lower() not in NOT_PASSED_ON
    ]
    return Response(started["status"], passed_on, b"".join(parts))
