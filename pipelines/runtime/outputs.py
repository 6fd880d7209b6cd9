"""Lists the files that a stage leaves in its output, and records how its bundle was made."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_core import files
from bert_core.bundle.layout import RECORD as BUNDLE_RECORD
from bert_core.manifest import BUNDLE, Output
from pipelines.runtime.code_version import code_version
from pipelines.runtime.stage_config import StageConfig, determining_fields


def local_outputs(config: StageConfig, paths: Sequence[Path]) -> dict[str, Output]:
    """Return files in the run's local folder as outputs, copied to `output` if that is
    elsewhere."""
    outputs = {}
    for path in paths:
        name = path.relative_to(config.local_folder).as_posix()
        target = files.join(config.output, name)
        if files.local_path(target) != path.absolute():
            files.write_bytes(target, path.read_bytes())
        outputs[name] = Output.of(target)
    return outputs


def bundle_outputs(config: StageConfig) -> dict[str, Output]:
    """Return the files of the bundle in the run's local folder as outputs, moved to `output` if
    that is elsewhere."""
    from bert_core.bundle.layout import names_in

    folder = config.local_folder / BUNDLE
    outputs = local_outputs(config, [folder / name for name in names_in(folder)])
    if files.local_path(config.output) is None:
        shutil.rmtree(folder)
    return outputs


def written_bundle_digest(output: str, outputs: Mapping[str, Output]) -> str:
    record = files.join(BUNDLE, BUNDLE_RECORD)
    return files.read_json(files.join(output, record))["digest"] if record in outputs else ""


def recipe(config: StageConfig, digest: str) -> dict[str, Any]:
    """Return how a stage made a bundle, for the bundle's lineage."""
    return {
        "config": determining_fields(config),
        "stage_digest": digest,
        "code_version": code_version(),
    }
