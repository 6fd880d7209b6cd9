"""Work for a client that has closed its connection is cancelled, whatever runs the app.

Ray Serve does so, too; uvicorn alone goes on to the end.
"""

import asyncio
from collections.abc import Awaitable

from fastapi import Request, Response

CLIENT_CLOSED = 499
"""nginx's status of a request that nobody waits for. It is only seen in logs."""


async def while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """The response of `work`, which is cancelled as soon as the client is gone.

    The request's body must have been received.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone or task.uncancel():  # somebody else cancelled it
            raise
        return Response(status_code=CLIENT_CLOSED)
    finally:
        watching.cancel()
