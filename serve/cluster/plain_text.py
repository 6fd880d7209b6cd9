"""Turns Ray Serve's own plain-text errors into JSON, and drops headers that it cannot read.

Serve answers in plain text if a request does not reach our applications: for a path that belongs to
no application (404, which clients take for permanent, although the server is only starting or
stopping), in a process that drains, for too many requests, after an exception.
"""

import json
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.cluster.haproxy_launcher import RETRY_AFTER_S
from serve.request.errors import (
    InternalError,
    NotReadyError,
    OverloadedError,
    RequestError,
    UnknownModelError,
)

DECODED = frozenset(
    {
        "serve_multiplexed_model_id",
        "traceparent",
        "tracestate",
        "x_request_disconnect_disabled",
        "x_request_id",
        "x_request_timeout_seconds",
        "x_session_id",
    }
)
"""Headers that Serve decodes as UTF-8; it reads dashes in some of them as underscores."""

_MESSAGES: Mapping[int, tuple[str, str]] = {
    404: (UnknownModelError.error_type, "wanted a path that begins with a slash"),
    429: (OverloadedError.error_type, "wanted fewer requests at once: try again"),
    500: (InternalError.error_type, "the request failed in the server: its log says why"),
    503: (NotReadyError.error_type, "no process of this model is ready: try again, or see /readyz"),
}


class ReadableHeaders:
    """Drops headers of `DECODED` that are not UTF-8, for which Serve would answer 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            headers = [pair for pair in scope["headers"] if not _is_unreadable(*pair)]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def _is_unreadable(name: bytes, value: bytes) -> bool:
    if value.isascii() or name.decode("latin-1").lower().replace("-", "_") not in DECODED:
        return False
    try:
        value.decode()
    except UnicodeDecodeError:
        return True
    return False


class JSONErrors:
    """Answers in JSON where Serve answers in plain text, or not at all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun, body = False, b""

        async def send_on(message: Message) -> None:
            nonlocal has_begun, body
            if message["type"] == "http.response.start":
                has_begun = True
                message, body = _as_json(message, scope["path"])
            elif body:  # sent in place of the plain text
                if message.get("more_body", False):
                    return
                message = {"type": "http.response.body", "body": body}
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception:
            if not has_begun:
                await send_on({"type": "http.response.start", "status": 500, "headers": TEXT})
                await send_on({"type": "http.response.body"})
            raise


TEXT = [(b"content-type", b"text/plain")]


def _as_json(head: Message, path: str) -> tuple[Message, bytes]:
    """Return the changed head of a response, and its new body; empty if it keeps its own body."""
    status, headers = head["status"], Headers(raw=head["headers"])
    if status < 400 or not headers.get("content-type", "").startswith("text/plain"):
        return head, b""
    if status == 404 and path.startswith("/"):
        status = 503
    kind, message = _MESSAGES.get(status, (RequestError.error_type, "the server refused this"))
    body = json.dumps({"error": message, "error_type": kind}).encode()
    changed = MutableHeaders(raw=[*head["headers"]])
    changed["content-type"] = "application/json"
    changed["content-length"] = str(len(body))
    if status in (429, 503):
        changed.setdefault("retry-after", str(RETRY_AFTER_S))
    return {**head, "status": status, "headers": changed.raw}, body
