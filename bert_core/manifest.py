"""`manifest.json`, which every stage writes into its folder last.

A folder with a manifest is complete; one without is unusable. `digest` covers everything that
determined the output, so a stage is done if its manifest carries the digest that it would write.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from bert_core import files
from bert_core.containment import check_name
from bert_core.errors import FormatError
from bert_core.typed import as_type, parse_json

FORMAT_VERSION = 2  # 1 had no sha256 of itself
NAME, SEAL = "manifest.json", "sha256"
BUNDLE = "bundle"
"""Folder of the bundle within the output of a stage that makes one."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """One file of a stage's folder."""

    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: str) -> "Output":
        return cls(size_bytes=files.size_bytes(path), sha256=files.sha256_of(path))


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The figure of a run that matters most."""

    label: str
    value: str
    beside: str = ""
    """The value to compare it with."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A record of a finished stage: its inputs, settings and outputs."""

    stage: str
    """The stage's name: `prepare`, `pretrain`, …"""
    digest: str
    """sha256 over stage, config and inputs: what determines the output."""
    config: dict[str, Any]
    """The fields of the stage's config that determine its output."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digest of every input: of its manifest if a stage wrote it, else of its bytes."""
    hub: dict[str, str] = field(default_factory=dict)
    """The inputs that are models of the Hugging Face hub, as `owner/name@commit`; informative, not
    in the digest."""
    outputs: dict[str, Output] = field(default_factory=dict)
    """Every file of the folder that belongs to the result, by its path inside the folder."""
    bundle: str = ""
    """Digest of the bundle among the outputs; empty without one, and before version 2."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Figures about the result for people to read: rows, tokens, losses, seconds."""
    line: str = ""
    """The outcome in a few words; this and the fields below are informative, not in the
    digest. Older versions wrote none of them."""
    sentence: str = ""
    """The same for a reader who knows neither the stage nor its figures."""
    headline: Headline | None = None
    cards: dict[str, str] = field(default_factory=dict)
    """Title → artifact of the run, for those that describe the output to a reader."""
    code_version: str = ""
    """Version of the code that wrote it; informative, not in the digest."""
    format_version: int = FORMAT_VERSION

    def files_in(self, folder: str) -> dict[str, str]:
        """Return the sha256 of each output in a folder, by its path inside that folder."""
        return {
            name.removeprefix(f"{folder}/"): output.sha256
            for name, output in self.outputs.items()
            if name.startswith(f"{folder}/")
        }


def stage_digest(stage: str, config: dict[str, Any], inputs: dict[str, str]) -> str:
    """Return the sha256 of everything that determines a stage's output."""
    text = json.dumps([1, stage, config, inputs], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest, which completes `folder`."""
    files.write_json(files.join(folder, NAME), entries_of(manifest))


def entries_of(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as JSON, with its own sha256, by which a later edit is noticed."""
    entries = dataclasses.asdict(manifest)
    return entries | {SEAL: _sha256(entries)}


def _sha256(entries: dict[str, Any]) -> str:
    """Return the sha256 of the manifest's entries, in a fixed order."""
    # Parsed again: number keys become strings, which sort in another order.
    text = json.dumps(json.loads(json.dumps(entries)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: str) -> Manifest:
    """Read the manifest of a complete folder.

    Raises: FormatError if it is missing, damaged, edited, names a file outside the folder, or was
        written by newer code.
    """
    path = files.join(folder, NAME)
    try:
        data = files.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FormatError(
            f"{folder}: wanted the folder of a finished stage, it has no {NAME}: "
            "run the stage that writes it, or give another folder"
        ) from error
    try:
        entries = parse_json(data, path)
        version = entries.get("format_version") if isinstance(entries, dict) else None
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise FormatError("no format_version")
        if version <= FORMAT_VERSION:
            manifest: Manifest = as_type(Manifest, entries, path)
            for name in manifest.outputs:
                check_name(name, "outputs")
            if (version > 1 or SEAL in entries) and entries.pop(SEAL, None) != _sha256(entries):
                raise FormatError("it was edited since it was written")
    except FormatError as error:
        raise _damaged(path, str(error).removeprefix(f"{path}: ")) from error
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: wanted format_version {FORMAT_VERSION} or older, got {version}: "
            "it was made by a newer raybert, update this one"
        )
    return manifest


def _damaged(path: str, why: str) -> FormatError:
    return FormatError(
        f"{path}: wanted a raybert manifest, this one cannot be read ({why}): run its stage again "
        "with --force, or copy the folder again"
    )


def is_complete(folder: str) -> bool:
    """Whether a stage finished in `folder`."""
    return files.exists(files.join(folder, NAME))


def folder_with(reference: str, *names: str) -> str | None:
    """Return the folder that has one of these files: `reference` itself, or the bundle in it; None
    if neither has one.

    So wherever a bundle is wanted, the output of a stage that makes one will do.
    """
    for folder in (reference, files.join(reference, BUNDLE)):
        if any(files.exists(files.join(folder, name)) for name in names):
            return folder
    return None
