"""Defines the settings that every stage has, and what can be read off any stage's config.

The fields of `StageConfig` say where and on what a stage runs; they never change its output and are
left out of its digest.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from bert_core import files
from bert_core.checks import NonNegativeInt, PositiveInt, check_fields
from bert_core.errors import ConfigError
from pipelines.runtime.capacity import Gpus
from tracking.cache import cache_folder
from tracking.models.references import Registered
from tracking.runs.mirror import RECORD

INPUT = {"input": True}
"""Metadata of a config field that locates an input: the input's digest counts, not its path."""
INPUT_OR_WORD = {"input": True, "word": "docstrings"}
"""The same of a field that also takes a word, which is no path."""
REMARK = {"remark": True}
"""Metadata of a config field that affects only how the output is described, or how the run is
watched."""


Config = TypeVar("Config", bound=Any)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Where a stage writes and what it runs on."""

    operational: ClassVar[bool] = True
    """Marks a class whose fields say how a stage runs, not what its output is."""

    output: str
    """Folder or URI to write; nothing else may write there."""
    num_workers: NonNegativeInt | tuple[int, int] = 2
    """Ray workers; 0 does the work in this process, for a debugger or a profiler. Two numbers are a
    minimum of at least 1 and a maximum: as many as the cluster has room for while nodes come and
    go."""
    threads_per_worker: PositiveInt = 1
    """CPU threads per worker."""
    require_gpus: bool = False
    """Fail if the cluster has no GPU for each worker. By default workers compute on CPUs where
    there are no GPUs at all."""
    force: bool = False
    """Write the output again, replacing what is there."""
    wait: bool = False
    """Wait instead of failing: while another run writes the output, and while the cluster lacks
    CPUs or GPUs, for which it is asked to start nodes if it can."""
    address: str | None = None
    """Ray cluster to use; by default the one in RAY_ADDRESS, or else a local one."""
    allow_open_cluster: bool = False
    """Use a Ray cluster even if it requires no token, so that anyone who reaches its ports can run
    code there."""
    tracking_uri: str | None = None
    """MLflow store; by default the one in MLFLOW_TRACKING_URI, or else runs/mlflow.db."""
    experiment: str = "raybert"
    """MLflow experiment of the run."""
    parent_run: str | None = None
    """Id of the MLflow run that this run is part of."""

    def __post_init__(self) -> None:
        check_fields(self)
        workers = self.num_workers
        if not isinstance(workers, int) and not 1 <= workers[0] <= workers[1]:
            raise ConfigError(
                "num_workers: wanted a number, or a minimum of at least 1 and then a maximum, "
                f"got {list(workers)}"
            )
        if not self.experiment.strip():
            raise ConfigError("experiment: wanted the name of an MLflow experiment, got none")
        if not self.output:
            raise ConfigError("output: wanted a folder or URI, got an empty string")

    @property
    def least_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def gpus(self) -> Gpus:
        """Return whether each worker of a stage that computes on GPUs gets one."""
        return "one each" if self.require_gpus else "if there are any"

    @property
    def cpus(self) -> int:
        """Return the CPUs of a cluster started on this machine: enough that no worker waits
        forever."""
        return max(os.cpu_count() or 1, self.least_workers * self.threads_per_worker)

    @property
    def local_folder(self) -> Path:
        """Return the output folder or, for a URI, the folder on this machine that records its
        run."""
        name = hashlib.sha256(self.output.encode()).hexdigest()[:12]
        # Absolute: Ray Train's controller, which records the run, works in another folder.
        return files.local_path(self.output) or cache_folder() / "runs" / name

    @property
    def record_copy(self) -> str | None:
        """Return, for a URI, the folder in the output that has a copy of the record; else None."""
        remote = files.local_path(self.output) is None
        return files.join(self.output, RECORD) if remote else None


def operational_fields(kind: type[StageConfig]) -> set[str]:
    """Return the names of the fields that say how a stage runs, not what its output is."""
    return {
        field.name
        for base in kind.__mro__
        if base.__dict__.get("operational")
        for field in fields(base)
    }


def determining_fields(config: StageConfig) -> dict[str, Any]:
    """Return the fields that determine a stage's output, as its manifest would return them.

    Operational fields and input paths are left out: of an input, only its digest counts.
    """
    operational = operational_fields(type(config))
    values = {k: v for k, v in _without_inputs(config).items() if k not in operational}
    return json.loads(json.dumps(values, ensure_ascii=False))


def _without_inputs(config: Any) -> dict[str, Any]:
    return {
        field.name: _without_inputs(value) if is_dataclass(value) else value
        for field in fields(config)
        for value in [getattr(config, field.name)]
        if not _is_input(field) and field.metadata != REMARK
    }


def input_paths(config: Any) -> Iterator[tuple[str, str]]:
    """Yield field and path of every input that was set."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from ((f"{field.name}.{name}", path) for name, path in input_paths(value))
        elif _is_input(field) and value and _is_path(field, value):
            values = value.values() if isinstance(value, Mapping) else value
            for path in [value] if isinstance(value, str) else values:
                if Registered.match(path) is None:
                    yield field.name, path


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, for a process that runs in another folder. An input's
    default is a word (`docstrings`), not a path, and stays."""
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            changes[field.name] = with_absolute_paths(value)
        elif isinstance(value, str) and (
            field.name == "output" or (_is_input(field) and _is_path(field, value))
        ):
            changes[field.name] = files.absolute(value)
    return replace(config, **changes)


def _is_input(field: Field) -> bool:
    return "input" in field.metadata


def _is_path(field: Field, value: Any) -> bool:
    return value not in (field.default, field.metadata.get("word"))
