"""Defines a header by which replicas recognize requests that came through HAProxy.

On a cluster that the server joins, replicas and Serve's own proxy listen where other machines reach
them, in plain HTTP, since every node's HAProxy sends them requests. If the cluster requires Ray's
token, they answer no request without this header, so that nobody can bypass TLS. Its value is
derived from the token, which all nodes of such a cluster have, so it is never passed on or stored.
On a cluster that requires no token there is no such header, even if a node has a token.
"""

import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

REQUIRED = "RAYBERT_ASK_FOR_PASS"
"""Environment variable that is set where this header is asked for."""
HEADER = "x-raybert-pass"
_PURPOSE = b"raybert: requests that came through HAProxy"
_OPEN = frozenset({"/-/healthz", "/-/routes"})
"""What HAProxy asks by itself, to find out who is there; Serve answers these paths."""
_BODY = json.dumps(
    {
        "error": "wanted a request at the server's own port, got one at a port behind it: ask that",
        "error_type": "misdirected",
    }
).encode()


def pass_of_proxy(environment: Mapping[str, str] | None = None) -> str | None:
    """Return the header's value; None if it is not required.

    Args:
        environment: environment variables; None means those of this process.
    """
    environment = os.environ if environment is None else environment
    token = _token(environment) if environment.get(REQUIRED) else None
    return None if token is None else hmac.new(token.encode(), _PURPOSE, "sha256").hexdigest()


def _token(environment: Mapping[str, str]) -> str | None:
    """Return Ray's token, from the places where Ray looks; None if there is none."""
    if given := environment.get("RAY_AUTH_TOKEN", "").strip():
        return given
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


class ThroughProxy:
    """Answers 421 to requests that did not come through HAProxy, and hides the header from the
    app."""

    def __init__(self, app: "ASGIApp", wanted: str) -> None:
        self._app, self._wanted = app, wanted.encode()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        name = HEADER.encode()
        given = b"".join(value for key, value in scope["headers"] if key == name)
        if hmac.compare_digest(given, self._wanted):
            headers = [pair for pair in scope["headers"] if pair[0] != name]
            scope = {**scope, "headers": headers}
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # 403, as none is accepted
            return
        elif scope["path"] not in _OPEN:
            await _refuse(send)
            return
        await self._app(scope, receive, send)


async def _refuse(send: "Send") -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(_BODY)),
        (b"connection", b"close"),  # the body is not read
    ]
    await send({"type": "http.response.start", "status": 421, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY})
