"""Folders written by transformers and sentence-transformers: which files belong to a bundle, and
its task."""

from collections.abc import Callable, Collection, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any

from bert_core.bundle.layout import (
    CONFIG,
    OBJECTIVE,
    TRAINED_ROWS,
    WEIGHTS,
    named_labels,
    read_json,
)
from bert_core.containment import check_name, has_file
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.feature_extraction import POOLING, FeatureExtraction
from bert_core.tasks.modules import (
    ABOUT,
    MODULES,
    OLD_SETTINGS,
    SAYS,
    SETTINGS,
    SentenceTransformer,
    check_cross_encoder,
    described,
    kinds_of,
    longest_of,
    settings_of,
)
from bert_core.tasks.sparse_embedding import SPLADE_POOLING
from bert_core.typed import as_type

# Other formats of weights: in parts, or as saved by torch.
WEIGHTS_INDEX, OLD_WEIGHTS = "model.safetensors.index.json", "pytorch_model.bin"
WEIGHT_FORMS = (WEIGHTS, WEIGHTS_INDEX, OLD_WEIGHTS, f"{OLD_WEIGHTS}.index.json")
"""Files that weights are read from, or the index of their parts; the first that exists counts."""
# The files of a bundle without `raybert.json`.
FOREIGN_FILES = (
    CONFIG,
    WEIGHTS,
    OBJECTIVE,
    TRAINED_ROWS,
    "tokenizer.json",
    "vocab.txt",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    MODULES,
    POOLING,
    SPLADE_POOLING,
    SETTINGS,
    *OLD_SETTINGS,
    ABOUT,
)


def weights_among(names: Collection[str], read: Callable[[str], Mapping[str, Any]]) -> list[str]:
    """Return the files that hold the weights: a single file, or an index and the parts that it
    names; empty if none of them has a supported format.

    Args:
        names: the files that exist.
        read: returns the JSON object in one of them.
    """
    form = next((form for form in WEIGHT_FORMS if form in names), None)
    if form is None:
        return []
    if not form.endswith(".json"):
        return [form]
    parts = as_type(dict[str, str], read(form).get("weight_map", {}), form, key="weight_map")
    return [form, *sorted({check_name(name, form) for name in parts.values()})]


def weight_files(folder: Path) -> list[str]:
    """Return `weights_among` of a folder's files; the usual file name if it finds none."""
    names = [form for form in WEIGHT_FORMS if has_file(folder, form)]
    return weights_among(names, lambda name: read_json(folder / name)) or [WEIGHTS]


def task_of_transformers(
    folder: Path, objectives: frozenset[str], entries: dict[str, Any], state: Mapping[str, Sized]
) -> Task | None:
    """Return the task of a folder written by transformers, or by sentence-transformers for a
    CrossEncoder; None if no task matches.

    Args:
        objectives: names of the objectives that the model's class stands for.
        entries: contents of its config.json.
        state: the model's tensors, under our names.
    """
    kinds = [task for task in TASKS.values() if task.trainable]
    known = [task for task in kinds if objectives == {task.objective}]
    if not known:
        return None
    head = state.get(f"objectives.{known[0].objective}.head.linear.weight", ())
    names = named_labels(entries, CONFIG)
    # transformers omits its default names from the file.
    labels = [names.get(index, f"LABEL_{index}") for index in range(len(head))]
    read = partial(_read, folder)
    entries = entries | {SAYS: settings_of(entries, read)}
    check_cross_encoder(entries[SAYS], read)
    tasks = (task.from_huggingface(entries, labels) for task in known)
    task = next(filter(None, tasks), None)
    return None if task is None else task.adapted(state)


def task_of_modules(folder: Path, *, bare: bool) -> Task | None:
    """Return the task of a folder whose modules sentence-transformers lists, or of an encoder
    without a head; None if there is none."""
    read = partial(_read, folder)
    if (folder / MODULES).is_file():
        kinds = (kind for kind in TASKS.values() if issubclass(kind, SentenceTransformer))
        return next(filter(None, (kind.from_modules(read) for kind in kinds)), None)
    if not bare:
        return None
    # As sentence-transformers does, which creates the modules of such a folder itself.
    return FeatureExtraction(options=FeatureExtraction.options(max_length=longest_of(read)))


def listed_modules(folder: Path) -> str:
    """Describe, for messages, the modules by which sentence-transformers computes vectors, and
    their settings; empty if the folder lists fewer than two."""
    read = partial(_read, folder)
    return described(read) if len(kinds_of(read)) > 1 else ""


def _read(folder: Path, name: str) -> Any:
    hint = list[dict[str, Any]] if name == MODULES else dict[str, Any]
    return read_json(folder / name, hint) if has_file(folder, name) else None
