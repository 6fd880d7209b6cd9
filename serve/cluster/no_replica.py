"""Makes Serve's fallback proxy answer 503 after 30 s if a model has no replica.

By itself the proxy waits for a replica for as long as it takes. HAProxy cannot end that wait:
it has only one timeout per backend, whichever server has the request, and a model that does answer
may take longer.
"""

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.cluster.haproxy_launcher import RETRY_AFTER_S, WITHOUT_REPLICA_S


class GivesUp:
    """Answers 503 if no response has begun in time."""

    def __init__(self, app: ASGIApp, after_s: float = WITHOUT_REPLICA_S) -> None:
        self._app, self._after_s = app, after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        answering = asyncio.ensure_future(self._app(scope, receive, send_on))
        try:
            await asyncio.wait([answering], timeout=self._after_s)
            if answering.done() or has_begun:
                await answering
                return
        finally:
            answering.cancel()  # also if this call is cancelled
        await asyncio.wait([answering])
        if not has_begun:
            message = "no process of this model is ready: try again, or see /readyz"
            content = {"error": message, "error_type": "not_ready"}
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            await JSONResponse(content, 503, headers)(scope, receive, send)
