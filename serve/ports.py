"""TCP ports of this machine: is one free, who holds it, does it answer."""

import http.client
import os
import random
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bert_core.errors import ResourceError

STEADY_S = 1.0
"""How long a server has to answer over one connection until it counts as steady."""
STEADY_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 15.0
_LISTENING = "0A"
_NOBODYS_PORTS = range(20_000, 32_768)


def require_free(host: str, port: int) -> None:
    """Raises: ResourceError, naming who listens, if `port` cannot be listened on."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ResourceError(
            f"port {port} on {host}: wanted a free port, {_holder(port) or error.strerror}: "
            "end that, or choose another with --port"
        ) from error


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now, and that nobody is given: neither Ray's workers
    (10002 to 19999) nor, by Linux's default, connections to elsewhere (from 32768).
    """
    found: list[int] = []
    for port in random.sample(_NOBODYS_PORTS, len(_NOBODYS_PORTS)):
        if len(found) == count:
            return found
        with suppress(OSError), socket.create_server(("", port)):
            found.append(port)
    raise ResourceError(
        f"wanted {count} free ports from {_NOBODYS_PORTS[0]} to {_NOBODYS_PORTS[-1]}, there are "
        f"{len(found)}: end some of what listens there"
    )


def reachable(host: str) -> str:
    """Where to call a server of this machine that listens on `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def wait_until_steady(host: str, port: int, paths: Sequence[str]) -> None:
    """Wait until every path has answered 200 for `STEADY_S` over one connection.

    HAProxy starts anew a few times while replicas come up, and closes connections as it does: who
    calls at the first answer may be cut off at the second.
    Raises: ResourceError after `STEADY_TIMEOUT_S`.
    """
    connection = http.client.HTTPConnection(reachable(host), port, timeout=ANSWER_TIMEOUT_S)
    deadline_s = time.monotonic() + STEADY_TIMEOUT_S
    since_s = time.monotonic()
    while time.monotonic() < since_s + STEADY_S:
        if not all(_answers(connection, path) for path in paths):
            connection.close()
            since_s = time.monotonic()
            if since_s > deadline_s:
                raise ResourceError(
                    f"http://{host}:{port}: wanted answers from {', '.join(paths)} within "
                    f"{STEADY_TIMEOUT_S:.0f} s, none came from some: see Ray's logs, in "
                    "/tmp/ray/session_latest/logs/serve"
                )
        time.sleep(0.05)
    connection.close()


def _answers(connection: http.client.HTTPConnection, path: str) -> bool:
    """Whether `path` answers 200 and leaves the connection open."""
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    return response.status == 200 and not response.will_close


def _holder(port: int) -> str | None:
    """Who listens on `port`, as far as Linux tells: other users' processes stay nameless."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                columns = line.split()  # 1 address:port in hexadecimal, 3 state, 9 inode
                if columns[3] == _LISTENING and int(columns[1].split(":")[1], 16) == port:
                    inodes.add(f"socket:[{columns[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if inodes and os.readlink(link) in inodes:
                process = link.parts[2]
                name = Path(f"/proc/{process}/comm").read_text().strip()
                return f"{name} (process {process}) listens there"
    return "another process listens there" if inodes else None
