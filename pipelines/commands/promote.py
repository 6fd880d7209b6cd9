"""`raybert promote`: have an alias of the registry point to another version, as to roll back."""

from dataclasses import dataclass

from pipelines.runtime.progress import say
from tracking.models.registry import CHAMPION, promote
from tracking.store.server import tracking_uri


@dataclass(frozen=True, kw_only=True)
class PromoteConfig:
    """Move an alias to a registered version: `raybert promote docstrings 1 --force`. Servers that
    follow it answer with that version within seconds."""

    name: str
    """Name of the model in the registry."""
    version: str
    """Number of the version."""
    alias: str = CHAMPION
    """Alias to move."""
    force: bool = False
    """Replace a champion, though nothing is compared here as `raybert publish` does."""
    tracking_uri: str | None = None
    """MLflow store; by default the one in MLFLOW_TRACKING_URI, or else runs/mlflow.db."""


def run(config: PromoteConfig) -> None:
    """Move the alias, and say where it was.

    Raises: ConfigError if there is no such version, or the champion stays; ResourceError if MLflow
        does not answer.
    """
    uri = tracking_uri(config.tracking_uri)
    moved = promote(config.name, config.version, alias=config.alias, uri=uri, force=config.force)
    say(f"promote: {moved}")
