"""`raybert ui`: MLflow's page over what the stages have recorded."""

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
    """MLflow store; that of MLFLOW_TRACKING_URI, or runs/mlflow.db, where this is not given."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(config: UiConfig) -> None:
    """Become MLflow's server, until Ctrl-C; where the store is a server already, say where.

    Raises: ResourceError if the port is taken, or the store's server does not answer.
    """
    uri = server.tracking_uri(config.tracking_uri)
    shown = server.without_password(uri)
    if uri.startswith(("http://", "https://")):
        server.require_answer(uri)
        say(f"MLflow is at {shown} already: open it in a browser")
        return
    require_free("127.0.0.1", config.port)
    server.connect(uri)  # a new file is made here, and MLflow's environment is settled
    say(f"MLflow on {shown}: http://127.0.0.1:{config.port} (Ctrl-C ends it)")
    sys.stdout.flush()
    # NOTE: MLflow's runner of evaluation jobs, on by default, is eight processes that outlive it.
    command = ["env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", sys.executable, "-m", "mlflow"]
    command += ["server", "--backend-store-uri", uri, "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(config.port)]
    os.execvp(command[0], command)
