"""Prepares the folder that a stage writes: checks that it may be written, and removes other runs'
files."""

from collections.abc import Sequence
from typing import Any

from bert_core import files
from bert_core.errors import ConfigError
from bert_core.manifest import NAME
from bert_core.wording import without_secrets
from pipelines.runtime import lease
from pipelines.runtime.description import STARTED, forget_origins
from pipelines.runtime.progress import say
from pipelines.runtime.stage_config import StageConfig, input_paths
from pipelines.runtime.stage_run import leaves_no_run, stage_command
from pipelines.runtime.storage_checks import PROBE
from pipelines.runtime.unfinished import REFUSED, check_nothing_is_lost
from tracking.runs.recorder import DatasetInput
from tracking.runs.spool import await_release


def check_output(config: StageConfig) -> None:
    output, local = config.output, files.local_path(config.output)
    above = [] if local is None else [str(folder) for folder in local.parents]
    if found := next((path for path in (output, *above) if files.is_file(path)), None):
        raise ConfigError(f"output: wanted a folder, {found} is a file: give another output")
    for name, path in input_paths(config):
        if files.is_within(path, output):
            raise ConfigError(
                f"output: wanted a folder without inputs, {output} contains the input "
                f"{name} = {path}, which writing the output again would remove: give another output"
            )


def check_ownership(config: StageConfig) -> None:
    present = _present(config.output)
    if present and STARTED not in present and NAME not in present:
        raise ConfigError(
            f"{config.output}: wanted an absent or empty folder, it holds files that raybert did "
            f"not write ({', '.join(present[:3])}, …): give another output"
        )


def clear_what_others_left(
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
                add_to_start(config, {REFUSED: False})
            return
        if not config.force:
            check_nothing_is_lost(config.output, stage, determining, digests, started)
        leaves_no_run(config)
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


def _present(output: str) -> list[str]:
    """Return the names in the output, without those of its lease and of probes, which are
    short-lived."""
    names = files.list_names(output)
    return [name for name in names if name != lease.NAME and not name.startswith(PROBE)]


def add_to_start(config: StageConfig, more: dict[str, Any]) -> None:
    """Add entries to the record of the run's start."""
    marker = files.join(config.output, STARTED)
    files.write_json(marker, files.read_json(marker) | more)
