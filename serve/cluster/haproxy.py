"""Gives Ray Serve's settings, with and without HAProxy, and the ports and files that are private to
us.

Ray reads these settings as environment variables of Serve's processes. They are passed to Serve's
controller, whose children inherit them, so that a cluster needs no preparation and two servers on
one machine do not collide. Measured at 64 connections and trivial work: 2,663 requests per second,
against 310 with Ray's own proxy.
"""

import os
import shutil
import stat
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from bert_core.errors import ResourceError
from serve.cluster import haproxy_launcher, middlewares
from serve.cluster.haproxy_launcher import BINARY, CERTIFICATE, HOST
from serve.cluster.pass_of_proxy import REQUIRED
from tracking.store.ports import free_ports

LAUNCHER = "raybert-haproxy"
COMMON = {
    # Between the front and its models: by default 4 MiB, which an answer may exceed. Our own limits
    # bound requests, and with them answers.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{middlewares.__name__}:middlewares",
    # A replica that does not answer health checks does not answer its requests either: waiting for
    # it would keep them from other replicas.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # How often the controller looks at everything: with Ray's 0.1 s, it takes a third of the CPU
    # time of an idle server.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    # How often every process hands its metrics to Ray, which passes them on every 10 s; with Ray's
    # 100 ms, most wake-ups of an idle process are for this.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}
"""Settings both with HAProxy and without."""
# NOTE: short, since a Unix socket's path is limited to 108 bytes and Ray adds a node id of 56.
_FOLDER = Path(f"/tmp/raybert-haproxy-{os.getuid()}")


def settings(
    *,
    enabled: bool,
    certificate: str | None = None,
    host: str | None = None,
    asks_for_pass: bool = False,
) -> dict[str, str]:
    """Return the environment variables for Serve's controller; if not `enabled`, Ray's own proxy
    takes the requests.

    Creates the folder for HAProxy's files with permissions for this user only, since Ray opens the
    control socket in it to everyone.

    Args:
        host: where HAProxy listens; None means where Serve does.
        asks_for_pass: whether replicas require HAProxy's header (`serve.cluster.pass_of_proxy`).
    Raises: ResourceError if raybert is not installed, or others may write to that folder.
    """
    if not enabled:
        return COMMON | {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
    make_private(_FOLDER)
    metrics_port, stats_port, fallback_port = free_ports(3)
    return COMMON | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        BINARY: _launcher(),
        **({} if certificate is None else {CERTIFICATE: certificate}),
        **({} if host is None else {HOST: host}),
        **({REQUIRED: "1"} if asks_for_pass else {}),
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Otherwise Serve keeps a thousand lines of the log, and writes them all at once.
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
        # A replica that dies fails no request: unanswered ones are sent to another replica, which
        # is safe for inference, but not for anything that writes.
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        # Enough retries to find out that the only replica has died: requests in progress then wait
        # for the next replica. With Ray's 3, HAProxy closes their connections.
        "RAY_SERVE_HAPROXY_RETRIES": "5",
        # How long a replica waits before it ends; with Ray's 30 s, every roll-over takes as long.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        # Serve starts HAProxy anew once three checks in a row have failed: with Ray's 10 s, nothing
        # listens for half a minute. A check asks HAProxy for its status.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.25",
        # Fixed by default, which would allow only one server per machine.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        # By default a single folder per machine, owned by the first user to serve.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(_FOLDER / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(_FOLDER / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(_FOLDER / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(_FOLDER),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(_FOLDER / "server-state"),
    }


def make_private(folder: Path) -> None:
    """Make a folder that only this user can read or change, unless it exists.

    Raises: ResourceError if something else is there: whoever may write to the folder decides what
        HAProxy does with every request.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        got = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "a file"
    elif status.st_uid != os.getuid():
        got = f"one of the user {status.st_uid}"
    elif status.st_mode & 0o077:
        got = f"one that others may use (mode {status.st_mode & 0o777:o})"
    else:
        return
    raise ResourceError(
        f"{folder}: wanted a folder of this user ({os.getuid()}) alone for HAProxy's files, got "
        f"{got}: remove it, or set haproxy = false"
    )


def _launcher() -> str:
    """Return the path of the program that Ray Serve is to start as HAProxy, on every node.

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


def stop_taking(node_id: str) -> None:
    """Have HAProxy on this machine, under its Ray node's id, answer new requests with 503."""
    haproxy_launcher.stop_taking(_FOLDER / node_id)


def remove_files(node_id: str) -> None:
    """Remove the files that Serve wrote for HAProxy on this machine, under its Ray node's id."""
    shutil.rmtree(_FOLDER / node_id, ignore_errors=True)
