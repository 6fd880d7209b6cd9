"""What every stage shares: its folder, its digest, being skipped when done, its MLflow run.

A stage is a frozen config that extends `StageConfig` and a function `run(config)`. The fields of
`StageConfig` say where and with what a stage runs; they never change what it makes and are left
out of its digest.
"""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from bert_core import files
from bert_core.checks import PositiveInt, check_fields
from bert_core.errors import ConfigError
from bert_core.manifest import (
    NAME,
    Manifest,
    Output,
    is_complete,
    read_manifest,
    stage_digest,
    write_manifest,
)
from pipelines.runtime.progress import say
from tracking.runs import PARENT_TAG, DatasetInput, RunRecorder, finish_run
from tracking.server import tracking_uri
from tracking.spool import await_release

STARTED = "started.json"
INPUT = {"input": True}
"""Metadata of a config's field that says where an input lies: what counts of it is its digest."""
REMARK = {"remark": True}
"""Metadata of a config's field that says how the output is described, or its making watched, and
changes nothing in it."""

Config = TypeVar("Config", bound=Any)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Where a stage writes and what it runs on."""

    operational: ClassVar[bool] = True
    """Marks a class whose fields say how a stage runs, not what it makes."""

    output: str
    """Folder or URI that the stage writes, and nothing else does."""
    num_workers: int | tuple[int, int] = 2
    """Ray workers; 0 does the work in this process, for a debugger or a profiler. Two numbers are
    the least and the most: as many as there is room for, while nodes come and go."""
    threads_per_worker: PositiveInt = 1
    """CPU threads of each worker."""
    force: bool = False
    """Make the output again, whatever is there."""
    address: str | None = None
    """Ray cluster to use; the one of RAY_ADDRESS, or a local one, where this is not given."""
    allow_open_cluster: bool = False
    """Join a Ray cluster that asks for no token: anyone who reaches it can then run code there."""
    tracking_uri: str | None = None
    """MLflow store; that of MLFLOW_TRACKING_URI, or runs/mlflow.db, where this is not given."""
    experiment: str = "raybert"
    """MLflow experiment that the run is filed under."""
    parent_run: str | None = None
    """Id of the MLflow run that this one is a part of."""

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.num_workers, int):
            if self.num_workers < 0:
                raise ConfigError(f"num_workers: wanted at least 0, got {self.num_workers}")
        elif not 1 <= self.least_workers <= self.most_workers:
            raise ConfigError(
                "num_workers: wanted a number, or the least and the most, at least 1 and in this "
                f"order, got {list(self.num_workers)}"
            )
        if not self.output:
            raise ConfigError("output: wanted a folder or URI, got an empty string")

    @property
    def least_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def most_workers(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def cpus(self) -> int:
        """CPUs of a Ray that is started on this machine: enough that no worker waits for good."""
        return max(os.cpu_count() or 1, self.least_workers * self.threads_per_worker)

    @property
    def local_folder(self) -> Path:
        """The output folder, or for a URI the folder on this machine that records its run."""
        local = files.local_path(self.output)
        # From the root: Ray Train's controller, which records the run, works in another folder.
        remote = Path("runs/remote").absolute()
        return local or remote / hashlib.sha256(self.output.encode()).hexdigest()[:12]


def operational_fields(kind: type[StageConfig]) -> set[str]:
    """Names of the fields that say how a stage runs, not what it makes."""
    return {
        field.name
        for each in kind.__mro__
        if each.__dict__.get("operational")
        for field in fields(each)
    }


def determining_fields(config: StageConfig) -> dict[str, Any]:
    """The fields that determine a stage's output, as they come back from its manifest.

    Left out are operational ones, and where an input lies: what counts of it is its digest.
    """
    operational = operational_fields(type(config))
    values = {k: v for k, v in _without_inputs(config).items() if k not in operational}
    return json.loads(json.dumps(values, ensure_ascii=False))


def _without_inputs(config: Any) -> dict[str, Any]:
    return {
        field.name: _without_inputs(value) if is_dataclass(value) else value
        for field in fields(config)
        for value in [getattr(config, field.name)]
        if field.metadata not in (INPUT, REMARK)
    }


def bundle_input(
    reference: str, *, name: str = "model", tracking_uri: str | None = None
) -> tuple[Path, DatasetInput]:
    """Where a bundle lies on this machine, whatever it is referred to by, and its digest as that of
    an input of this name."""
    from bert_core.bundle.format import bundle_digest
    from tracking.resolve import resolve

    folder = resolve(reference, uri=tracking_uri)
    return folder, DatasetInput(name, bundle_digest(folder), reference)


def recipe(config: StageConfig, digest: str) -> dict[str, Any]:
    """How a stage makes a bundle, for its lineage."""
    return {
        "config": determining_fields(config),
        "stage_digest": digest,
        "code_version": code_version(),
    }


def with_absolute_paths(config: Config) -> Config:
    """The same config for a process that runs in another folder. What an input is by default is a
    word (`docstrings`), no path."""
    changes: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            changes[field.name] = with_absolute_paths(value)
        elif isinstance(value, str) and (
            field.name == "output" or (field.metadata == INPUT and value != field.default)
        ):
            changes[field.name] = files.absolute(value)
    return replace(config, **changes)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a stage's work hands back."""

    outputs: dict[str, Output]
    """The files that count, by their path inside the output."""
    counts: dict[str, Any]
    """What there is to know of them; numbers among it go to MLflow."""
    artifacts: Sequence[Path] = ()
    """Local files for a person to look at in MLflow."""


