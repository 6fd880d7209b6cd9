"""A connection between a client and a server on this machine that a test can cut."""

import socket
import threading
from contextlib import suppress
from types import TracebackType


class Proxy:
    """Forwards a port of its own to another one; `cut` drops every connection and takes no new
    ones until `restore`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self.sent_bytes = 0
        """What clients have sent so far."""
        self._accept_in_background()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open = []

    def restore(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._accept_in_background()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cut()

    def _accept_in_background(self) -> None:
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._open += [client, server]
                for source, target in ((client, server), (server, client)):
                    arguments = (source, target, source is client)
                    threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_client: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.sent_bytes += len(data) if is_client else 0
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
