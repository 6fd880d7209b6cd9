"""Ray Serve behind HAProxy: its settings, and ports and files private to us.

Ray reads these settings as environment variables of Serve's processes. They are passed to Serve's
controller, whose children inherit them, so that a cluster needs no preparation and two servers on
one machine do not collide. Measured at 64 connections and trivial work: 2,663 requests per second,
against 310 with Ray's own proxy.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from bert_core.errors import ResourceError
from serve import middlewares
from serve.haproxy_launcher import BINARY, CERTIFICATE
from tracking.ports import free_ports

LAUNCHER = "raybert-haproxy"
# NOTE: short, since a Unix socket's path is limited to 108 bytes and Ray adds a node id of 56.
_FOLDER = Path(f"/tmp/raybert-haproxy-{os.getuid()}")


def settings(*, enabled: bool, certificate: str | None = None) -> dict[str, str]:
    """Environment variables for Serve's controller. If off, Ray's own proxy takes the requests.

    Creates the folder for HAProxy's files with permissions for us alone, since Ray opens the
    control socket in it to everyone. Raises: ResourceError if raybert is not installed.
    """
    if not enabled:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    metrics_port, stats_port, fallback_port = free_ports(3)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        BINARY: _launcher(),
        **({} if certificate is None else {CERTIFICATE: certificate}),
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Which would keep a thousand lines of the log until they are written, all at once.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # A replica that dies fails no request: unanswered ones are sent to another replica, which
        # is safe for inference, but not for anything that writes.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # What has begun to answer is not sent again: so the answer comes at once or not at all.
        # And nobody waits forever for a replica.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{middlewares.__name__}:middlewares",
        # Enough to find out that the only replica has died: requests in progress then wait for the
        # next one. With Ray's 3, HAProxy closes their connections.
        "RAY_SERVE_HAPROXY_RETRIES": "5",
        # How long a replica waits before it ends; with Ray's 30 s, so does every roll-over.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # Serve starts HAProxy anew once three checks in a row have failed: with Ray's 10 s, nothing
        # listens for half a minute. A check asks HAProxy for what it says of itself.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",
        # Fixed ports by default, which allow one server per machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        # One folder per machine by default, owned by the first user to serve.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(_FOLDER / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(_FOLDER / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(_FOLDER / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(_FOLDER),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(_FOLDER / "server-state"),
    }


def _launcher() -> str:
    """The program that Ray Serve is to start as HAProxy, on every node.

    Raises: ResourceError if raybert is not installed.
    """
    places = [str(Path(sys.executable).parent), sysconfig.get_path("scripts")]
    launcher = shutil.which(LAUNCHER, path=os.pathsep.join([*places, os.defpath]))
    if launcher is None:
        raise ResourceError(
            f"wanted the program {LAUNCHER}, which comes with raybert, there is none in "
            f"{' or '.join(places)}: install raybert (pip install -e .), or set haproxy = false"
        )
    return launcher


def remove_files(node_id: str) -> None:
    """Remove the files that Serve wrote for HAProxy on this machine, under its Ray node's id."""
    shutil.rmtree(_FOLDER / node_id, ignore_errors=True)
