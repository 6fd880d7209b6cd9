"""Sends a response's head and body in one write.

uvicorn writes the head first. If a process is killed between the two, the client has the head of a
response that never comes, and HAProxy can no longer send the request to another replica.
"""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class OneWrite:
    """Holds back the head of a response until the first part of its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Any = getattr(send, "__self__", None)  # uvicorn's request and response
        if scope["type"] != "http" or not hasattr(exchange, "transport"):
            await self._app(scope, receive, send)
            return
        head: Message | None = None

        async def send_together(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                return
            if head is None:
                await send(message)
                return
            buffered = exchange.transport = _Buffered(exchange.transport)
            try:
                await send(head)
                head = None
                await send(message)
            finally:
                exchange.transport = buffered.flushed()

        await self._app(scope, receive, send_together)


class _Buffered:
    """A transport that collects what is written to it, to write it all at once."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._parts = transport, bytearray()

    def write(self, data: bytes) -> None:
        self._parts += data

    def flushed(self) -> Any:
        """Write everything that was collected, and return the original transport."""
        if self._parts:
            self._transport.write(bytes(self._parts))
            self._parts.clear()
        return self._transport

    def close(self) -> None:
        self.flushed().close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
