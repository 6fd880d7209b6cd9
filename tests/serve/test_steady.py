"""Servers of this process."""

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from bert_core.errors import ResourceError
from serve import haproxy, steady
from serve.steady import wait_until_steady


def test_two_servers_on_a_machine_share_no_port() -> None:
    first, second = haproxy.settings(enabled=True), haproxy.settings(enabled=True)
    ports = [name for name in first if name.endswith("_PORT")]
    assert len(ports) == 3
    assert all(first[name] != second[name] for name in ports)
    assert haproxy.settings(enabled=False)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


class Restless(http.server.BaseHTTPRequestHandler):
    """Answers `/up`; the first three connections are closed after an answer."""

    protocol_version = "HTTP/1.1"
    closed = 0

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/up" else 404)
        self.send_header("Content-Length", "0")
        if Restless.closed < 3:
            Restless.closed += 1
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def restless() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Restless) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_a_server_is_steady_once_it_keeps_a_connection(
    restless: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "STEADY_S", 0.2)
    start_s = time.monotonic()
    wait_until_steady("127.0.0.1", restless, ["/up"], "here")
    assert Restless.closed == 3
    assert time.monotonic() - start_s > 0.3
    monkeypatch.setattr(steady, "STEADY_TIMEOUT_S", 0.2)
    with pytest.raises(ResourceError, match=r"from /up, /down within 0 s, .* the logs in here"):
        wait_until_steady("127.0.0.1", restless, ["/up", "/down"], "here")
