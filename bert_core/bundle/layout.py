"""A bundle's files: their names, JSON and sha256."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bert_core import files
from bert_core.errors import FormatError

FORMAT_VERSION = 1
CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "raybert.json"
OBJECTIVE = "objective.safetensors"
TRAINED_ROWS = "trained_rows.npy"
GRAPHS = {"fp32": "onnx/model.onnx", "int8": "onnx/model_quantized.onnx"}
"""Path of the graph, by its precision."""


class Execution(NamedTuple):
    """A way to compute a model's scores."""

    engine: str
    """`torch`, or what runs a graph."""
    precision: str
    """Of matrix products."""

    def __str__(self) -> str:
        return f"{self.engine} in {self.precision}"


UNRECORDED_EXECUTIONS = {
    "fp32": (Execution("onnxruntime", "fp32"), Execution("openvino", "fp32")),
    "int8": (Execution("onnxruntime", "int8"),),
}
"""Precision of a graph → how it may be run, in bundles from before that was recorded. The 8 bits of
those take their ranges from each batch."""


def names_in(folder: Path) -> list[str]:
    """The files of a bundle as relative paths, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def read_json(path: Path, kind: type = dict) -> Any:
    if not path.is_file():
        raise FormatError(
            f"{path}: wanted this file, it is missing: give the folder of a bundle, or of a model "
            "that transformers wrote with save_pretrained"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(
            f"{path}: wanted JSON, it cannot be read ({error}): copy it again"
        ) from error
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "list"
        raise FormatError(
            f"{path}: wanted a JSON {wanted}, got {type(value).__name__}: copy it again"
        )
    return value


def sha256s_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: files.sha256_of(str(folder / name)) for name in names}


def digest_of(sha256s: dict[str, str]) -> str:
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(sha256s.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
