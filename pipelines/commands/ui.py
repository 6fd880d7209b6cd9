"""`raybert ui`: the MLflow page of the recorded runs."""

import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.checks import Port, check_fields
from bert_core.errors import ConfigError
from pipelines.runtime.progress import say
from tracking.runs.mirror import RECORD
from tracking.runs.spool import RUN
from tracking.store import server
from tracking.store.page import run_page, runs_page
from tracking.store.ports import require_free

if TYPE_CHECKING:
    from mlflow import MlflowClient


@dataclass(frozen=True, kw_only=True)
class UiConfig:
    """Open the MLflow page, for this machine only."""

    run: str | None = None
    """Output of a stage: opens the store that its run was written to, at that run."""
    experiment: str = "raybert"
    """MLflow experiment to open."""
    port: Port = 5000
    """Port to listen on."""
    tracking_uri: str | None = None
    """MLflow store; by default the one in MLFLOW_TRACKING_URI, or else runs/mlflow.db."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(config: UiConfig) -> None:
    """Become MLflow's server, until Ctrl-C, and print its address once it answers; if the store is
    already a server, print that one's address.

    Raises: ConfigError if `run` has no record; ResourceError if the port is in use, or the store's
        server does not answer.
    """
    uri, run_id = _store(config)
    shown = server.without_password(uri)
    if uri.startswith(("http://", "https://")):
        page = _page(server.connect(uri), uri, config.experiment, run_id)
        say(f"MLflow is already at {shown.rstrip('/')}{page}: open it in a browser")
        return
    require_free("127.0.0.1", config.port)
    client = server.connect(uri)  # creates a new store, and sets MLflow's environment
    page = _page(client, uri, config.experiment, run_id)
    say(f"starting MLflow on {shown} (Ctrl-C stops it)")
    sys.stdout.flush()
    _say_when_it_answers(config.port, f"http://127.0.0.1:{config.port}{page}")
    # NOTE: MLflow's evaluation job runner, on by default, is eight processes that outlive it.
    command = ["env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", sys.executable, "-m", "mlflow"]
    command += ["server", "--backend-store-uri", uri, "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(config.port)]
    os.execvp(command[0], command)


def _say_when_it_answers(port: int, url: str) -> None:
    """Print the URL once this process, which becomes MLflow's server, answers at the port."""
    server_pid = os.getpid()
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        if not os.fork():  # MLflow is not its parent, and would not wait for it
            while _is_alive(server_pid):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    say(f"MLflow answers at {url}")
                    sys.stdout.flush()
                    break
                time.sleep(0.2)
    finally:
        os._exit(0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _page(client: "MlflowClient", uri: str, name: str, run_id: str | None) -> str:
    """Return the URL of the run's page, or else of the experiment's runs, or else of all
    experiments."""
    from mlflow.exceptions import MlflowException

    if run_id is not None:
        with suppress(MlflowException):  # it was deleted
            return run_page(client.get_run(run_id).info.experiment_id, run_id)
    if client.get_experiment_by_name(name) is None:
        return ""
    return runs_page(server.experiment_id(client, uri, name))


def _store(config: UiConfig) -> tuple[str, str | None]:
    """Return the URI of the store, and the id of the run in it if a run is requested and was sent
    there."""
    configured = server.tracking_uri(config.tracking_uri)
    if config.run is None:
        return configured, None
    places = [files.join(config.run, *folder, RUN) for folder in ([], [RECORD])]
    record = next(filter(files.is_file, places), None)
    if record is None:
        raise ConfigError(
            f"run: wanted the output of a stage, {config.run} has no {RUN}: give another folder or "
            "URI, or leave run out to open the store in tracking_uri"
        )
    recorded = files.read_json(record)
    uri, run_id = recorded["tracking_uri"], recorded["run_id"]
    if uri == server.without_password(configured):
        uri = configured  # with its password, which is not recorded
    return uri, run_id
