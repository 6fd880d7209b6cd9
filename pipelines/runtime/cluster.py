"""Joins a Ray cluster or starts one on this machine, and stops the one it started.

The only place in `pipelines` that reads or sets environment variables. Ray takes most of its
settings from them, some at import and some in the processes that it starts: they are set here
before either happens, and never override what the user has set.
"""

import atexit
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from bert_core import storage
from bert_core.errors import ConfigError, RaybertError, ResourceError
from bert_core.storage.config import PREFIX as STORAGE
from bert_core.train.hardware import HUGE_PAGES
from pipelines.runtime.nodes import token_path
from pipelines.runtime.progress import counted, say

if TYPE_CHECKING:
    from grpc import Channel
    from ray.job_submission import JobSubmissionClient

DATA_LOGGING = Path(__file__).with_name("ray_data_logging.yaml")
END_TIMEOUT_S = 5.0
STORAGE_PATIENCE_S = 10.0
"""How long a process that was told to stop retries storage that fails, in all; a job has a minute
to stop."""
KNOCK_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
RECOUNTS = 20
ROOM_POLL_S = 2.0
CLIENT_STARTS = 3
JOB_SERVER = "http://127.0.0.1:8265"  # where `ray start --head` puts it
HOW_TO_START = "`ray get-auth-token --generate` and `RAY_AUTH_MODE=token ray start --head`"