def run_stage(
    stage: str,
    config: StageConfig,
    inputs: Sequence[DatasetInput],
    work: Callable[[str], Result],
) -> Manifest:
    """Do `work` unless its result is there, and complete the folder with a manifest.

    Args:
        inputs: everything that is read, with its digest.
        work: makes the files in `config.output`; given the stage's digest. What a killed run left
            there is from the same digest, and may be used. The MLflow run of the folder is there,
            and open for nobody else meanwhile.
    Raises: ConfigError if the folder holds something else, or an input, which is left untouched;
        or if a file is in its place.
    """
    _check_output(config)
    determining = determining_fields(config)
    digests = {each.name: each.digest for each in inputs}
    digest = stage_digest(stage, determining, digests)
    if not config.force and is_complete(config.output):
        done = read_manifest(config.output)
        if done.digest == digest:
            say(f"{stage}: {config.output} is there already, made with the same settings: skipped")
            finish_run(config.local_folder, uri=tracking_uri(config.tracking_uri))
            return done
        raise ConfigError(
            f"{config.output} holds a finished `{done.stage}` "
            f"{_difference(done, stage, determining, digests)}: "
            "give another output, or --force to make it again"
        )
    _clear_what_others_left(config, stage, digest)
    began = time.time()
    # A run is opened, handed over and opened again: training's controller writes it meanwhile.
    if _open_run(stage, config, determining, inputs).close("RUNNING") is not None:
        say(f"{stage}: MLflow has not answered yet, records wait for it in {config.local_folder}")
    try:
        result = work(digest)
    except BaseException as error:
        failed = isinstance(error, Exception)
        _open_run(stage, config, determining).close("FAILED" if failed else "KILLED")
        raise
    manifest = Manifest(
        stage=stage,
        digest=digest,
        config=determining,
        inputs=digests,
        outputs=result.outputs,
        counts={**result.counts, "seconds": round(time.time() - began, 3)},
        code_version=code_version(),
    )
    with _open_run(stage, config, determining) as recorder:
        numbers = {k: v for k, v in manifest.counts.items() if isinstance(v, int | float)}
        recorder.record(recorder.last_step + 1, numbers)
        for path in result.artifacts:
            recorder.artifact(path)
        # From here on the output is complete: killed now, the next start only ends the run.
        write_manifest(config.output, manifest)
    return manifest


