"""What every stage shares: its folder, its digest, being skipped when done, its MLflow run.

A stage is a frozen config that extends `StageConfig` and a function `run(config)`. The fields of
`StageConfig` say where and on what a stage runs; they never change its output and are left out of
its digest.
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from bert_core import files
from bert_core.bundle.layout import RECORD as BUNDLE_RECORD
from bert_core.checks import NonNegativeInt, PositiveInt, check_fields
from bert_core.errors import ConfigError, CorpusError, FormatError, InputError, RaybertError
from bert_core.manifest import (
    BUNDLE,
    NAME,
    Manifest,
    Output,
    entries_of,
    is_complete,
    read_manifest,
    stage_digest,
    write_manifest,
)
from bert_core.wording import without_secrets
from pipelines.runtime import lease
from pipelines.runtime.capacity import Gpus
from pipelines.runtime.description import (
    STARTED,
    card_links,
    cards_behind,
    command,
    described,
    failure,
    forget_origins,
    run_name,
    source_tags,
)
from pipelines.runtime.progress import say
from pipelines.runtime.storage_checks import PROBE
from pipelines.runtime.unfinished import (
    REFUSED,
    check_nothing_is_lost,
    check_whole,
    difference,
    saved_work,
)
from tracking.cache import cache_folder
from tracking.runs.mirror import RECORD
from tracking.runs.recorder import (
    PARENT_TAG,
    DatasetInput,
    RunRecorder,
    Status,
    discard_run,
    finish_run,
)
from tracking.runs.spool import await_release, read_run
from tracking.runs.story import result
from tracking.store.page import RESULT
from tracking.store.server import tracking_uri, without_password

if TYPE_CHECKING:
    from bert_core.data.tokenizer import Tokenizer

INPUT = {"input": True}
"""Metadata of a config field that locates an input: the input's digest counts, not its path."""
INPUT_OR_WORD = {"input": True, "word": "docstrings"}
"""The same of a field that also takes a word, which is no path."""
REMARK = {"remark": True}
"""Metadata of a config field that affects only how the output is described, or how the run is
watched."""

MISTAKES = (ConfigError, CorpusError, FormatError, InputError)
"""What is wrong with a command or its inputs: a start that these end is refused, not failed."""

GIT_TIMEOUT_S = 5.0
"""How long git may take to name the commit, on a busy machine or a slow disk."""

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
        """Whether each worker of a stage that computes on GPUs gets one."""
        return "one each" if self.require_gpus else "if there are any"

    @property
    def cpus(self) -> int:
        """CPUs of a cluster started on this machine: enough that no worker waits forever."""
        return max(os.cpu_count() or 1, self.least_workers * self.threads_per_worker)

    @property
    def local_folder(self) -> Path:
        """The output folder; for a URI, the folder on this machine that records its run."""
        name = hashlib.sha256(self.output.encode()).hexdigest()[:12]
        # Absolute: Ray Train's controller, which records the run, works in another folder.
        return files.local_path(self.output) or cache_folder() / "runs" / name

    @property
    def record_copy(self) -> str | None:
        """For a URI, the folder in the output that has a copy of the record."""
        remote = files.local_path(self.output) is None
        return files.join(self.output, RECORD) if remote else None


def operational_fields(kind: type[StageConfig]) -> set[str]:
    """Names of the fields that say how a stage runs, not what its output is."""
    return {
        field.name
        for base in kind.__mro__
        if base.__dict__.get("operational")
        for field in fields(base)
    }


