"""A client that sends whatever bytes it is given, over a connection that it keeps.

The clients that are made for answers refuse to send what a server must be able to refuse.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reply:
    """A response as it came."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes

    @property
    def is_json(self) -> bool:
        return self.headers.get("content-type", "").startswith("application/json")

    @property
    def closes(self) -> bool:
        """Whether the server has said that it closes the connection."""
        return self.headers.get("connection", "").lower() == "close"


@dataclass
class Wire:
    """A connection to the server, opened when something is sent over it."""

    port: int
    timeout_s: float = 60.0
    _reader: asyncio.StreamReader | None = field(default=None, init=False)
    _writer: asyncio.StreamWriter | None = field(default=None, init=False)

    async def send(self, data: bytes) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self, *, has_body: bool = True) -> Reply:
        """The next response; an interim one (100) is skipped.

        Args:
            has_body: False after HEAD, whose response has a length and no body.
        Raises: ConnectionError if the server closes the connection before; TimeoutError.
        """
        async with asyncio.timeout(self.timeout_s):
            while (reply := await self._reply(has_body)).status < 200:
                pass
        if reply.closes:
            self.close()
        return reply

    async def ask(self, data: bytes, *, has_body: bool = True) -> Reply:
        """What is answered to a request. Raises: see `reply`."""
        await self.send(data)
        return await self.reply(has_body=has_body)

    async def until_closed(self) -> bytes:
        """All that comes until the server closes the connection."""
        assert self._reader is not None
        async with asyncio.timeout(self.timeout_s):
            received = await self._reader.read()
        self.close()
        return received

    def end(self) -> None:
        """Say that no more will be sent."""
        assert self._writer is not None
        self._writer.write_eof()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _reply(self, has_body: bool) -> Reply:
        reader = self._reader
        assert reader is not None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head[:-4].decode("latin-1").split("\r\n")
            pairs = (line.partition(":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            status = int(first.split(" ", 2)[1])
            body = b""
            if status < 200 or status == 204 or not has_body:
                pass
            elif headers.get("transfer-encoding") == "chunked":
                body = b"".join([part async for part in _chunks(reader)])
            elif "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
            else:
                body = await reader.read()
        except asyncio.IncompleteReadError as error:
            self.close()
            raise ConnectionResetError(
                f"the server closed the connection after {error.partial[:200]!r}"
            ) from error
        return Reply(status, headers, body)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")


def request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A request with the headers that it needs, and these."""
    usual = {"Host": "127.0.0.1", "Content-Type": "application/json"}
    if body or method in ("POST", "PUT", "PATCH"):
        usual["Content-Length"] = str(len(body))
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in (usual | dict(headers or {})).items()]
    return "\r\n".join([*lines, "", ""]).encode("utf-8") + body


@asynccontextmanager
async def wires(port: int, count: int) -> AsyncIterator[list[Wire]]:
    """Connections that are closed in the end."""
    opened = [Wire(port) for _ in range(count)]
    try:
        yield opened
    finally:
        for each in opened:
            each.close()


def in_chunks(body: bytes, size: int) -> Iterator[bytes]:
    """A body as HTTP's chunks."""
    for place in range(0, len(body), size):
        part = body[place : place + size]
        yield b"%x\r\n%s\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


def first_read(connection: socket.socket, request: str) -> bytes:
    """What of the response has arrived when the first of it has."""
    connection.sendall(request.encode())
    return connection.recv(1 << 20)
