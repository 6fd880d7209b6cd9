"""Refuses requests that call a server on this machine by a foreign name.

A web page can have its own name resolve to 127.0.0.1 once it is loaded ("DNS rebinding"). The
browser then takes a server on this machine for the page's own server, and lets the page read its
answers. But the browser still sends the page's name in the `Host` header.
"""

import json
import re

from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PORT = re.compile(r":\d*$")


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached from this machine only."""
    return host in LOOPBACK


class LocalHosts:
    """Wraps an app, and refuses requests with 421 if they use a name other than this machine's.

    A request without `Host` passes, since no browser sends one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not _is_local(value):
                    await _refuse(value, send)
                    return
        await self._app(scope, receive, send)


def _is_local(value: bytes) -> bool:
    host = _PORT.sub("", value.decode("latin-1").strip().lower())
    return not host or host.removeprefix("[").removesuffix("]") in LOOPBACK


async def _refuse(value: bytes, send: Send) -> None:
    message = (
        f"Host: wanted localhost or 127.0.0.1, since this server listens on this machine only, got "
        f"{value.decode('latin-1')[:100]!r}: use one of these names, or have the proxy in front "
        "send one as Host"
    )
    body = json.dumps({"error": message, "error_type": "misdirected"}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 421, "headers": headers})
    await send({"type": "http.response.body", "body": body})