def determining_fields(config: StageConfig) -> dict[str, Any]:
    """The fields that determine a stage's output, as its manifest would return them.

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


def bundle_input(
    config: StageConfig, reference: str, *, name: str = "model"
) -> tuple[Path, DatasetInput]:
    """The local folder of a bundle, given any kind of reference, and the bundle as an input called
    `name`."""
    from bert_core.bundle.format import bundle_digest
    from tracking.models.hub import PREFIX
    from tracking.models.references import resolve

    fixed = hub_reference(config.output, reference, force=config.force)
    folder = resolve(reference if fixed is None else PREFIX + fixed, uri=config.tracking_uri)
    source = DatasetInput(name, bundle_digest(folder), fixed or reference)
    return folder, source if fixed is None else replace(source, asked=reference)


def tokenizer_input(config: StageConfig, reference: str) -> tuple[str, "Tokenizer", DatasetInput]:
    """A reference to a tokenizer that means the same files on every machine, the tokenizer, and the
    tokenizer as an input."""
    from tracking.models.hub import PREFIX
    from tracking.models.references import load_tokenizer

    fixed = hub_reference(config.output, reference, force=config.force)
    place = reference if fixed is None else PREFIX + fixed
    tokenizer = load_tokenizer(place)
    source = DatasetInput("tokenizer", tokenizer.digest, fixed or reference)
    return place, tokenizer, source if fixed is None else replace(source, asked=reference)


def hub_reference(output: str, reference: str, *, force: bool) -> str | None:
    """A reference to a model of the hub as `owner/name@commit`; None if it means something else.

    The commit is the one that an earlier run of the same output took, so that a run that resumes
    goes on with the same model, wherever its branch is by now; `force` takes the newest.
    """
    from tracking.models.references import hub_model, pinned

    if hub_model(reference) is None:
        return None
    marker = files.join(output, STARTED)
    before = files.read_json(marker) if not force and files.exists(marker) else {}
    return before.get("hub", {}).get(reference) or pinned(reference)


def recipe(config: StageConfig, digest: str) -> dict[str, Any]:
    """How a stage made a bundle, for the bundle's lineage."""
    return {
        "config": determining_fields(config),
        "stage_digest": digest,
        "code_version": code_version(),
    }


def with_absolute_paths(config: Config) -> Config:
    """The same config for a process that runs in another folder. An input's default is a word
    (`docstrings`), not a path."""
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


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a stage's work returns."""

    outputs: dict[str, Output]
    """The files that make up the output, by their path inside it."""
    counts: dict[str, Any]
    """Facts about the output; the numbers among them go to MLflow."""
    artifacts: Sequence[Path] = ()
    """Local files to show in MLflow."""


def run_stage(
    stage: str,
    config: StageConfig,
    inputs: Sequence[DatasetInput],
    work: Callable[[str], Result],
) -> Manifest:
    """Do `work` unless its result already exists, and complete the folder with a manifest.

    Args:
        inputs: everything that is read, with its digest.
        work: writes the files in `config.output`; takes the stage's digest. What a killed run left
            there has the same digest and may be reused. Meanwhile the folder's MLflow run exists
            and nothing else has it open.
    Raises: ConfigError if the folder holds something else, or an input (both are left untouched),
        or if there is a file in its place; ResourceError if another process writes the output, or
        takes it over.
    """
    _check_output(config)
    determining = determining_fields(config)
    digests = {item.name: item.digest for item in inputs}
    digest = stage_digest(stage, determining, digests)
    if (done := _done(stage, config, determining, digests)) is not None:
        return done
    _check_ownership(config)
    with lease.held(config.output, wait=config.wait) as held:
        # Whoever had it until now may have finished it.
        if (done := _done(stage, config, determining, digests)) is not None:
            return done
        files.abort_uploads(config.output)
        _clear_what_others_left(config, stage, digest, determining, inputs)
        uri = without_password(tracking_uri(config.tracking_uri))
        cards = cards_behind([item.source for item in inputs], uri)
        began = time.time()
        # The run is opened, handed over and opened again: training's controller writes to it
        # between.
        description = _description(stage, config, inputs, cards)
        begun = _open_run(stage, config, determining, inputs, description)
        if begun.close("RUNNING") is not None:
            say(f"{stage}: MLflow has not answered yet, records are kept in {config.local_folder}")
        try:
            stage_result = work(digest)
        except BaseException as error:
            if held.lost is None:
                files.abort_uploads(config.output)  # workers were ended in the middle of them
                if not (isinstance(error, MISTAKES) and _leaves_no_run(config)):
                    _end_run(stage, config, error)
                if isinstance(error, ConfigError | CorpusError):
                    with suppress(OSError, RaybertError):  # the mistake is what to tell
                        _note(config, {REFUSED: True})
            raise
        manifest = Manifest(
            stage=stage,
            digest=digest,
            config=determining,
            inputs=digests,
            hub={item.name: item.source for item in inputs if item.asked},
            outputs=stage_result.outputs,
            bundle=_bundle_digest(config.output, stage_result.outputs),
            counts={**stage_result.counts, "seconds": round(time.time() - began, 3)},
            code_version=code_version(),
        )
        held.check()  # in another's run nothing is recorded
        description = _description(stage, config, inputs, cards, manifest.counts)
        with _open_run(stage, config, determining, (), description) as recorder:
            numbers = {k: v for k, v in manifest.counts.items() if isinstance(v, int | float)}
            recorder.record(recorder.last_step + 1, numbers)
            for path in stage_result.artifacts:
                recorder.artifact(path)
            # With these, a report needs no folder.
            recorder.json_artifact(STARTED, files.read_json(files.join(config.output, STARTED)))
            recorder.json_artifact(NAME, entries_of(manifest))
            held.check()
            # From here on the output is complete: if killed now, the next start only ends the run.
            write_manifest(config.output, manifest)
    return manifest