# For every process that drives Ray, and for any cluster it starts, which inherits them.
SETTINGS = {
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DATA_LOGGING_CONFIG": str(DATA_LOGGING),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Off by default: a report that one rank does not join would hang forever.
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    # The controller drains the queue of reports once per interval: at the default of 2 s, 60
    # reports take two minutes; at 0.2 s it uses a tenth of a core.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # How long it waits for resources before it checks again which nodes exist: at the default of
    # 60 s a lost node costs 72 s. `count_nodes_anew` makes it check when workers have failed.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "TOKENIZERS_PARALLELISM": "false",
    # Ray Tune's tables and logs, next to ours, and a handler that treats Ctrl-C as success.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}

Gpus = Literal["none", "if there are any", "one each"]

# Set while a cluster is starting, so that its processes inherit it and can be found by it.
MARKER = "RAYBERT_CLUSTER"
_started: str | None = None  # the marker of the cluster that this process started
_chose_auth_mode = False  # whether we set RAY_AUTH_MODE, not the user


def connect(
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    allow_open_cluster: bool = False,
    in_own_session: bool = False,
) -> None:
    """Connect this process to Ray; does nothing if it already is connected.

    A cluster started here is stopped by `disconnect`, when the process exits, and on SIGTERM.

    Args:
        address: the cluster to join (`host:6379`, `ray://host:10001`, `auto`), or `local` to start
            one whatever else is running. None joins the one in RAY_ADDRESS, as inside a Ray job,
            and starts one if that is unset.
        num_cpus: CPUs of a cluster started here; None for as many as this machine has. More is
            allowed: to Ray this is only a number to schedule by.
        allow_open_cluster: join a cluster that asks for no token, with a warning.
        in_own_session: start a cluster out of reach of signals to the group of this process, which
            would end it before this process is done with it.
    Raises: ResourceError if no cluster answers at `address`, it refuses us, or it requires no
        token; ConfigError if `address` is not an address.
    """
    if is_connected():
        return
    address = address_to_join(address)  # RAY_ADDRESS overrides `auto` in Ray too
    set_defaults(SETTINGS)
    previous = signal.getsignal(signal.SIGTERM)
    if address is None:
        with _in_own_session() if in_own_session else nullcontext():
            _start(num_cpus)
    else:
        _join(address, allow_open_cluster=allow_open_cluster)
    # NOTE: ray.init replaces the SIGTERM handler with one that exits with 15.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, previous if callable(previous) else _exit_on_sigterm)


def require_address() -> None:
    """Raises: ConfigError if RAY_ADDRESS names no cluster, so that `connect` would start one."""
    if address_to_join(None) is None:
        raise ConfigError(
            "RAY_ADDRESS: wanted the address of a running Ray cluster, got none: set it, for "
            "example to auto on one of its nodes"
        )


def address_to_join(address: str | None) -> str | None:
    """The address of the running cluster that `connect` would join; None if it would start one."""
    if address is None or address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    return None if address == "local" else address


def started() -> str | None:
    """The marker of the cluster that this process started, which its processes carry."""
    return _started


def is_connected() -> bool:
    """Whether this process is connected; does not import Ray to find out."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def disconnect() -> None:
    """Leave the cluster; one that this process started is stopped, with all its processes."""
    global _started, _chose_auth_mode
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    if _started is not None:
        _end_processes(_started)
        _started = None
    if _chose_auth_mode:  # it held for that cluster only, not for the next one or a child's
        os.environ.pop("RAY_AUTH_MODE", None)
        _chose_auth_mode = False


def require_room(
    workers: int, threads: int, *, gpus: Gpus = "if there are any", wait: bool = False
) -> bool:
    """Check that the cluster that this process is connected to has room for all workers.

    Args:
        threads: CPUs of each.
        gpus: whether each is to get a GPU.
        wait: for nodes to come, as long as it lacks room; they are asked for, if Ray can start
            some.
    Returns: whether each gets a GPU.
    Raises: ResourceError if it has too few CPUs or GPUs; where each worker gets a GPU only if there
        are any, a joined cluster has too few if it has fewer than workers, but not none: the work
        would go to its CPUs, unnoticed.
    """
    lacks, found = _lacking(workers, threads, gpus)
    if lacks is None:
        return found
    if not wait:
        raise ResourceError(f"{lacks}, add nodes, or wait for some with --wait")
    say(f"{lacks}, or add nodes; waiting for some")
    bundle: dict[str, float] = {"CPU": threads, **({"GPU": 1} if gpus == "one each" else {})}
    with _asked_for([bundle] * workers):
        while lacks is not None:
            time.sleep(ROOM_POLL_S)
            lacks, found = _lacking(workers, threads, gpus)
    return found


@contextmanager
def _asked_for(bundles: list[dict[str, float]]) -> Iterator[None]:
    """Inside, Ray's autoscaler, if the cluster has one, starts nodes that it lacks for these.

    A placement group that waits, as Ray Train has one, is a demand that ends with the job; what
    `request_resources` asks for replaces what another job has asked for, and outlives both.
    """
    from ray.util import placement_group, remove_placement_group

    group = placement_group(bundles)
    try:
        yield
    finally:
        remove_placement_group(group)


def _lacking(workers: int, threads: int, gpus: Gpus) -> tuple[str | None, bool]:
    """What the cluster lacks, and what can be lowered, or None for nothing; and whether there is a
    GPU for each worker."""
    import ray

    has = ray.cluster_resources()
    cpus, found = has.get("CPU", 0), 0 if gpus == "none" else has.get("GPU", 0)
    lacks = None
    if cpus < workers * threads:
        lacks = (
            f"wanted {counted(workers * threads, 'CPU')} ({counted(workers, 'worker')} with "
            f"{counted(threads, 'thread')}), the cluster has {cpus:g}: lower num_workers or "
            "threads_per_worker"
        )
    elif gpus == "one each" and found < workers:
        lacks = (
            f"wanted {counted(workers, 'GPU')}, one per worker, the cluster has {found:g}: lower "
            "num_workers, or leave out require_gpus"
        )
    elif gpus != "none" and started() is None and 0 < found < workers:
        lacks = (
            f"wanted {workers} GPUs, one per worker, the cluster has {found:g}: lower num_workers "
            f"to {found:g}"
        )
    return lacks, found >= workers


def room(threads: int, *, one_gpu: bool) -> int:
    """How many workers of this size fit on the nodes that are alive, whether busy or idle."""
    import ray

    count = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            workers = has.get("CPU", 0) // threads
            count += int(min(workers, has.get("GPU", 0)) if one_gpu else workers)
    return count


@contextmanager
def preemption_watch() -> Iterator[None]:
    """Inside, Ray Train watches for notice of preemption only in a cluster that was joined: nobody
    takes away the one node of a cluster that was started here. What the user has set holds.
    """
    name = "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"
    if started() is None or name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


def _job_config() -> dict[str, Any]:
    """How the job that this process is part of was submitted; empty outside of a job."""
    return json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))


def job_metadata() -> dict[str, str]:
    """What the job that this process is part of was submitted with; empty outside of a job."""
    return _job_config().get("metadata", {})


def job_id() -> str | None:
    """Submission id of the Ray job that this process drives; None outside of one."""
    return job_metadata().get("job_submission_id")


def worker_environment() -> dict[str, str]:
    """Environment of a training worker; variables set in this process keep their values."""
    return {name: os.environ.get(name, value) for name, value in HUGE_PAGES.items()}


def storage_environment() -> dict[str, str]:
    """The settings of object stores that go with a run to all its processes; no credentials."""
    return {name: value for name, value in os.environ.items() if name.startswith(STORAGE)}


def child_environment() -> dict[str, str]:
    """Environment of a child process that starts its own cluster, whichever this one uses."""
    return {**os.environ, "RAY_ADDRESS": "local"}


def set_defaults(settings: dict[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _set_auth_mode(mode: str) -> None:
    """Set whether Ray's processes ask each other for the token, unless the user has set it.

    While it is unset, `ray.init` turns it on, `ray start` does so if there is a token, and an
    explicit address never does, so the three cannot connect to each other.
    """
    global _chose_auth_mode
    if "RAY_AUTH_MODE" in os.environ and not _chose_auth_mode:
        return
    os.environ["RAY_AUTH_MODE"], _chose_auth_mode = mode, True
    if "ray" in sys.modules:
        from ray._raylet import Config  # type: ignore[attr-defined]  # compiled, and no stub

        Config.initialize("")  # Ray has already read it: it does the same after setting it


def token() -> str | None:
    """The token that Ray would send; None if there is none, or it cannot be read."""
    path = token_path()
    if path is None:
        return os.environ["RAY_AUTH_TOKEN"]
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _start(num_cpus: int | None) -> None:
    """Start a cluster for this process alone; nobody can use it without its token."""
    global _started
    _set_auth_mode("token")
    if token() is None:
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


@contextmanager
def _in_own_session() -> Iterator[None]:
    """Inside, Ray starts its processes in sessions of their own."""
    import ray._private.services

    services: Any = ray._private.services  # NOTE: Ray has no setting for it
    usual = services.ConsolePopen
    services.ConsolePopen = partial(subprocess.Popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = usual


def _join(address: str, *, allow_open_cluster: bool) -> None:
    try:
        gcs = _running_cluster() if address == "auto" else address
        host = _knock(gcs, ("", "ray"), "host:6379, ray://host:10001, auto or local")
        refuses = partial(_refuses, host, is_client_server=gcs.startswith("ray://"))
        asks = refuses(None)
        _settle_token(address, asks=asks, allow_open_cluster=allow_open_cluster)
        if asks and refuses(token()):
            raise _wrong_token(address)
    except ConnectionError as error:
        raise _not_reached(address, error) from error
    from ray.exceptions import AuthenticationError

    environment = {"TOKENIZERS_PARALLELISM": os.environ["TOKENIZERS_PARALLELISM"]}
    environment |= storage_environment()
    # The workers of a job have these already, and Ray refuses a variable that is given twice.
    given = _job_config().get("runtime_env", {}).get("env_vars", {})
    environment = {name: environment[name] for name in environment.keys() - given.keys()}
    for attempt in range(1, CLIENT_STARTS + 1):
        try:
            _init(address=gcs, runtime_env={"env_vars": environment})
            return
        # Ray's client gives a busy head 30 s to start its server; no setting changes that.
        except ConnectionAbortedError as error:
            if attempt == CLIENT_STARTS:
                raise _not_reached(address, error) from error
        except (ConnectionError, AuthenticationError) as error:
            raise _not_reached(address, error) from error
        except RuntimeError as error:
            if "ersion mismatch" not in str(error):
                raise
            raise ResourceError(
                f"wanted a Ray cluster with the Ray and Python of this process at {address}: "
                f"{' '.join(str(error).split())}: use the cluster's here, or restart it with these"
            ) from error


def job_client(
    address: str | None = None, *, allow_open_cluster: bool = False
) -> "JobSubmissionClient":
    """A client of the job server at `address`; None uses Ray's variables, then its default.

    Raises: ResourceError if none answers, it refuses us, or it asks for no token and that is not
        allowed; ConfigError if `address` is not an http address.
    """
    variables = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    url = address or next((url for url in variables if url.startswith("http")), JOB_SERVER)
    try:
        _knock(url, ("http", "https"), f"an http address such as {JOB_SERVER}")
        asks = _job_server_refuses(url, None)
        _settle_token(url, asks=asks, allow_open_cluster=allow_open_cluster)
        if asks and _job_server_refuses(url, token()):
            raise _wrong_token(url)
    except ConnectionError as error:
        raise _not_reached(url, error) from error
    os.environ["RAY_API_SERVER_ADDRESS"] = url  # NOTE: Ray prefers it to the argument
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(url)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        raise _not_reached(url, error) from error
    # NOTE: Ray's client waits forever for a server that is gone without closing the connection.
    client._do_request = partial(client._do_request, timeout=ANSWER_TIMEOUT_S)  # type: ignore[method-assign]
    return client


def _running_cluster() -> str:
    """Address of the cluster running on this machine. Raises: ConnectionError if there is none."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address("auto"))


def _settle_token(address: str, *, asks: bool, allow_open_cluster: bool) -> None:
    """Send the token to a cluster that asks for one, and to no other, where Ray's actors would die.

    Raises: ResourceError if it asks for none and that is not allowed.
    """
    danger = "asks for no token: anyone who reaches its ports can run code on it"
    if not asks and not allow_open_cluster:
        raise ResourceError(
            f"wanted a Ray cluster that asks for a token, the one at {address} {danger}; restart "
            f"it with {HOW_TO_START}, or join it anyway with --allow_open_cluster"
        )
    if not asks:
        say(f"warning: the Ray cluster at {address} {danger}")
    _set_auth_mode("token" if asks else "disabled")


def _refuses(host: str, token: str | None, *, is_client_server: bool) -> bool:
    """Whether Ray refuses a call with this token, or without one.

    Calls directly, not through Ray, which would send this process's token, or try for minutes.

    Args:
        host: host and port of the cluster's GCS, or of its client server (`ray://`).
    Raises: ConnectionError if nobody answers.
    """
    import grpc

    service = "RayletDriver/ClusterInfo" if is_client_server else "NodeInfoGcsService/CheckAlive"
    with _channel(host) as channel:
        call = channel.unary_unary(f"/ray.rpc.{service}")
        try:
            call(b"", timeout=ANSWER_TIMEOUT_S, metadata=list(_authorization(token).items()))
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ConnectionError(error.details()) from error
            return code is grpc.StatusCode.UNAUTHENTICATED
    return False


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def _channel(host: str) -> "Channel":
    """A channel as Ray opens it, with its certificates if TLS is on."""
    import grpc

    direct = [("grpc.enable_http_proxy", 0)]
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return grpc.insecure_channel(host, direct)
    from ray._common.tls_utils import load_certs_from_env

    chain, key, authority = load_certs_from_env()
    return grpc.secure_channel(host, grpc.ssl_channel_credentials(authority, key, chain), direct)


def _job_server_refuses(url: str, token: str | None) -> bool:
    """Whether it refuses a call with this token, or without one.

    Raises: ConnectionError if nobody answers.
    """
    import httpx

    version, headers = f"{url.rstrip('/')}/api/version", _authorization(token)
    try:
        status = httpx.get(version, timeout=ANSWER_TIMEOUT_S, headers=headers).status_code
    except httpx.TransportError as error:
        raise ConnectionError(str(error)) from error
    return status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


def count_nodes_anew() -> None:
    """Make Ray count the nodes now, for elastic training, and every second for a while.

    By itself Ray 2.60 does so every 20 s, and until then Ray Train waits for a lost node; the loss
    of a node may become known some time after the loss of its workers. Call it in the process of
    Ray Train's controller. If Ray has no such actor, or a different one, nothing is sped up.
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

    count()  # Ray Train's next decision depends on it
    threading.Thread(target=repeat, name="count-nodes", daemon=True).start()


def drain(node_id: str, reason: str, seconds: float) -> Callable[[], bool]:
    """Tell Ray that a node will go: it gets no new work, and its workers are told.

    Args:
        seconds: until it goes.
    Returns: whether it has left the cluster; can be asked when this process is disconnected.
    Raises: ResourceError if Ray refuses.
    """
    import ray
    from ray.core.generated import autoscaler_pb2

    reasons: Any = autoscaler_pb2
    # NOTE: Ray has no public function for it; `ray drain-node`, which is hidden, does the same.
    raylet: Any = ray._raylet  # compiled, and no stub
    gcs = raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    ends_ms = int((time.time() + seconds) * 1000)
    accepted, why = gcs.drain_node(node_id, reasons.DRAIN_NODE_REASON_PREEMPTION, reason, ends_ms)
    if not accepted:
        raise ResourceError(f"wanted Ray to drain node {node_id}, it refuses: {why}")
    return lambda: not gcs.check_alive([ray.NodeID.from_hex(node_id)])[0]


def users_mistake(error: BaseException) -> RaybertError | None:
    """The error that the user can fix, if one caused this: in a worker, or behind Ray's error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RaybertError):
            return type(cause)(str(cause))
        # Ray Train's controller fails with the first, its tasks and actors with the second.
        wrapped = getattr(cause, "controller_failure", None) or getattr(cause, "cause", None)
        cause = wrapped or cause.__cause__
    return None


def _knock(address: str, schemes: tuple[str, ...], wanted: str) -> str:
    """Host and port of an address, after a test connection: Ray itself would try for minutes.

    Raises: ConnectionError if nothing listens there; ConfigError if it is not an address.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:  # it is not a number
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


def _wrong_token(address: str) -> ResourceError:
    path = token_path()
    place = "RAY_AUTH_TOKEN" if path is None else str(path)
    got = f"none in {place}" if token() is None else f"another one in {place}"
    return ResourceError(
        f"wanted the token of the Ray cluster at {address}, could not reach or join it with "
        f"{got}: copy the cluster's, which `ray get-auth-token` prints on its head, to "
        "~/.ray/auth_token or RAY_AUTH_TOKEN"
    )


def _init(**arguments: Any) -> None:
    import ray

    # Ray logs to its own files, <session>/logs; failures are raised either way.
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)


def _end_processes(marker: str) -> None:
    """End the processes that carry `marker`: SIGTERM, then SIGKILL.

    Ray ends its own, but leaves HAProxy and anything that user code has started.
    """
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_of(marker):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        deadline = time.monotonic() + END_TIMEOUT_S
        while processes_of(marker) and time.monotonic() < deadline:
            time.sleep(0.05)


def processes_of(marker: str) -> list[int]:
    """Ids of the running processes that have `marker` in their environment (Linux)."""
    wanted = f"{MARKER}={marker}\0".encode()
    pids = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process has ended, or is another user's
            if wanted in environment.read_bytes():
                pids.append(int(environment.parent.name))
    return pids


def exit_on_sigterm() -> None:
    """Have SIGTERM exit normally, so that `finally` blocks run, unless it is handled already."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_sigterm)


def _exit_on_sigterm(signum: int, frame: object) -> None:
    storage.give_up_after(STORAGE_PATIENCE_S)
    # A normal exit, so that `finally` blocks and `disconnect` run.
    sys.exit(128 + signum)
