"""Reads the files that hold a bundle's tensors."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bert_core.bundle.foreign import weight_files
from bert_core.bundle.layout import path_of
from bert_core.bundle.memory import check_header
from bert_core.errors import FormatError
from bert_core.wording import first_line


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read a folder's tensors, under their names in the files; floating-point tensors become fp32.

    Raises: FormatError if a torch file holds anything but tensors by name.
    """
    state: dict[str, Tensor] = {}
    for name in weight_files(folder):
        path_of(folder, name)
        if name.endswith(".bin"):
            try:
                loaded = torch.load(folder / name, map_location="cpu", weights_only=True)
            except Exception as error:  # NOTE: from pickle, torch or zipfile
                raise FormatError(
                    f"{name} is not a file of tensors only ({first_line(str(error))})"
                ) from error
            state |= _tensors_by_name(name, loaded)
        elif not name.endswith(".json"):
            state |= read_tensors(folder / name)
    return {name: _single(tensor) for name, tensor in state.items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file.

    Raises: see `check_header`; SafetensorError if the file is damaged.
    """
    check_header(path)
    return load_file(path)


def _tensors_by_name(file: str, loaded: Any) -> dict[str, Tensor]:
    if not isinstance(loaded, dict):
        raise FormatError(f"{file}: wanted tensors by name, got {type(loaded).__name__}")
    for name, value in loaded.items():
        if not isinstance(value, Tensor):
            raise FormatError(
                f"{file}: wanted tensors by name, {name!r} is {type(value).__name__}: save the "
                "model's state_dict() alone"
            )
    return loaded


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