def _done(
    stage: str, config: StageConfig, determining: dict[str, Any], inputs: Mapping[str, str]
) -> Manifest | None:
    """The manifest of a finished output, whose run is ended; None if there is work to do.

    Raises: ConfigError if it was made otherwise.
    """
    if config.force or not is_complete(config.output):
        return None
    done = read_manifest(config.output)
    if done.digest == stage_digest(stage, determining, dict(inputs)):
        check_whole(config.output, done)
        say(f"{stage}: {config.output} already exists, made with the same settings: skipped")
        finish_run(
            config.local_folder, uri=tracking_uri(config.tracking_uri), copy=config.record_copy
        )
        return done
    how = difference(
        stage,
        determining,
        inputs,
        then_stage=done.stage,
        then_config=done.config,
        then_inputs=done.inputs,
    )
    raise ConfigError(
        f"{config.output} holds a finished `{done.stage}` {how}: "
        "give another output, or --force to make it again"
    )


def _check_output(config: StageConfig) -> None:
    output, local = config.output, files.local_path(config.output)
    above = [] if local is None else [str(folder) for folder in local.parents]
    if found := next((path for path in (output, *above) if files.is_file(path)), None):
        raise ConfigError(f"output: wanted a folder, {found} is a file: give another output")
    for name, path in _input_paths(config):
        if files.is_within(path, output):
            raise ConfigError(
                f"output: wanted a folder without inputs, {output} contains the input "
                f"{name} = {path}, which writing the output again would remove: give another output"
            )


