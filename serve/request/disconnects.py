"""Cancels the work for a client that has closed its connection, whatever runs the app.

Ray Serve does this too, but uvicorn by itself lets the work run to its end.
"""

import asyncio
from collections.abc import Awaitable

from fastapi import Request, Response

from serve.request.errors import ClosedError

UNWATCHED_S = 0.05
"""Requests that are answered sooner are not watched, which takes a task for each."""


async def while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """Return the response of `work`, which is cancelled as soon as the client is gone.

    The request's body must have been received before.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False
    watching: asyncio.Task[None] | None = None

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    def start() -> None:
        nonlocal watching
        watching = loop.create_task(watch())

    loop = asyncio.get_running_loop()
    starting = loop.call_later(UNWATCHED_S, start)
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone or task.uncancel():  # other code cancelled it
            raise
        return Response(status_code=ClosedError.status)
    finally:
        starting.cancel()
        if watching is not None:
            watching.cancel()
