"""An HTTP proxy in front of an S3 server that fails as object stores and networks do, at moments
that a seed decides."""

import http.client
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal[
    "slow_down",  # 503 instead of doing it
    "slow_down_and_wait",  # with Retry-After
    "reset",  # before the request is done
    "lost_answer",  # it is done, then the connection is reset
    "late_error",  # it is done, then the answer is 503
    "reset_in_upload",  # half of its body has been read
    "truncate",  # half of the answer's body, then the connection ends
    "reset_in_body",
    "delay",  # the answer comes, later
    "silence",  # nothing comes for a while, then the connection ends; it is not done
    "silence_after",  # it is done, nothing comes for a while
    "silence_in_body",  # half of the answer's body, then nothing for a while
    "away",  # the connection ends at once
]
FAULTS: tuple[Fault, ...] = (
    "slow_down", "slow_down_and_wait", "reset", "lost_answer", "late_error", "reset_in_upload",
    "truncate", "reset_in_body", "delay", "silence", "silence_after", "silence_in_body",
)  # fmt: skip

HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "date", "server", "content-length")


def xml_error(code: str, message: str, more: str = "") -> bytes:
    """An error as S3 writes it."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>"
    ).encode()


SLOW_DOWN = xml_error("SlowDown", "Please reduce your request rate.")


@dataclass
class Request:
    """One request that came in."""

    method: str
    path: str
    """With its query."""
    signed_by: str | None
    """The id of its access key; None if it is not signed."""
    fault: Fault | None


Decide = Callable[[str, str], Fault | None]

Refuse = Callable[[str | None], tuple[int, bytes] | None]
"""Id of the access key → status and body of the answer, if the request is to be refused."""


@dataclass
class FaultProxy:
    """The proxy. `decide` and `refuse` may be changed while it runs."""

    address: str
    decide: Decide
    """Method and path with query → what goes wrong, if anything."""
    silence_s: float
    delay_s: float
    refuse: Refuse = lambda signed_by: None
    ignores: tuple[str, ...] = ()
    """Names of headers that the server does not get, in lower case."""
    seen: list[Request] = field(default_factory=list)


def seeded(seed: int, share: float = 0.3, faults: tuple[Fault, ...] = FAULTS) -> Decide:
    """Lets `share` of the requests go wrong."""
    rng, lock = random.Random(seed), threading.Lock()

    def decide(method: str, path: str) -> Fault | None:
        with lock:
            return rng.choice(faults) if rng.random() < share else None

    return decide


def no_fault(method: str, path: str) -> Fault | None:
    """Passes everything on."""
    return None


class Hold:
    """Lets the first request of a kind wait on its way to the server until it is released."""

    def __init__(self, method: str, pattern: str) -> None:
        """`pattern` is searched in the path with its query."""
        self._method, self._pattern = method, pattern
        self.began, self.released = threading.Event(), threading.Event()

    def __call__(self, method: str, path: str) -> Fault | None:
        is_first = not self.began.is_set()
        if is_first and method == self._method and re.search(self._pattern, path):
            self.began.set()
            self.released.wait()
        return None


@contextmanager
def fault_proxy(
    server: str, decide: Decide = no_fault, *, silence_s: float = 2.0, delay_s: float = 0.05
) -> Iterator[FaultProxy]:
    """A proxy on a port of this machine for the S3 server at the address `server`.

    Args:
        silence_s: how long `silence…` lasts, before the connection ends.
        delay_s: how long `delay` lasts.
    """
    behind = urlsplit(server).netloc
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def handle_one_request(self) -> None:
            with suppress(ConnectionError, TimeoutError):
                super().handle_one_request()
                return
            self.close_connection = True

        def serve(self) -> None:
            signed = re.search(r"Credential=([^/]+)/", self.headers.get("authorization") or "")
            signed_by = signed[1] if signed else None
            refusal = proxy.refuse(signed_by)
            fault = None if refusal else proxy.decide(self.command, self.path)
            proxy.seen.append(Request(self.command, self.path, signed_by, fault))
            length = int(self.headers.get("content-length") or 0)
            if fault == "away":
                self.end(reset=False)
                return
            if fault == "reset_in_upload" and length:
                self.rfile.read(length // 2)
                self.end(reset=True)
                return
            body = self.rfile.read(length)
            if refusal:
                self.answer(*refusal)
            elif fault in ("slow_down", "slow_down_and_wait"):
                more = {"Retry-After": "1"} if fault == "slow_down_and_wait" else {}
                self.answer(503, SLOW_DOWN, more)
            elif fault in ("reset", "reset_in_upload"):
                self.end(reset=True)
            elif fault == "silence":
                ended.wait(proxy.silence_s)
                self.end(reset=False)
            else:
                self.pass_on(body, fault)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve  # noqa: N815

        def pass_on(self, body: bytes, fault: Fault | None) -> None:
            connection = http.client.HTTPConnection(behind, timeout=60)
            try:
                passed = {k: v for k, v in self.headers.items() if k.lower() not in proxy.ignores}
                connection.request(self.command, self.path, body, passed)
                response = connection.getresponse()
                data = response.read()
            finally:
                connection.close()
            headers = {
                name: value
                for name, value in response.getheaders()
                if name.lower() not in HOP_BY_HOP
            }
            if self.command == "HEAD":
                headers["Content-Length"] = response.headers["Content-Length"] or "0"
            half = data[: len(data) // 2]
            if fault == "lost_answer":
                self.end(reset=True)
            elif fault == "late_error":
                self.answer(503, SLOW_DOWN)
            elif fault == "silence_after":
                ended.wait(proxy.silence_s)
                self.end(reset=False)
            elif fault in ("truncate", "reset_in_body", "silence_in_body") and data:
                self.answer(response.status, half, headers, length=len(data))
                if fault == "silence_in_body":
                    ended.wait(proxy.silence_s)
                self.end(reset=fault == "reset_in_body")
            else:
                if fault == "delay":
                    time.sleep(proxy.delay_s)
                self.answer(response.status, data, headers)

        def answer(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str] | None = None,
            length: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if "Content-Length" not in (headers or {}):
                self.send_header("Content-Length", str(len(data) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
            self.wfile.flush()

        def end(self, *, reset: bool) -> None:
            if reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def shutdown_request(self, request: object) -> None:
            # No polite end, which would turn a reset into one.
            request.close()  # type: ignore[attr-defined]

    listening = Server(("127.0.0.1", 0), Handler)
    proxy = FaultProxy(
        f"http://127.0.0.1:{listening.server_address[1]}", decide, silence_s, delay_s
    )
    thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield proxy
    finally:
        ended.set()
        listening.shutdown()
        listening.server_close()
        thread.join(timeout=30)
