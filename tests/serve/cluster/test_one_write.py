"""A response is never cut between head and body, because both are one write."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from serve.cluster.one_write import OneWrite
from tests.serve.wire import first_read
from tracking.store.ports import free_ports

REQUESTS = 200


async def answer(request: Request) -> Response:
    return JSONResponse({"text": "a" * 4000})


async def parts(request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(0.05)
        yield b"second"

    return StreamingResponse(body())


async def failing(request: Request) -> Response:
    raise RuntimeError("on purpose")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    (port,) = free_ports(1)
    routes = [Route("/", answer), Route("/parts", parts), Route("/failing", failing)]
    app = OneWrite(Starlette(routes=routes))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            pass
        yield port
    finally:
        server.should_exit = True
        thread.join()


def test_head_and_body_arrive_together(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(REQUESTS):
            read = first_read(connection, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert read.endswith(b'"}'), read[-100:]


def test_a_stream_begins_with_its_first_part(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        read = first_read(connection, "GET /parts HTTP/1.0\r\n\r\n")
        assert read.endswith(b"first\r\n")
        assert connection.recv(100).startswith(b"6\r\nsecond\r\n")


@pytest.mark.parametrize("method", ["HEAD / ", "GET /failing "])
def test_responses_without_a_body_and_failures_are_sent(port: int, method: str) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        read = first_read(connection, f"{method}HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read.startswith(b"HTTP/1.1 200 " if "HEAD" in method else b"HTTP/1.1 500 ")
