"""Joins a Ray cluster or starts one on this machine, and stops the one it started.

Ray takes most of its settings from environment variables, some at import and some in the processes
that it starts: they are set here before either happens, and never override what the user has set.
In `pipelines` only this module, `ray_token` and `nodes` read or set environment variables.
"""

import atexit
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bert_core.errors import ConfigError, RaybertError, ResourceError
from bert_core.storage.config import PREFIX as STORAGE
from bert_core.train.hardware import HUGE_PAGES
from bert_core.wording import in_one_line
from pipelines.runtime import own_ray, ray_token
from pipelines.runtime.processes import MARKER, end_processes, exit_normally

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

DATA_LOGGING = Path(__file__).with_name("ray_data_logging.yaml")
KNOCK_TIMEOUT_S = 5.0
CLIENT_STARTS = 3
JOB_SERVER = "http://127.0.0.1:8265"  # where `ray start --head` puts it

# For every process that drives Ray, and for any cluster it starts, which inherits them.
SETTINGS = {
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DATA_LOGGING_CONFIG": str(DATA_LOGGING),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Off by default: a report in which one rank does not take part would hang forever.
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
    # The controller drains the queue of reports once per interval: at the default of 2 s, 60
    # reports take two minutes; at 0.2 s it uses a tenth of a core.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # How long it waits for resources before it checks again which nodes exist: at the default of
    # 60 s a lost node costs 72 s. `capacity.recount_nodes` makes it check when workers have failed.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "TOKENIZERS_PARALLELISM": "false",
    # Ray Tune's tables and logs, next to ours, and a handler that treats Ctrl-C as success.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}

# For a cluster started here, which does the user's own work.
OF_OUR_OWN = {
    # By default 15, so that workers get little CPU next to other processes.
    "RAY_worker_niceness": "0",
    # Off: every process reports each second which tasks it has run, and nothing asks for them.
    "RAY_task_events_report_interval_ms": "0",
}

# For a cluster whose processes all have an environment of their own, as those of Ray Train and Ray
# Serve: the workers that Ray starts in advance, one per CPU, would stay unused.
NO_SPARE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}

_started: str | None = None  # the marker of the cluster that this process started


def connect(
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    allow_open_cluster: bool = False,
    in_own_session: bool = False,
    worker_setup: str | None = None,
) -> None:
    """Connect this process to Ray; does nothing if it is already connected.

    A cluster started here is stopped by `disconnect`, when the process exits, and on SIGTERM.

    Args:
        address: the cluster to join (`host:6379`, `ray://host:10001`, `auto`), or `local` to start
            one even if another is running. None joins the cluster in RAY_ADDRESS, as inside a Ray
            job, and starts one if that is unset.
        num_cpus: CPUs of a cluster started here; None for as many as this machine has. More is
            allowed: to Ray this is only a number to schedule by.
        allow_open_cluster: join a cluster that requires no token, with a warning.
        in_own_session: start the cluster's processes in sessions of their own. Signals to this
            process's group would otherwise end them before this process is done with them.
        worker_setup: function that each worker of a cluster started here calls first, by its full
            name.
    Raises: ResourceError if no cluster answers at `address`, it refuses us, or it requires no
        token; ConfigError if `address` is not an address.
    """
    if is_connected():
        return
    address = address_to_join(address)  # RAY_ADDRESS overrides `auto` in Ray too
    set_defaults(SETTINGS)
    previous = signal.getsignal(signal.SIGTERM)
    if address is None:
        with own_ray.in_own_session() if in_own_session else nullcontext():
            _start(num_cpus, worker_setup)
    else:
        _join(address, allow_open_cluster=allow_open_cluster)
    # NOTE: ray.init replaces the SIGTERM handler with one that exits with 15.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, previous if callable(previous) else exit_normally)


def require_address() -> None:
    """Raise ConfigError if RAY_ADDRESS names no cluster, so that `connect` would start one."""
    if address_to_join(None) is None:
        raise ConfigError(
            "RAY_ADDRESS: wanted the address of a running Ray cluster, got none: set it, for "
            "example to auto on one of its nodes"
        )


def address_to_join(address: str | None) -> str | None:
    """Return the address of the running cluster that `connect` would join; None if it would start
    one."""
    if address is None or address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    return None if address == "local" else address


def started() -> str | None:
    """Return the marker of the cluster that this process started, which all its processes carry;
    None if it started none."""
    return _started


def is_connected() -> bool:
    """Whether this process is connected; does not import Ray to find out."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def disconnect() -> None:
    """Leave the cluster; one that this process started is stopped, with all its processes."""
    global _started
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    if _started is not None:
        end_processes(_started)
        _started = None
    ray_token.reset_auth_mode()


@contextmanager
def preemption_watch() -> Iterator[None]:
    """In a cluster that was started here, turn off Ray Train's preemption watcher for the block.

    Its only node is this machine, which is not reclaimed. A setting of the user's is kept.
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
    """Return how this process's job was submitted; empty outside of a job."""
    return json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))


