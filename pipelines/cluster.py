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

from bert_core.errors import ConfigError, ResourceError
from bert_core.train.hardware import HUGE_PAGES

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

DATA_LOGGING = Path(__file__).with_name("ray_data_logging.yaml")
END_TIMEOUT_S = 5.0
KNOCK_TIMEOUT_S = 5.0
RECOUNTS = 20
JOB_SERVER = "http://127.0.0.1:8265"  # where `ray start --head` puts it

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


def connect(*, address: str | None = None, num_cpus: int | None = None) -> None:
    """Connect this process to Ray; nothing happens where it already is.

    A cluster started here ends with `disconnect`, with the process, and on SIGTERM.

    Args:
        address: the cluster to join (`host:6379`, `ray://host:10001`, `auto`), or `local` to start
            one whatever else is running. None joins that of RAY_ADDRESS, as inside a Ray job, and
            starts one where that is not set.
        num_cpus: CPUs of a cluster that is started, that of this machine where None. More than it
            has is allowed: Ray counts with the number only.
    Raises: ResourceError if no cluster answers at `address`, or it does not let us in; ConfigError
        if that is not an address.
    """
    if is_connected():
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    _set_defaults(SETTINGS)
    previous = signal.getsignal(signal.SIGTERM)
    if address == "local":
        _start(num_cpus)
    else:
        _join(address)
    # NOTE: ray.init replaces the handler of SIGTERM by one that exits with 15.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, previous if callable(previous) else _exit_on_sigterm)


def is_connected() -> bool:
    """Whether this process is connected, without importing Ray to find out."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def disconnect() -> None:
    """Leave the cluster; one that this process started ends, and no process of it is left."""
    global _started
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    if _started is not None:
        _end_processes(_started)
        _started = None


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
    if "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_MODE"] = mode
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


def _join(address: str) -> None:
    if address != "auto":
        _knock(address, ("", "ray"), "host:6379, ray://host:10001, auto or local")
    _set_auth_mode_to_join(None if address == "auto" or "://" in address else address)
    from ray.exceptions import AuthenticationError

    environment = {"TOKENIZERS_PARALLELISM": os.environ["TOKENIZERS_PARALLELISM"]}
    try:
        _init(address=address, runtime_env={"env_vars": environment})
    except (ConnectionError, AuthenticationError) as error:
        raise _not_reached(address, error) from error


def job_client(address: str | None = None) -> "JobSubmissionClient":
    """A client of the job server at `address`; Ray's own variables, and then its default, if None.

    Raises: ResourceError if none answers, or it does not let us in; ConfigError if `address` is no
        http address.
    """
    variables = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    url = address or next((url for url in variables if url.startswith("http")), JOB_SERVER)
    _knock(url, ("http", "https"), f"an http address such as {JOB_SERVER}")
    _set_auth_mode_to_join()
    os.environ["RAY_API_SERVER_ADDRESS"] = url  # NOTE: Ray takes it over the argument
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(url)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        raise _not_reached(url, error) from error


def _set_auth_mode_to_join(gcs: str | None = None) -> None:
    """Show the token, where there is one: a job server that asks for none takes no notice.

    Args:
        gcs: address of a cluster to join as a driver, whose actors die where it shows a token that
            the cluster does not ask for.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        shown = _has_token() and (gcs is None or _asks_for_token(gcs))
        _set_auth_mode("token" if shown else "disabled")


def _asks_for_token(gcs: str) -> bool:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]  # no stub
    from ray.exceptions import AuthenticationError, RpcError

    Config.initialize("")
    try:
        GcsClient(address=gcs).get_all_node_info()
    except AuthenticationError:
        return True
    except RpcError:  # ray.init will say so
        return False
    finally:
        del os.environ["RAY_AUTH_MODE"]
    return False


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


def _knock(address: str, schemes: tuple[str, ...], wanted: str) -> None:
    """Raise ResourceError if nothing listens at `address`, which Ray would try for minutes."""
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
        raise _not_reached(address, error) from error


def _not_reached(address: str, error: Exception) -> ResourceError:
    reason = " ".join(str(error).split())
    return ResourceError(
        f"wanted a Ray cluster at {address}, could not reach or join it ({reason}): start one with "
        "`ray start --head`, or correct the address"
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
