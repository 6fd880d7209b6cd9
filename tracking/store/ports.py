"""TCP ports of this machine, for code that starts servers: which are free, who uses one."""

import errno
import random
import socket
from contextlib import suppress

from bert_core.errors import ResourceError

_UNASSIGNED_PORTS = range(20_000, 32_768)


def require_free(host: str, port: int) -> None:
    """Raises: ResourceError, naming the process that listens, if `port` cannot be listened on."""
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
    """`preferred`, or another port if that is in use; on 127.0.0.1."""
    try:
        socket.create_server(("127.0.0.1", preferred)).close()
    except OSError:
        return free_ports(1)[0]
    return preferred


def free_ports(count: int) -> list[int]:
    """Ports that are free now and not assigned automatically: neither to Ray's workers (10002 to
    19999) nor, by Linux's default, to outgoing connections (from 32768).

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
    """The process that listens on `port`, if the system names it: not another user's."""
    import psutil

    for connection in psutil.net_connections("tcp"):
        listening = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if listening and connection.pid is not None:
            with suppress(psutil.Error):
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return "another process"
