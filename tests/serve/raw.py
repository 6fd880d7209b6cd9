"""HTTP on a bare socket, where it matters how the bytes arrive."""

import socket


def first_read(connection: socket.socket, request: str) -> bytes:
    """What of the response has arrived when the first of it has."""
    connection.sendall(request.encode())
    return connection.recv(1 << 20)
