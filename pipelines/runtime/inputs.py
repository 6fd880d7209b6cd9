"""The inputs of a stage: the files that a reference means, with their digest."""

from pathlib import Path
from typing import TYPE_CHECKING

from bert_core import files
from bert_core.errors import ConfigError
from bert_core.manifest import read_manifest
from pipelines.runtime.description import STARTED
from pipelines.runtime.stage_config import StageConfig
from tracking.models.hub import PREFIX
from tracking.models.references import OnHub, Reference
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.data.tokenizer import Tokenizer


def bundle_input(
    config: StageConfig, reference: str, *, name: str = "model"
) -> tuple[Path, DatasetInput]:
    """The local folder of a bundle, given any kind of reference, and the bundle as an input called
    `name`."""
    from bert_core.bundle.format import bundle_digest

    asked = Reference.parse(reference)
    fixed = _fixed(config, asked)
    folder = fixed.fetch(uri=config.tracking_uri)
    return folder, _as_input(name, bundle_digest(folder), asked, fixed)


def tokenizer_input(config: StageConfig, reference: str) -> tuple[str, "Tokenizer", DatasetInput]:
    """A reference to a tokenizer that means the same files on every machine, the tokenizer, and the
    tokenizer as an input."""
    asked = Reference.parse(reference)
    fixed = _fixed(config, asked)
    tokenizer = fixed.tokenizer()
    place = fixed.uri if isinstance(fixed, OnHub) else str(fixed)
    return place, tokenizer, _as_input("tokenizer", tokenizer.digest, asked, fixed)


def _fixed(config: StageConfig, asked: Reference) -> Reference:
    """The same, and of a model of the hub its commit.

    The commit is the one that an earlier run of the same output took, so that a run that resumes
    goes on with the same model, wherever its branch is by now; `force` takes the newest.
    """
    if not isinstance(asked, OnHub):
        return asked
    marker = files.join(config.output, STARTED)
    started = files.read_json(marker) if not config.force and files.exists(marker) else {}
    before = started.get("hub", {}).get(str(asked))
    return (Reference.parse(f"{PREFIX}{before}") if before else asked).pinned()


def _as_input(name: str, digest: str, asked: Reference, fixed: Reference) -> DatasetInput:
    given = str(asked) if isinstance(asked, OnHub) else ""
    return DatasetInput(name, digest, str(fixed), asked=given)


def input_digest(folder: str, stage: str) -> str:
    """The digest of an earlier stage's finished output."""
    manifest = read_manifest(folder)
    if manifest.stage != stage:
        raise ConfigError(
            f"{folder}: wanted the output of `raybert {stage}`, got that of "
            f"`raybert {manifest.stage}`"
        )
    return manifest.digest
