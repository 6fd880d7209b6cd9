"""TCP ports of this machine: is one free, and if not, who holds it."""

import os
import socket
from contextlib import suppress
from pathlib import Path

from bert_core.errors import ResourceError

_LISTENING = "0A"


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
    """Ports that nobody listened on just now."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    try:
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


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
