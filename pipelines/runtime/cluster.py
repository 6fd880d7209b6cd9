"""Joins a Ray cluster or starts one on this machine, and ends what it started.

The one place in `pipelines` that reads or sets environment variables. Ray takes most of its
settings from them, some when it is imported and some from the processes that it starts: they are
set here before either, and never over what the user has set.
"""

import atexit
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bert_core.errors import ConfigError, RaybertError, ResourceError
from bert_core.train.hardware import HUGE_PAGES
from pipelines.runtime.progress import say

if TYPE_CHECKING:
    from grpc import Channel
    from ray.job_submission import JobSubmissionClient

DATA_LOGGING = Path(__file__).with_name("ray_data_logging.yaml")
END_TIMEOUT_S = 5.0
KNOCK_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
RECOUNTS = 20
CLIENT_STARTS = 3
JOB_SERVER = "http://127.0.0.1:8265"  # where `ray start --head` puts it
HOW_TO_START = "`ray get-auth-token --generate` and `RAY_AUTH_MODE=token ray start --head`"

# For every process that drives Ray, and by inheritance for a cluster that it starts.
SETTINGS = {
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DATA_LOGGING_CONFIG": str(DATA_LOGGING),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Off by default: a report that one rank does not join would hang for good.
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    # The controller empties the queue of reports once an interval: at the default of 2 s, 60
    # reports take two minutes; at 0.2 s it takes a tenth of a core.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # How long it waits for resources before it looks again at what nodes there are: at the default
    # of 60 s a lost node costs 72 s. `count_nodes_anew` makes it look where workers failed.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "TOKENIZERS_PARALLELISM": "false",
    # Ray Tune's tables and logs beside ours, and a handler that takes Ctrl-C for a good end.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}

# Set while a cluster is started, so that its processes inherit it and are found by it.
MARKER = "RAYBERT_CLUSTER"
_started: str | None = None  # the marker of the cluster that this process started
_chose_auth_mode = False  # whether RAY_AUTH_MODE is ours, not the user's


def connect(
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    allow_open_cluster: bool = False,
) -> None:
    """Connect this process to Ray; nothing happens where it already is.

    A cluster started here ends with `disconnect`, with the process, and on SIGTERM.

    Args:
        address: the cluster to join (`host:6379`, `ray://host:10001`, `auto`), or `local` to start
            one whatever else is running. None joins that of RAY_ADDRESS, as inside a Ray job, and
            starts one where that is not set.
        num_cpus: CPUs of a cluster that is started, that of this machine where None. More than it
            has is allowed: Ray counts with the number only.
        allow_open_cluster: join, with a warning, a cluster that asks for no token.
    Raises: ResourceError if no cluster answers at `address`, it does not let us in, or it lets in
        everybody; ConfigError if that is not an address.
    """
    if is_connected():
        return
    if address is None or address == "auto":  # which RAY_ADDRESS overrides in Ray too
        address = os.environ.get("RAY_ADDRESS") or address or "local"
    _set_defaults(SETTINGS)
    previous = signal.getsignal(signal.SIGTERM)
    if address == "local":
        _start(num_cpus)
    else:
        _join(address, allow_open_cluster=allow_open_cluster)
    # NOTE: ray.init replaces the handler of SIGTERM by one that exits with 15.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, previous if callable(previous) else _exit_on_sigterm)


def is_connected() -> bool:
    """Whether this process is connected, without importing Ray to find out."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def disconnect() -> None:
    """Leave the cluster; one that this process started ends, and no process of it is left."""
    global _started, _chose_auth_mode
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    if _started is not None:
        _end_processes(_started)
        _started = None
    if _chose_auth_mode:  # it was for that cluster: the next one, or a child's, has its own
        os.environ.pop("RAY_AUTH_MODE", None)
        _chose_auth_mode = False


def has_gpus(count: int) -> bool:
    """Whether the cluster that this process is connected to has a GPU for each of `count`."""
    import ray

    return ray.cluster_resources().get("GPU", 0) >= count


def worker_environment() -> dict[str, str]:
    """Environment of a worker that trains; what is set in this process stays as it is."""
    return {name: os.environ.get(name, value) for name, value in HUGE_PAGES.items()}


def child_environment() -> dict[str, str]:
    """Environment of a child process that is to start a cluster, whatever this one is part of."""
    return {**os.environ, "RAY_ADDRESS": "local"}


def _set_defaults(settings: dict[str, str]) -> None:
    """Set the variables that the user has not."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _set_auth_mode(mode: str) -> None:
    """Say whether Ray's processes ask each other for the token, if the user has not said.

    Left unsaid, `ray.init` turns it on, `ray start` where there is a token, an explicit address
    never, and the three do not meet.
    """
    global _chose_auth_mode
    if "RAY_AUTH_MODE" in os.environ and not _chose_auth_mode:
        return
    os.environ["RAY_AUTH_MODE"], _chose_auth_mode = mode, True
    if "ray" in sys.modules:
        from ray._raylet import Config  # type: ignore[attr-defined]  # compiled, and no stub

        Config.initialize("")  # Ray has read it already: what it does itself after setting it


def _has_token() -> bool:
    """Whether Ray would find an authentication token, by its own rules."""
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return named or (Path.home() / ".ray" / "auth_token").is_file()


def _start(num_cpus: int | None) -> None:
    """Start a cluster of this process's own, that no one without its token can use."""
    global _started
    _set_auth_mode("token")
    if not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else Ray writes one to ~/.ray
    _started = os.environ[MARKER] = secrets.token_hex(8)
    atexit.register(disconnect)
    try:
        _init(address="local", num_cpus=num_cpus, include_dashboard=False)
    except BaseException:
        disconnect()
        raise
    finally:
        del os.environ[MARKER]


def _join(address: str, *, allow_open_cluster: bool) -> None:
    try:
        gcs = _running_cluster() if address == "auto" else address
        host = _knock(gcs, ("", "ray"), "host:6379, ray://host:10001, auto or local")
        asks = _asks_for_token(host, is_client_server=gcs.startswith("ray://"))
    except ConnectionError as error:
        raise _not_reached(address, error) from error
    _settle_token(address, asks=asks, allow_open_cluster=allow_open_cluster)
    from ray.exceptions import AuthenticationError

    environment = {"TOKENIZERS_PARALLELISM": os.environ["TOKENIZERS_PARALLELISM"]}
    for attempt in range(1, CLIENT_STARTS + 1):
        try:
            _init(address=gcs, runtime_env={"env_vars": environment})
            return
        # Ray's client gives a busy head 30 s to start a server for it, which no setting changes.
        except ConnectionAbortedError as error:
            if attempt == CLIENT_STARTS:
                raise _not_reached(address, error) from error
        except (ConnectionError, AuthenticationError) as error:
            raise _not_reached(address, error) from error


def job_client(
    address: str | None = None, *, allow_open_cluster: bool = False
) -> "JobSubmissionClient":
    """A client of the job server at `address`; Ray's own variables, and then its default, if None.

    Raises: ResourceError if none answers, it does not let us in, or it lets in everybody and that
        is not allowed; ConfigError if `address` is no http address.
    """
    variables = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    url = address or next((url for url in variables if url.startswith("http")), JOB_SERVER)
    try:
        _knock(url, ("http", "https"), f"an http address such as {JOB_SERVER}")
        asks = _job_server_asks_for_token(url)
    except ConnectionError as error:
        raise _not_reached(url, error) from error
    _settle_token(url, asks=asks, allow_open_cluster=allow_open_cluster)
    os.environ["RAY_API_SERVER_ADDRESS"] = url  # NOTE: Ray takes it over the argument
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(url)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        raise _not_reached(url, error) from error


def _running_cluster() -> str:
    """Address of the cluster that runs on this machine. Raises: ConnectionError if none does."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address("auto"))


def _settle_token(address: str, *, asks: bool, allow_open_cluster: bool) -> None:
    """Show the token to a cluster that asks for one, and to no other: Ray's actors die of it there.

    Raises: ResourceError if it asks for none and that is not allowed.
    """
    danger = "asks for no token: anyone who reaches its ports can run code on it"
    if not asks and not allow_open_cluster:
        raise ResourceError(
            f"wanted a Ray cluster that asks for a token, the one at {address} {danger}; restart "
            f"it with {HOW_TO_START}, or join it all the same with --allow_open_cluster"
        )
    if not asks:
        say(f"warning: the Ray cluster at {address} {danger}")
    _set_auth_mode("token" if asks else "disabled")


def _asks_for_token(host: str, *, is_client_server: bool) -> bool:
    """Whether Ray turns away a stranger, who calls without a token.

    A call of our own, not through Ray, which would show the token of this process.

    Args:
        host: with the port, of the cluster's GCS or of its client server (`ray://`).
    Raises: ConnectionError if nobody answers.
    """
    import grpc

    service = "RayletDriver/ClusterInfo" if is_client_server else "NodeInfoGcsService/CheckAlive"
    with _channel(host) as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{service}")(b"", timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ConnectionError(error.details()) from error
            return code is grpc.StatusCode.UNAUTHENTICATED
    return False


def _channel(host: str) -> "Channel":
    """As Ray opens it, with its certificates where they are asked for."""
    import grpc

    direct = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(host, direct)
    from ray._common.tls_utils import load_certs_from_env

    chain, key, authority = load_certs_from_env()
    return grpc.secure_channel(host, grpc.ssl_channel_credentials(authority, key, chain), direct)


def _job_server_asks_for_token(url: str) -> bool:
    """Whether it turns away a stranger. Raises: ConnectionError if nobody answers."""
    import httpx

    try:
        status = httpx.get(f"{url.rstrip('/')}/api/version", timeout=ANSWER_TIMEOUT_S).status_code
    except httpx.TransportError as error:
        raise ConnectionError(str(error)) from error
    return status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


def count_nodes_anew() -> None:
    """Have Ray count the nodes at once, for elastic training, and every second for a while.

    By itself Ray 2.60 does so every 20 s, and until then Ray Train waits for a node that is lost,
    which may be known only some time after its workers are. For the process of Ray Train's
    controller. Where Ray has no such actor, or another one, it takes its time.
    """
    import ray

    def count() -> None:
        with suppress(ValueError, TypeError, AttributeError, ray.exceptions.RayError):
            actor = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
            ray.get(actor.get_reserved_resources.remote("", recompute=True), timeout=5)

    def repeat() -> None:
        for _ in range(RECOUNTS):
            time.sleep(1)
            count()

    count()  # what Ray Train decides next rests on it
    threading.Thread(target=repeat, name="count-nodes", daemon=True).start()


def users_mistake(error: BaseException) -> RaybertError | None:
    """What the user can mend, where that is what failed: in a worker, or behind Ray's own error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RaybertError):
            return type(cause)(str(cause))
        # Ray Train's controller ends with the first, its tasks and actors with the second.
        named = getattr(cause, "controller_failure", None) or getattr(cause, "cause", None)
        cause = named or cause.__cause__
    return None


def _knock(address: str, schemes: tuple[str, ...], wanted: str) -> str:
    """Host and port of an address, if somebody listens there: Ray would try for minutes.

    Raises: ConnectionError if nobody does; ConfigError if it is not an address.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:  # it is no number
        port = None
    if parts.scheme not in schemes or not parts.hostname or port is None:
        raise ConfigError(
            f"address is {address}: wanted {wanted}; correct it, or the variable RAY_ADDRESS"
        )
    try:
        socket.create_connection((parts.hostname, port), timeout=KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error
    return parts.netloc


def _not_reached(address: str, error: Exception) -> ResourceError:
    reason = " ".join(str(error).split())
    return ResourceError(
        f"wanted a Ray cluster at {address}, could not reach or join it ({reason}): start one "
        f"with {HOW_TO_START}, or correct the address"
    )


def _init(**arguments: Any) -> None:
    import ray

    # What Ray has to say goes to its own files, <session>/logs; what fails is raised all the same.
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)


def _end_processes(marker: str) -> None:
    """End the processes that carry `marker`: SIGTERM, then SIGKILL.

    Ray ends its own; HAProxy, and what user code has started, it leaves behind.
    """
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in _processes(marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        deadline = time.monotonic() + END_TIMEOUT_S
        while _processes(marker) and time.monotonic() < deadline:
            time.sleep(0.05)


def _processes(marker: str) -> list[int]:
    """Ids of the living processes that were started with `marker` in their environment (Linux)."""
    wanted = f"{MARKER}={marker}\0".encode()
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if wanted in environment.read_bytes():
                found.append(int(environment.parent.name))
    return found


def _exit_on_sigterm(signum: int, frame: object) -> None:
    # An ordinary exit, so that `finally` blocks and `disconnect` run.
    sys.exit(128 + signum)
