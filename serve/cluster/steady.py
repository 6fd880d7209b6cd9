"""Waits until a server on this machine answers reliably."""

import http.client
import ssl
import time
from collections.abc import Sequence

from bert_core.errors import ResourceError

STEADY_S = 1.0
"""Time for which a server must answer over one connection to count as steady."""
STEADY_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 15.0


def reachable(host: str) -> str:
    """Return the address at which to reach a server on this machine that listens on `host`."""
    return "127.0.0.1" if host == "0.0.0.0" else host


def wait_until_steady(
    host: str, port: int, paths: Sequence[str], logs: str, *, tls: bool = False
) -> None:
    """Wait until every path has answered 200 for `STEADY_S` over a single connection.

    HAProxy restarts a few times while replicas come up, and closes connections when it does: a
    client that starts at the first answer may be cut off at the second.

    Args:
        logs: folder of the server's logs, for the message.
    Raises: ResourceError after `STEADY_TIMEOUT_S`.
    """
    scheme = "https" if tls else "http"
    connection = _connection(reachable(host), port, tls=tls)
    deadline_s = time.monotonic() + STEADY_TIMEOUT_S
    since_s = time.monotonic()
    while time.monotonic() < since_s + STEADY_S:
        if not all(_answers(connection, path) for path in paths):
            connection.close()
            since_s = time.monotonic()
            if since_s > deadline_s:
                raise ResourceError(
                    f"{scheme}://{host}:{port}: wanted answers from {', '.join(paths)} within "
                    f"{STEADY_TIMEOUT_S:.0f} s, got none from some: see the logs in {logs}"
                )
        time.sleep(0.05)
    connection.close()


def _connection(host: str, port: int, *, tls: bool) -> http.client.HTTPConnection:
    if not tls:
        return http.client.HTTPConnection(host, port, timeout=ANSWER_TIMEOUT_S)
    # The certificate is for the name that clients use, not for this machine's address.
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=ANSWER_TIMEOUT_S, context=unverified)


def _answers(connection: http.client.HTTPConnection, path: str) -> bool:
    """Whether `path` answers 200 and leaves the connection open."""
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    return response.status == 200 and not response.will_close
