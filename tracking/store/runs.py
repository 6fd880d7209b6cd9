"""What recording a run asks of MLflow, whichever way it is reached.

`mlflow_runs` goes through MLflow's client, which reaches every store and takes seconds of CPU to
import; `sqlite_runs` writes a SQLite file itself.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

KEY_TAG = "raybert.key"
"""Tag of a run, by which it is found if its id is not known."""


class Metric(NamedTuple):
    """One value of a metric."""

    key: str
    value: float
    time_ms: int
    step: int


@dataclass(frozen=True)
class Dataset:
    """A data set that a run read."""

    name: str
    digest: str
    """At most 36 characters."""
    source_type: str
    """MLflow's name for it: `local`, `s3`, `code`, …"""
    source: str
    """The JSON that MLflow's class of that type reads back."""
    context: str


@dataclass(frozen=True)
class StoredRun:
    """A run that MLflow has."""

    experiment_id: str
    run_id: str
    steps: Mapping[str, int]
    """Step of the newest value of each metric."""


class RefusedByMlflowError(Exception):
    """MLflow would refuse this value every time."""


@runtime_checkable  # the tests check types at run time
class Runs(Protocol):
    """The runs of one store. Every method may raise any exception if the store fails."""

    def require_answer(self) -> None:
        """Raise ResourceError if the store does not answer."""

    def experiment(self, name: str) -> str:
        """Return the experiment's id; an experiment is made if missing, with our columns."""

    def find(self, experiment_id: str, run_id: str | None, key: str) -> StoredRun | None:
        """Return the run with this id, or if that is None the one with this key.

        None if there is none, or it was deleted.
        """

    def create(self, experiment_id: str, name: str, key: str) -> StoredRun:
        """Make a run."""

    def params(self, run_id: str) -> dict[str, str]:
        """Return the params that the run has."""

    def log(
        self,
        run_id: str,
        metrics: Iterable[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Store metrics and tags, and params that the run does not have."""

    def log_inputs(self, run_id: str, datasets: Iterable[Dataset]) -> None:
        """Store the data sets that the run read."""

    def set_status(self, run_id: str, status: str) -> None:
        """Store a status; any but RUNNING ends the run now."""

    def log_file(self, run_id: str, path: Path, folder: str | None) -> None:
        """Attach a file or folder, in a folder of the run's."""

    def log_text(self, run_id: str, name: str, text: str) -> None:
        """Attach a text under this name."""