def _check_output(config: StageConfig) -> None:
    output, local = config.output, files.local_path(config.output)
    above = [] if local is None else [str(folder) for folder in local.parents]
    if found := next((path for path in (output, *above) if files.is_file(path)), None):
        raise ConfigError(f"output: wanted a folder, {found} is a file: give another output")
    for name, path in _input_paths(config):
        if files.is_within(path, output):
            raise ConfigError(
                f"output: wanted a folder of its own, {output} has the input {name} = {path} in "
                "it, which making the output again would remove: give another output"
            )


def _input_paths(config: Any) -> Iterator[tuple[str, str]]:
    """Where inputs lie that are given, each after its field."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from ((f"{field.name}.{name}", path) for name, path in _input_paths(value))
        elif field.metadata == INPUT and value and value != field.default:
            values = value.values() if isinstance(value, Mapping) else value
            for path in [value] if isinstance(value, str) else values:
                if not path.startswith("models:"):
                    yield field.name, path


def _open_run(
    stage: str,
    config: StageConfig,
    params: dict[str, Any],
    inputs: Sequence[DatasetInput] = (),
) -> RunRecorder:
    return RunRecorder.open(
        config.local_folder,
        uri=tracking_uri(config.tracking_uri),
        experiment=config.experiment,
        run_name=f"{stage} {Path(config.output).name}",
        params=params,
        inputs=inputs,
        tags={
            "stage": stage,
            "output": config.output,
            "code_version": code_version(),
            **({PARENT_TAG: config.parent_run} if config.parent_run else {}),
        },
    )


def _difference(
    done: Manifest, stage: str, config: dict[str, Any], inputs: Mapping[str, str]
) -> str:
    if done.stage != stage:
        return f"and this is `{stage}`"
    differs = [
        name
        for then, now in ((done.config, config), (done.inputs, inputs))
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    return f"made with another {', '.join(differs) or 'format'}"


def _clear_what_others_left(config: StageConfig, stage: str, digest: str) -> None:
    """Empty the output unless a killed run of this very digest can go on in it."""
    marker = files.join(config.output, STARTED)
    present = files.list_names(config.output)
    started = files.read_json(marker) if STARTED in present else None
    if present and started is None and NAME not in present:
        raise ConfigError(
            f"{config.output}: wanted an absent or empty folder, it holds files that raybert did "
            f"not write ({', '.join(present[:3])}, …): give another output"
        )
    if started is not None and started["digest"] == digest and not config.force:
        say(f"{stage}: going on where an earlier run of {config.output} stopped")
        return
    await_release(config.local_folder)
    files.remove(config.output)
    files.remove(str(config.local_folder))
    files.write_json(marker, {"stage": stage, "digest": digest})


def local_outputs(config: StageConfig, paths: Sequence[Path]) -> dict[str, Output]:
    """Files in the run's folder on this machine as outputs; put into `output` where it is away."""
    outputs = {}
    for path in paths:
        name = path.relative_to(config.local_folder).as_posix()
        target = files.join(config.output, name)
        if files.local_path(target) != path.absolute():
            files.write_bytes(target, path.read_bytes())
        outputs[name] = Output.of(target)
    return outputs


def input_digest(folder: str, stage: str) -> str:
    """The digest that an earlier stage's finished folder counts by."""
    manifest = read_manifest(folder)
    if manifest.stage != stage:
        raise ConfigError(
            f"{folder}: wanted the output of `raybert {stage}`, it is that of "
            f"`raybert {manifest.stage}`"
        )
    return manifest.digest


def code_version() -> str:
    """Version of raybert, with the commit where it runs from a checkout."""
    try:
        release = version("raybert")
    except PackageNotFoundError:
        release = "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except OSError:
        return release
    return f"{release}+{commit.stdout.strip()}" if commit.stdout.strip() else release
