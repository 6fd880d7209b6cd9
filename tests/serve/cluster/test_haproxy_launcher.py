"""HAProxy itself with the config that we make of Ray's."""

import asyncio
import http.client
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fastapi import FastAPI

from bert_core.errors import ConfigError
from serve.cluster import haproxy_launcher
from tests.serve import live
from tests.waiting import wait_until
from tracking.store.ports import free_ports

# What matters here of Ray's template, in its words.
CONFIG = """global
    log {folder}/log.sock local0 info
    stats socket {folder}/admin.sock mode 666 level admin
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    log global
    option httplog
    option splice-request
    option splice-response
    errorfile 503 {folder}/500.http
    balance leastconn
frontend prometheus
    bind :{metrics}
    mode http
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind *:{port}
    acl is_app path_beg /app
    use_backend app if is_app
    acl is_gone path_beg /gone
    use_backend gone if is_gone
    acl is_cut path_beg /cut
    use_backend cut if is_cut
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
backend app
    server one 127.0.0.1:{upstream}
backend cut
    server one 127.0.0.1:{silent}
backend gone
    server one 127.0.0.1:{nothing}
listen stats
  bind *:{stats}
  stats enable
"""


@pytest.fixture
def upstream() -> Iterator[int]:
    app = FastAPI()

    @app.post("/app")
    async def answer() -> dict[str, str]:
        return {"answer": "yes"}

    @app.post("/app/slow")
    async def take_time() -> dict[str, str]:
        await asyncio.sleep(2)
        return {"answer": "yes"}

    with live.running(app) as url:
        yield int(url.rpartition(":")[2])


class Proxy:
    """A running HAProxy, started as Ray Serve starts it."""

    def __init__(
        self, folder: Path, upstream: int, *, descriptors: int | None = None, certificate: str = ""
    ) -> None:
        self.port, self.metrics, self.stats, nothing = free_ports(4)
        self.silent = socket.create_server(("127.0.0.1", 0))  # which ends without an answer
        silent = self.silent.getsockname()[1]
        threading.Thread(target=self._end_every_request).start()
        self.log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.log.bind(str(folder / "log.sock"))
        self.log.settimeout(20)
        config = folder / "haproxy.cfg"
        config.write_text(
            CONFIG.format(
                folder=folder,
                port=self.port,
                metrics=self.metrics,
                stats=self.stats,
                upstream=upstream,
                nothing=nothing,
                silent=silent,
            )
        )
        command = [sys.executable, "-m", "serve.cluster.haproxy_launcher", "-db", "-f", str(config)]
        if descriptors is not None:
            command = ["prlimit", f"--nofile={descriptors}", *command]
        self.process = subprocess.Popen(
            command, env={**os.environ, haproxy_launcher.CERTIFICATE: certificate}
        )
        wait_until(
            "HAProxy has its socket", (folder / "admin.sock").exists,
            timeout_s=20, every_s=0.02, process=self.process,
        )  # fmt: skip

    def _end_every_request(self) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                connection, _ = self.silent.accept()
                connection.recv(4096)
                connection.close()

    def raw(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of what is answered to a request over a connection of its own."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(request)
            response = http.client.HTTPResponse(connection)
            response.begin()
            return response.status, response.read()

    def ask(self, path: str, method: str = "POST") -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, response.headers, body

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.silent.shutdown(socket.SHUT_RDWR)
        self.silent.close()


@pytest.fixture
def proxy(tmp_path: Path, upstream: int) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path, upstream)
    yield proxy
    proxy.end()


def test_a_request_without_a_path_lists_the_methods_and_plaintext_http_2_is_refused(
    proxy: Proxy,
) -> None:
    status, headers, body = proxy.ask("*", "OPTIONS")
    assert (status, headers["Allow"], body) == (200, "GET, POST, OPTIONS", b"")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    for sent in (preface, preface[:18]):
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as connection:
            connection.sendall(sent)
            received = b""
            while part := connection.recv(4096):
                received += part
        assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("target", ["\\app", "app", "?a=b", "a:80"])
