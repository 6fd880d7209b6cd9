"""The inputs of a stage: the files that a reference means, with their digest."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.errors import ConfigError
from bert_core.manifest import read_manifest
from pipelines.runtime.description import STARTED
from pipelines.runtime.stage_config import StageConfig
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.data.tokenizer import Tokenizer


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


def input_digest(folder: str, stage: str) -> str:
    """The digest of an earlier stage's finished output."""
    manifest = read_manifest(folder)
    if manifest.stage != stage:
        raise ConfigError(
            f"{folder}: wanted the output of `raybert {stage}`, got that of "
            f"`raybert {manifest.stage}`"
        )
    return manifest.digest
