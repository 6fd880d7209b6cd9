"""Folders that transformers and sentence-transformers wrote: which files count, what task it is."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_core.bundle.layout import CONFIG, OBJECTIVE, TRAINED_ROWS, WEIGHTS, read_json
from bert_core.errors import FormatError
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.feature_extraction import MODULES, POOLING, SETTINGS, FeatureExtraction

# Where weights are in folders of others: in parts, or as torch itself saved them.
WEIGHTS_INDEX, OLD_WEIGHTS = "model.safetensors.index.json", "pytorch_model.bin"
# What counts in a folder that holds no record of its own.
FOREIGN_FILES = (
    CONFIG,
    WEIGHTS,
    OBJECTIVE,
    TRAINED_ROWS,
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    MODULES,
    POOLING,
    SETTINGS,
)


def weight_files(folder: Path) -> list[str]:
    """The files that hold the weights: one, or the parts that an index names and it."""
    if not (folder / WEIGHTS).is_file():
        if (folder / WEIGHTS_INDEX).is_file():
            index = read_json(folder / WEIGHTS_INDEX)
            return [WEIGHTS_INDEX, *sorted(set(index.get("weight_map", {}).values()))]
        if (folder / OLD_WEIGHTS).is_file():
            return [OLD_WEIGHTS]
    return [WEIGHTS]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors under their names in the files, floating ones in fp32.

    Raises: FormatError if a file of torch holds anything but tensors.
    """
    state: dict[str, Tensor] = {}
    for name in weight_files(folder):
        if name == OLD_WEIGHTS:
            try:
                state |= torch.load(folder / name, map_location="cpu", weights_only=True)
            except Exception as error:  # NOTE: of pickle, of torch or of the zip file
                raise FormatError(
                    f"{name} is no file of tensors alone ({str(error).splitlines()[0]})"
                ) from error
        elif name != WEIGHTS_INDEX:
            state |= load_file(folder / name)
    return {name: _single(tensor) for name, tensor in state.items()}


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def task_of_transformers(
    objectives: frozenset[str], entries: dict[str, Any], state: dict[str, Tensor]
) -> Task | None:
    """The task of a folder that transformers wrote; None for what no task here answers."""
    known = [task for task in TASKS.values() if objectives == {task.objective}]
    if not known:
        return None
    head = state.get(f"objectives.{known[0].objective}.head.linear.weight", ())
    named = entries.get("id2label") or {}
    if not isinstance(named, dict):
        raise FormatError(
            f"{CONFIG}: wanted id2label to be a JSON object, found {type(named).__name__}: copy it "
            "again"
        )
    names = {int(index): label for index, label in named.items()}
    # transformers leaves its own default names out of the file.
    labels = [names.get(index, f"LABEL_{index}") for index in range(len(head))]
    tasks = (task.from_huggingface(entries, labels) for task in known)
    task = next(filter(None, tasks), None)
    return None if task is None else task.adapted(state)


def task_of_vectors(folder: Path, *, bare: bool) -> Task | None:
    """The task of a folder that sentence-transformers wrote, or of an encoder without a head."""

    def read(name: str) -> Any:
        wanted = list if name == MODULES else dict
        return read_json(folder / name, wanted) if (folder / name).is_file() else None

    if (folder / MODULES).is_file():
        return FeatureExtraction.from_modules(read)
    return FeatureExtraction() if bare else None


def class_name(entries: dict[str, Any]) -> str:
    """The class of transformers that a folder is of; nothing where it does not say."""
    named = entries.get("architectures") or [""]
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise FormatError(f"architectures = {named!r}: wanted a list of names")
    return named[0]
