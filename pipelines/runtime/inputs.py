"""Resolves the inputs of a stage: the files that a reference means, with their digest."""

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
    """Return the local folder of a bundle, and the bundle as an input.

    Args:
        reference: of any kind: a path, URI, registered model or hub name.
        name: of the input.
    """
    from bert_core.bundle.format import bundle_digest

    asked = Reference.parse(reference)
    fixed = _fixed(config, asked)
    folder = fixed.fetch(uri=config.tracking_uri)
    return folder, _as_input(name, bundle_digest(folder), asked, fixed)


def tokenizer_input(config: StageConfig, reference: str) -> tuple[str, "Tokenizer", DatasetInput]:
    """Return a reference to a tokenizer that means the same files on every machine, the tokenizer,
    and the tokenizer as an input."""
    asked = Reference.parse(reference)
    fixed = _fixed(config, asked)
    tokenizer = fixed.tokenizer()
    place = fixed.uri if isinstance(fixed, OnHub) else str(fixed)
    return place, tokenizer, _as_input("tokenizer", tokenizer.digest, asked, fixed)


def _fixed(config: StageConfig, asked: Reference) -> Reference:
    """Pin a model of the hub to a commit; return any other reference unchanged.

    The commit is the one that an earlier run of the same output used, so that a resumed run
    continues with the same model even if its branch has moved on; with `force` it is the newest.
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
    """Return the digest of an earlier stage's finished output. Raises: ConfigError if another stage
    made it."""
    manifest = read_manifest(folder)
    if manifest.stage != stage:
        raise ConfigError(
            f"{folder}: wanted the output of `raybert {stage}`, got that of "
            f"`raybert {manifest.stage}`"
        )
    return manifest.digest
