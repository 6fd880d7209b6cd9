"""Finds free TCP ports on this machine, for code that starts servers, and who uses a port."""

import errno
import random
import socket
from contextlib import suppress

from bert_core.errors import ResourceError

_UNASSIGNED_PORTS = range(20_000, 32_768)


def require_free(host: str, port: int) -> None:
    """Check that this process could listen on `port`. Raises: ResourceError, naming the process
    that listens there, if it cannot."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ResourceError(
            f"port {port} on {host} is in use by {_holder(port)}: stop that process, or choose "
            "another port with --port"
            if error.errno == errno.EADDRINUSE
            else f"port {port} on {host}: wanted a port to listen on, got {error.strerror}: choose "
            "another with --port or --host"
        ) from error


def free_port(preferred: int) -> int:
    """Return `preferred`, or another free port if that is in use; on 127.0.0.1."""
    try:
        socket.create_server(("127.0.0.1", preferred)).close()
    except OSError:
        return free_ports(1)[0]
    return preferred


def free_ports(count: int) -> list[int]:
    """Return `count` ports that are free now and not assigned automatically: neither to Ray's
    workers (10002 to 19999) nor, by Linux's default, to outgoing connections (from 32768).

    Raises: ResourceError if there are too few.
    """
    free: list[int] = []
    for port in random.sample(_UNASSIGNED_PORTS, len(_UNASSIGNED_PORTS)):
        if len(free) == count:
            return free
        with suppress(OSError), socket.create_server(("", port)):
            free.append(port)
    raise ResourceError(
        f"wanted {count} free ports from {_UNASSIGNED_PORTS[0]} to {_UNASSIGNED_PORTS[-1]}, got "
        f"{len(free)}: stop some of the servers that use them"
    )


def _holder(port: int) -> str:
    """Return the name and id of the process that listens on `port`; "another process" if the system
    does not tell, as for another user's process."""
    import psutil

    for connection in psutil.net_connections("tcp"):
        listening = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if listening and connection.pid is not None:
            with suppress(psutil.Error):
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another process"
