"""Servers of this process."""

import http.server
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bert_core.errors import ResourceError
from serve.cluster import haproxy, steady
from serve.cluster.steady import wait_until_steady


def test_two_servers_on_a_machine_share_no_port() -> None:
    first, second = haproxy.settings(enabled=True), haproxy.settings(enabled=True)
    ports = [name for name in first if name.endswith("_PORT")]
    assert len(ports) == 3
    assert all(first[name] != second[name] for name in ports)
    assert haproxy.settings(enabled=False)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"


def test_with_and_without_haproxy_a_message_between_processes_has_no_limit_of_its_own() -> None:
    """gRPC's is 4 MiB, our own limits allow longer answers; it takes at most 2^31 - 1."""
    for enabled in (True, False):
        settings = haproxy.settings(enabled=enabled)
        assert settings["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"] == str(2**31 - 1)


def _linked(folder: Path) -> None:
    folder.with_name("other").mkdir(mode=0o700)
    folder.symlink_to(folder.with_name("other"))


def _anothers(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    try:
        os.chown(folder, 12345, 12345)
    except PermissionError:
        pytest.skip("this user may not give a folder to another")


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda folder: folder.mkdir(mode=0o755), "that others may use (mode 755)"),
        (lambda folder: (folder.mkdir(), folder.chmod(0o777)), "that others may use (mode 777)"),
        (lambda folder: folder.touch(), "a file"),
        (_linked, "a symbolic link"),
        (_anothers, "of the user 12345"),
    ],
    ids=["readable", "open to all", "a file", "a link", "another user's"],
)
def test_a_folder_that_others_may_use_takes_no_files_of_haproxy(
    tmp_path: Path, make: Callable[[Path], object], got: str
) -> None:
    folder = tmp_path / "haproxy"
    make(folder)
    with pytest.raises(ResourceError, match=re.escape(got)):
        haproxy.make_private(folder)


def test_a_folder_only_this_user_can_access_takes_them(tmp_path: Path) -> None:
    for _ in range(2):
        haproxy.make_private(tmp_path / "haproxy")
    assert stat.S_IMODE((tmp_path / "haproxy").stat().st_mode) == 0o700


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


def test_a_server_is_ready_once_it_keeps_a_connection(
    restless: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "STEADY_S", 0.2)
    start_s = time.monotonic()
    wait_until_steady("127.0.0.1", restless, ["/up"], "here")
    assert Restless.closed == 3
    assert time.monotonic() - start_s > 0.3
    monkeypatch.setattr(steady, "STEADY_TIMEOUT_S", 0.2)
    with pytest.raises(ResourceError, match=r"^https://127.0.0.1:\d+: wanted answers from /up"):
        wait_until_steady("127.0.0.1", restless, ["/up"], "here", tls=True)
    with pytest.raises(
        ResourceError, match=r"^http://.* from /up, /down within 0 s, .* the logs in here"
    ):
        wait_until_steady("127.0.0.1", restless, ["/up", "/down"], "here")
