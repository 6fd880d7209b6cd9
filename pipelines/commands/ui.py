"""`raybert ui`: the MLflow page of the recorded runs."""

import os
import sys
from dataclasses import dataclass

from bert_core.checks import Port, check_fields
from pipelines.runtime.progress import say
from tracking import server
from tracking.ports import require_free


@dataclass(frozen=True, kw_only=True)
class UiConfig:
    """Open the MLflow page, for this machine only."""

    port: Port = 5000
    """Port to listen on."""
    tracking_uri: str | None = None
    """MLflow store; by default MLFLOW_TRACKING_URI, or runs/mlflow.db."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(config: UiConfig) -> None:
    """Become MLflow's server, until Ctrl-C; if the store is already a server, print its address.

    Raises: ResourceError if the port is in use, or the store's server does not answer.
    """
    uri = server.tracking_uri(config.tracking_uri)
    shown = server.without_password(uri)
    if uri.startswith(("http://", "https://")):
        server.require_answer(uri)
        say(f"MLflow is already at {shown}: open it in a browser")
        return
    require_free("127.0.0.1", config.port)
    server.connect(uri)  # creates a new store, and sets MLflow's environment
    say(f"MLflow on {shown}: http://127.0.0.1:{config.port} (Ctrl-C stops it)")
    sys.stdout.flush()
    # NOTE: MLflow's evaluation job runner, on by default, is eight processes that outlive it.
    command = ["env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", sys.executable, "-m", "mlflow"]
    command += ["server", "--backend-store-uri", uri, "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(config.port)]
    os.execvp(command[0], command)
