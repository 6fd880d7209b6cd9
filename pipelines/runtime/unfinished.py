"""Inspects a stage's output: whether a finished one is complete, and what work an unfinished one
holds that a new start would lose."""

import re
from collections.abc import Mapping
from typing import Any

from bert_core import files
from bert_core.errors import ConfigError, FormatError
from bert_core.manifest import NAME, Manifest
from bert_core.wording import without_secrets
from pipelines.runtime import lease
from pipelines.runtime.description import STARTED
from pipelines.runtime.progress import counted
from pipelines.runtime.storage_checks import PROBE
from tracking.runs.goodput import FILE as GOODPUT
from tracking.runs.mirror import FOR_PEOPLE, RECORD
from tracking.runs.recorder import flatten
from tracking.runs.spool import METRICS, RUN, SENT

BOOKKEEPING = {
    *(STARTED, NAME, lease.NAME),
    *(METRICS, SENT, RUN, RECORD, GOODPUT, "plots"),
    *("logs", "ray", "diverged.txt", "stopping", "stopped"),
}
"""Names of what is written beside the work: of the start, its record, its logs, and its end."""
REFUSED = "refused"
"""Key in what a start notes: settings or inputs were wrong, so that it ended."""
_CHECKPOINT = re.compile(r"(?:(\d+)/)?(step-(\d{8}))/checkpoint\.json")


def saved_work(output: str) -> list[str]:
    """Return the paths of the files in an unfinished output that the same run would resume from."""
    return sorted(path for path in files.sizes_in(output) if not _is_bookkeeping(path))


def _is_bookkeeping(path: str) -> bool:
    return any(
        name in BOOKKEEPING
        or name.startswith(("probe-", PROBE))
        or name.endswith((".part", *FOR_PEOPLE))
        for name in path.split("/")
    )


def in_words(saved: list[str]) -> str:
    """Describe what was saved: the newest checkpoint if there is one, or else how many files."""
    checkpoints = [match for path in saved if (match := _CHECKPOINT.search(path))]
    if checkpoints:
        newest = max(checkpoints, key=lambda match: (int(match[1] or 0), int(match[3])))
        of_seed = f"{newest[1]}/" if newest[1] else ""
        return f"its newest checkpoint is {of_seed}{newest[2]}"
    return f"it has saved {counted(len(saved), 'file')}, such as {saved[-1]}"


def check_whole(output: str, manifest: Manifest) -> None:
    """Check, by names and sizes, that a finished output has all that its manifest lists.

    Raises: FormatError naming the first file that is missing or has another size.
    """
    sizes = files.sizes_in(output)
    for name, listed in manifest.outputs.items():
        size = sizes.get(name)
        if size == listed.size_bytes:
            continue
        got = "it is missing" if size is None else f"it has {size:,}"
        raise FormatError(
            f"{files.join(output, name)}: wanted the {listed.size_bytes:,} bytes that `raybert "
            f"{manifest.stage}` wrote, {got}: copy it back, or add --force to make the whole "
            "output again"
        )


def difference(
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    then_stage: str,
    then_config: Mapping[str, Any],
    then_inputs: Mapping[str, str],
) -> str:
    """Describe how an output was made differently: the settings with both values, and the
    inputs."""
    if then_stage != stage:
        return f"and this is `{stage}`"
    then, now = flatten(then_config), flatten(config)
    settings = [
        f"{name} ({without_secrets(then.get(name, 'not set'))}, now "
        f"{without_secrets(now.get(name, 'not set'))})"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    others = [
        name
        for name in sorted({*then_inputs, *inputs})
        if then_inputs.get(name) != inputs.get(name)
    ]
    return f"made with another {', '.join([*settings, *others]) or 'format'}"


def check_nothing_is_lost(
    output: str,
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    started: Mapping[str, Any],
) -> None:
    """Check that an unfinished output, which this start cannot resume, has saved nothing.

    Args:
        config: the settings that determine the output now.
        inputs: the digests of the inputs now.
        started: what the earlier start recorded.
    Raises: ConfigError naming what differs, and what would be lost.
    """
    saved = saved_work(output)
    if not saved or (started.get(REFUSED) and not any(map(_CHECKPOINT.search, saved))):
        return  # the earlier start ended by a mistake of the user's: nothing to resume
    if "config" in started:
        how = difference(
            stage,
            config,
            inputs,
            then_stage=started["stage"],
            then_config=started["config"],
            then_inputs=started["inputs"],
        )
    else:
        how = f"made otherwise, by `{started.get('command', 'another start')}`"
    raise ConfigError(
        f"{output} holds an unfinished `{started['stage']}` {how}; {in_words(saved)}: go on with "
        "what it was made with, give another output, or --force to lose that and start over"
    )