def _input_paths(config: Any) -> Iterator[tuple[str, str]]:
    """Field and path of every input that was set."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from ((f"{field.name}.{name}", path) for name, path in _input_paths(value))
        elif _is_input(field) and value and _is_path(field, value):
            values = value.values() if isinstance(value, Mapping) else value
            for path in [value] if isinstance(value, str) else values:
                if not path.startswith("models:"):
                    yield field.name, path


def _leaves_no_run(config: StageConfig) -> bool:
    """Remove the run of a start that was refused before it made or recorded anything."""
    return not saved_work(config.output) and discard_run(
        config.local_folder, uri=tracking_uri(config.tracking_uri), copy=config.record_copy
    )


def _open_run(
    stage: str,
    config: StageConfig,
    params: dict[str, Any],
    inputs: Sequence[DatasetInput] = (),
    description: dict[str, str] | None = None,
    *,
    with_copy: bool = True,
) -> RunRecorder:
    code = code_version()
    return RunRecorder.open(
        config.local_folder,
        uri=tracking_uri(config.tracking_uri),
        copy=config.record_copy if with_copy else None,
        experiment=config.experiment,
        run_name=run_name(stage, config.output),
        params=params,
        inputs=[replace(each, source=without_secrets(each.source)) for each in inputs],
        tags={
            "stage": stage,
            "output": config.output,
            "code_version": code,
            **source_tags(stage, code),
            **({PARENT_TAG: config.parent_run} if config.parent_run else {}),
            **(description or {}),
        },
    )


def _description(
    stage: str,
    config: StageConfig,
    inputs: Sequence[DatasetInput],
    links: dict[str, str],
    counts: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """The description of the run: when it begins, and with its counts when it ends.

    Args:
        links: to the cards of what it was made from.
    """
    if counts is not None:
        links = links | card_links(stage, read_run(config.local_folder), config, counts)
    return described(
        stage_command(stage, config),
        config.output,
        inputs,
        without_password(tracking_uri(config.tracking_uri)),
        result="" if counts is None else result(stage, counts),
        links=links,
    )


def stage_command(stage: str, config: StageConfig) -> str:
    """The command line that makes the same output, but for how and where it runs."""
    return command(stage, config, operational_fields(type(config)) - {"output"})


def _end_run(
    stage: str, config: StageConfig, reason: BaseException, *, with_copy: bool = True
) -> None:
    """Record that the stage ends without a result, and why. Never raises: another error did end it.

    Where the copy of the record cannot be reached, only MLflow and the local folder know.
    """
    status: Status = "FAILED" if isinstance(reason, Exception) else "KILLED"
    tags = {RESULT: failure(reason)}
    try:
        _open_run(
            stage, config, determining_fields(config), description=tags, with_copy=with_copy
        ).close(status)
    except (OSError, RaybertError) as error:
        if with_copy and config.record_copy is not None:
            _end_run(stage, config, reason, with_copy=False)
        else:
            say(f"{stage}: how the run ended ({status}) is not recorded: {error}")


def _present(output: str) -> list[str]:
    """Names in the output, but for those of its lease and of probes, which are gone in a moment."""
    names = files.list_names(output)
    return [name for name in names if name != lease.NAME and not name.startswith(PROBE)]


def _check_ownership(config: StageConfig) -> None:
    present = _present(config.output)
    if present and STARTED not in present and NAME not in present:
        raise ConfigError(
            f"{config.output}: wanted an absent or empty folder, it holds files that raybert did "
            f"not write ({', '.join(present[:3])}, …): give another output"
        )


def _clear_what_others_left(
    config: StageConfig,
    stage: str,
    digest: str,
    determining: dict[str, Any],
    inputs: Sequence[DatasetInput],
) -> None:
    """Empty the output, unless it is from a killed run of the same digest, which can resume.

    Raises: ConfigError if that would lose what an unfinished run has saved.
    """
    marker = files.join(config.output, STARTED)
    present = _present(config.output)
    started = files.read_json(marker) if STARTED in present else None
    digests = {item.name: item.digest for item in inputs}
    if started is not None and NAME not in present:
        if started["digest"] == digest and not config.force:
            say(f"{stage}: resuming the earlier run of {config.output}")
            if REFUSED in started:
                _note(config, {REFUSED: False})
            return
        if not config.force:
            check_nothing_is_lost(config.output, stage, determining, digests, started)
        _leaves_no_run(config)
    await_release(config.local_folder)
    if present:
        forget_origins()
    for name in present:
        files.remove(files.join(config.output, name))
    if config.record_copy is not None:
        files.remove(str(config.local_folder))
    note = {
        "stage": stage,
        "digest": digest,
        "command": stage_command(stage, config),
        "sources": {each.name: without_secrets(each.source) for each in inputs},
        "config": determining,
        "inputs": digests,
    }
    from_hub = {item.asked: item.source for item in inputs if item.asked}
    files.write_json(marker, note | ({"hub": from_hub} if from_hub else {}))


def _note(config: StageConfig, more: dict[str, Any]) -> None:
    """Add to what the start noted."""
    marker = files.join(config.output, STARTED)
    files.write_json(marker, files.read_json(marker) | more)


def local_outputs(config: StageConfig, paths: Sequence[Path]) -> dict[str, Output]:
    """Files in the run's local folder as outputs; copied to `output` if that is elsewhere."""
    outputs = {}
    for path in paths:
        name = path.relative_to(config.local_folder).as_posix()
        target = files.join(config.output, name)
        if files.local_path(target) != path.absolute():
            files.write_bytes(target, path.read_bytes())
        outputs[name] = Output.of(target)
    return outputs


def _bundle_digest(output: str, outputs: Mapping[str, Output]) -> str:
    record = files.join(BUNDLE, BUNDLE_RECORD)
    return files.read_json(files.join(output, record))["digest"] if record in outputs else ""


def bundle_outputs(config: StageConfig) -> dict[str, Output]:
    """The files of the bundle in the run's local folder as outputs; moved to `output` if that is
    elsewhere."""
    from bert_core.bundle.layout import names_in

    folder = config.local_folder / BUNDLE
    outputs = local_outputs(config, [folder / name for name in names_in(folder)])
    if files.local_path(config.output) is None:
        shutil.rmtree(folder)
    return outputs


def input_digest(folder: str, stage: str) -> str:
    """The digest of an earlier stage's finished output."""
    manifest = read_manifest(folder)
    if manifest.stage != stage:
        raise ConfigError(
            f"{folder}: wanted the output of `raybert {stage}`, got that of "
            f"`raybert {manifest.stage}`"
        )
    return manifest.digest


def code_version() -> str:
    """Version of raybert, with the commit if it runs from a checkout."""
    try:
        release = version("raybert")
    except PackageNotFoundError:
        release = "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return release
    return f"{release}+{commit.stdout.strip()}" if commit.stdout.strip() else release
