"""Work for a client that has closed its connection is cancelled, whatever runs the app.

Ray Serve does so, too; uvicorn alone goes on to the end.
"""

import asyncio
from collections.abc import Awaitable

from fastapi import Request, Response

from serve.errors import ClosedError


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
        return Response(status_code=ClosedError.status)
    finally:
        watching.cancel()