def job_metadata() -> dict[str, str]:
    """Return the metadata that this process's job was submitted with; empty outside of a job."""
    return _job_config().get("metadata", {})


def job_id() -> str | None:
    """Return the submission id of the Ray job that this process drives; None outside of a job."""
    return job_metadata().get("job_submission_id")


def worker_environment() -> dict[str, str]:
    """Return the environment of a training worker; variables set in this process keep their
    values."""
    return {name: os.environ.get(name, value) for name, value in HUGE_PAGES.items()}


def storage_environment() -> dict[str, str]:
    """Return the object-store settings, without credentials, that all processes of a run need."""
    return {name: value for name, value in os.environ.items() if name.startswith(STORAGE)}


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that starts its own cluster, whichever this one
    uses."""
    return {**os.environ, "RAY_ADDRESS": "local"}


def set_defaults(settings: dict[str, str]) -> None:
    """Set the variables that the user has not set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _start(num_cpus: int | None, worker_setup: str | None) -> None:
    """Start a cluster for this process only; nobody can use it without its token."""
    global _started
    set_defaults(OF_OUR_OWN)
    ray_token.set_auth_mode("token")
    if ray_token.token() is None:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # otherwise Ray writes one to ~/.ray
    _started = os.environ[MARKER] = secrets.token_hex(8)
    atexit.register(disconnect)
    try:
        with own_ray.with_few_processes():
            setup = worker_setup and {"worker_process_setup_hook": worker_setup}
            _init(address="local", num_cpus=num_cpus, include_dashboard=False, runtime_env=setup)
    except Exception as error:  # Ray raises a plain exception if a process is not up in time
        disconnect()
        raise ResourceError(
            f"wanted to start Ray on this machine, it did not start ({in_one_line(str(error))}): "
            "if the machine is busy, run the same command again; a stage does without Ray with "
            "--num_workers 0"
        ) from error
    except BaseException:
        disconnect()
        raise
    finally:
        del os.environ[MARKER]


def _join(address: str, *, allow_open_cluster: bool) -> None:
    try:
        gcs = _running_cluster() if address == "auto" else address
        host = _knock(gcs, ("", "ray"), "host:6379, ray://host:10001, auto or local")
        refuses = partial(
            ray_token.cluster_refuses, host, is_client_server=gcs.startswith("ray://")
        )
        ray_token.settle(address, refuses, allow_open_cluster=allow_open_cluster)
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
                f"{in_one_line(str(error))}: use the cluster's here, or restart it with these"
            ) from error


def job_client(
    address: str | None = None, *, allow_open_cluster: bool = False
) -> "JobSubmissionClient":
    """Return a client of the job server at `address`; None uses Ray's variables, then its default.

    Raises: ResourceError if none answers, it refuses us, or it requires no token and that is not
        allowed; ConfigError if `address` is not an http address.
    """
    variables = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    url = address or next((url for url in variables if url.startswith("http")), JOB_SERVER)
    try:
        _knock(url, ("http", "https"), f"an http address such as {JOB_SERVER}")
        refuses = partial(ray_token.job_server_refuses, url)
        ray_token.settle(url, refuses, allow_open_cluster=allow_open_cluster)
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
    client._do_request = partial(  # type: ignore[method-assign]
        client._do_request, timeout=ray_token.ANSWER_TIMEOUT_S
    )
    return client


def _running_cluster() -> str:
    """Return the address of the cluster running on this machine. Raises: ConnectionError if there
    is none."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address("auto"))


def users_mistake(error: BaseException) -> RaybertError | None:
    """Return the error that the user can fix, if one caused `error` in a worker or behind Ray's own
    error; else None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RaybertError):
            return type(cause)(str(cause))
        # Ray Train's controller fails with the first, its tasks and actors with the second.
        wrapped = getattr(cause, "controller_failure", None) or getattr(cause, "cause", None)
        cause = wrapped or cause.__cause__
    return None


def _knock(address: str, schemes: tuple[str, ...], expected: str) -> str:
    """Return host and port of an address after a test connection: Ray itself would try for minutes.

    Raises: ConnectionError if nothing listens there; ConfigError if it is not an address.
    """
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:  # it is not a number
        port = None
    if parts.scheme not in schemes or not parts.hostname or port is None:
        raise ConfigError(
            f"address is {address}: wanted {expected}; correct it, or the variable RAY_ADDRESS"
        )
    try:
        socket.create_connection((parts.hostname, port), timeout=KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error
    return parts.netloc


def _not_reached(address: str, error: Exception) -> ResourceError:
    return ResourceError(
        f"wanted a Ray cluster at {address}, could not reach or join it "
        f"({in_one_line(str(error))}): start one with {ray_token.HOW_TO_START}, or correct the "
        "address"
    )


def _init(**arguments: Any) -> None:
    import ray

    # Ray logs to its own files, <session>/logs; failures are raised either way.
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
