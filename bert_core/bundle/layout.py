"""The files of a bundle: their names, JSON and sha256."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bert_core import files
from bert_core.containment import check_name, file_in
from bert_core.errors import FormatError
from bert_core.typed import as_type, check_size, parse_json
from bert_core.wording import as_json

FORMAT_VERSION = 2
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
    """Precision of matrix products."""

    def __str__(self) -> str:
        return f"{self.engine} in {self.precision}"


UNRECORDED_EXECUTIONS = {
    "fp32": (Execution("onnxruntime", "fp32"), Execution("openvino", "fp32")),
    "int8": (Execution("onnxruntime", "int8"),),
}
"""Precision of a graph → how it may be run, in bundles from before that was recorded. The 8 bits of
those take their ranges from each batch."""


def names_in(folder: Path) -> list[str]:
    """Return the files of a bundle as relative paths, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def read_json(path: Path, hint: Any = dict[str, Any]) -> Any:
    """Return the JSON value of a file, as the type `hint`. Raises: FormatError."""
    try:
        file = file_in(path.parent, path.name)
        check_size(file.stat().st_size, str(path))
        data = file.read_bytes()
    except FileNotFoundError as error:
        raise FormatError(
            f"{path}: wanted this file, it is missing: give the folder of a bundle, or of a model "
            "that transformers wrote with save_pretrained"
        ) from error
    return as_type(hint, parse_json(data, str(path)), str(path))


def named_labels(entries: Mapping[str, Any], where: str) -> dict[int, str]:
    """Return the labels that a `config.json` names, by index, ascending; empty if it names none.

    Raises: FormatError if it does not map whole numbers to names.
    """
    listed = as_type(
        dict[str, str | int | float | bool] | None,
        entries.get("id2label"),
        where,
        key="id2label",
    )
    try:
        return dict(sorted((int(index), str(label)) for index, label in (listed or {}).items()))
    except ValueError as error:
        raise FormatError(
            f"{where}: id2label: wanted names of labels by their whole numbers, got "
            f"{as_json(listed)}: correct it, or copy it again"
        ) from error


def recorded_files(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of each file that a record names, by file name.

    Raises: FormatError if it lists them in another form, or names a file outside the folder.
    """
    listed: dict[str, str] = as_type(dict[str, str], entries.get("files", {}), RECORD, key="files")
    return {check_name(name, RECORD): sha256 for name, sha256 in listed.items()}


def label_entries(labels: Sequence[str]) -> dict[str, Any]:
    """Return the entries of `config.json` that name the labels."""
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def sha256s_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each of these files in a folder. Raises: FormatError if one is missing
    or outside the folder."""
    return {name: files.sha256_of(str(path_of(folder, name))) for name in names}


def path_of(folder: Path, name: str) -> Path:
    """Return the path of a file that a bundle needs, like `file_in`. Raises: FormatError also if it
    is missing."""
    try:
        return file_in(folder, name)
    except FileNotFoundError as error:
        raise FormatError(
            f"{folder / name}: wanted this file of the bundle, it is missing: "
            "copy or write the bundle again"
        ) from error


def digest_of(sha256s: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(sha256s.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