def test_a_target_that_is_not_a_path_is_refused(proxy: Proxy, target: str) -> None:
    """RFC 9112, 3.2: a recipient of an invalid request-line should answer 400. A 503 would have
    clients try again for ever."""
    method = "CONNECT" if target == "a:80" else "GET"
    status, body = proxy.raw(f"{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert (status, json.loads(body)["error_type"]) == (400, "not_http")


def test_an_empty_body_and_a_full_address_pass(proxy: Proxy) -> None:
    body = b"POST http://a/app HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    assert proxy.raw(body)[0] == 200
    # HAProxy answers 413 in HTML to a body of HTTP/1.0's GET by itself (its management guide,
    # `h1-accept-payload-with-any-method`).
    status, body = proxy.raw(b"GET /app HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
    assert (status, json.loads(body)) == (405, {"detail": "Method Not Allowed"})


def test_a_stopping_server_refuses_new_requests_and_answers_those_in_progress(
    proxy: Proxy, tmp_path: Path
) -> None:
    slow = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    slow.request("POST", "/app/slow")
    time.sleep(0.5)  # until it is there
    haproxy_launcher.stop_taking(tmp_path)
    for path in ("/app", "/app/slow", "/elsewhere", "/"):
        status, headers, body = proxy.ask(path)
        assert (status, headers["Content-Type"]) == (503, "application/json")
        assert headers["Retry-After"] == str(haproxy_launcher.RETRY_AFTER_S)
        assert json.loads(body)["error"].startswith("the server is stopping")
    assert slow.getresponse().status == 200
    slow.close()
    # One that Serve starts anew reads the file.
    assert (tmp_path / haproxy_launcher.STOPPING).read_text() == "stopping yes\n"
    haproxy_launcher.write_files(tmp_path)
    assert (tmp_path / haproxy_launcher.STOPPING).read_text() == "stopping yes\n"


@pytest.mark.guard
def test_requests_pass_and_errors_of_the_proxy_are_json_with_their_own_status(
    proxy: Proxy,
) -> None:
    status, _, body = proxy.ask("/app")
    assert (status, json.loads(body)) == (200, {"answer": "yes"})
    # A replica that ends, none, no application at all.
    for path in ("/cut", "/gone", "/elsewhere"):
        status, headers, body = proxy.ask(path)
        assert status == 503
        assert headers["Retry-After"] == str(haproxy_launcher.RETRY_AFTER_S)
        assert headers["Content-Type"] == "application/json"
        assert json.loads(body)["error_type"] == "not_ready"


def test_with_few_file_descriptors_it_takes_fewer_connections(
    tmp_path: Path, upstream: int
) -> None:
    proxy = Proxy(tmp_path, upstream, descriptors=1024)
    try:
        status, _, body = proxy.ask("/app")
        assert (status, json.loads(body)) == (200, {"answer": "yes"})
        assert "maxconn 307\n" in (tmp_path / "haproxy.cfg").read_text()
    finally:
        proxy.end()


def test_metrics_and_statistics_listen_on_loopback_only(proxy: Proxy) -> None:
    listening = {
        int(port, 16): address
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        for address, _, port in [line.split()[1].partition(":")]
        if line.split()[3] == "0A"
    }
    assert listening[proxy.port] == "00000000"
    assert listening[proxy.metrics] == listening[proxy.stats] == "0100007F"


def test_requests_that_uvicorn_cannot_read_get_json(proxy: Proxy) -> None:
    status, headers, body = proxy.ask("/app", method="BREW")
    assert (status, headers["Content-Type"]) == (400, "application/json")
    assert json.loads(body)["error_type"] == "not_http"


@pytest.mark.parametrize(
    ("request_line", "end"),
    [
        ("POST /app?text=zyxmarker", "POST"),
        ("GET /zyxmarker", "GET"),
        ("zyxmarker /app", "other"),
        ("POST /app/zyx marker", "-"),  # no HTTP
    ],
)
def test_its_log_has_no_path_and_only_known_methods(
    proxy: Proxy, request_line: str, end: str
) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as connection:
        connection.sendall(f"{request_line} HTTP/1.0\r\n\r\n".encode())
        status = int(connection.recv(4096).split()[1])
    line = ""
    while f" {status} " not in line:  # it logs its start as well
        line = proxy.log.recv(4096).decode()
        assert "zyx" not in line
        assert "text" not in line
    assert line.split()[-1] == end


@pytest.mark.guard
def test_it_ends_with_the_process_that_started_it_but_for_requests_in_progress(
    tmp_path: Path, upstream: int
) -> None:
    code = (
        "import sys, pathlib\n"
        "from tests.serve.cluster.test_haproxy_launcher import Proxy\n"
        "proxy = Proxy(pathlib.Path(sys.argv[1]), int(sys.argv[2]))\n"
        "print(proxy.process.pid, proxy.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(upstream)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        pid, port = map(int, starter.stdout.readline().split())
        assert Path(f"/proc/{pid}/comm").read_text().strip() == "haproxy"
        assert os.getsid(pid) == pid  # a Ctrl-C is not for it
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/app/slow")
        starter.send_signal(signal.SIGKILL)
    assert connection.getresponse().status == 200
    connection.close()
    wait_until("HAProxy has ended", lambda: _state(pid) == "Z", timeout_s=10, every_s=0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_it_speaks_tls_with_a_certificate(tmp_path: Path, upstream: int) -> None:
    chain, pem = live.certificate(tmp_path)
    proxy = Proxy(tmp_path, upstream, certificate=str(pem))
    try:
        context = ssl.create_default_context(cafile=str(chain))
        connection = http.client.HTTPSConnection(
            "localhost", proxy.port, timeout=30, context=context
        )
        connection.request("POST", "/app")
        assert connection.getresponse().read() == b'{"answer":"yes"}'
        connection.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            proxy.ask("/app")
    finally:
        proxy.end()


def test_a_backend_gives_up_if_only_serves_own_proxy_is_left(tmp_path: Path) -> None:
    waiting = "  server fallback 127.0.0.1:1 check backup"
    some = f"backend some\n  server one 127.0.0.1:2 check\n{waiting}"
    config = f"defaults\n{some}\nbackend none\n{waiting}\n"
    *_, some, none = haproxy_launcher.rewritten(config, tmp_path).split("backend ")
    assert "timeout server" not in some
    assert f"timeout server {haproxy_launcher.WITHOUT_REPLICA_S}s" in none
    assert f"errorfile 504 {tmp_path / '503.http'}" in none


def test_it_listens_where_the_server_was_told_to(tmp_path: Path) -> None:
    """While Serve listens on 127.0.0.1 alone."""
    config = "defaults\nfrontend http_frontend\n    bind 127.0.0.1:80\nlisten stats\n  bind *:81\n"
    for host, wanted in (("0.0.0.0", "bind 0.0.0.0:80"), (None, "bind 127.0.0.1:80")):
        lines = haproxy_launcher.rewritten(config, tmp_path, "a.pem", host=host).splitlines()
        binds = [line.strip() for line in lines if "bind " in line]
        assert binds == [f"{wanted} ssl crt a.pem alpn http/1.1", "bind 127.0.0.1:81"]


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_node_shuts_others_out_of_the_folder_with_the_control_socket(
    tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "node"
    folder.mkdir(mode=0o755)
    haproxy_launcher.make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tmp_path.chmod(mode)  # others may put another in its place, unless it is as sticky as /tmp
    if mode == 0o777:
        with pytest.raises(ConfigError, match="only this user"):
            haproxy_launcher.make_private(folder)
    else:
        haproxy_launcher.make_private(folder)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "30s", "1000000"])
def test_a_patience_that_is_not_a_number_of_seconds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"REPLICA_PATIENCE_S: wanted whole seconds, from 1"):
        haproxy_launcher.patience_s(text)
    assert haproxy_launcher.patience_s("8") == 8
