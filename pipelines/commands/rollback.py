"""`raybert rollback`: have an alias of the registry point to the version that it had before."""

from dataclasses import dataclass

from pipelines.runtime.progress import say
from tracking.models.registry import CHAMPION, rollback
from tracking.store.server import tracking_uri


@dataclass(frozen=True, kw_only=True)
class RollbackConfig:
    """Move an alias back to the version that it had before: `raybert rollback docstrings`. Servers
    that follow it answer with that version within seconds; doing it again goes one further back."""

    name: str
    """Name of the model in the registry."""
    alias: str = CHAMPION
    """Alias to move."""
    tracking_uri: str | None = None
    """MLflow store; by default the one in MLFLOW_TRACKING_URI, or else runs/mlflow.db."""


def run(config: RollbackConfig) -> None:
    """Move the alias, and say where it was.

    Raises: ConfigError if there is no model of this name, or no version that it had before;
        ResourceError if MLflow does not answer.
    """
    uri = tracking_uri(config.tracking_uri)
    say(f"rollback: {rollback(config.name, alias=config.alias, uri=uri)}")
