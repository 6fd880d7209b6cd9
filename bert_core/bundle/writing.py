"""Writes bundles."""

import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from bert_core import files
from bert_core.bundle.adapter_layout import ADAPTER
from bert_core.bundle.adapter_writing import write_adapter
from bert_core.bundle.format import About, check_vocabulary
from bert_core.bundle.layout import (
    CONFIG,
    OBJECTIVE,
    TRAINED_ROWS,
    WEIGHTS,
    Execution,
    label_entries,
    names_in,
)
from bert_core.bundle.record import write_record
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError
from bert_core.model.families import LAYOUTS
from bert_core.model.heads import LinearHead
from bert_core.model.hf import architecture, encoder_config_to_huggingface
from bert_core.model.hf_weights import to_huggingface
from bert_core.model.low_rank import adapted_modules
from bert_core.model.sharing import plain_state
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.tasks.base import Task
from bert_core.tasks.modules import SentenceTransformer


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph to write to a bundle instead of weights."""

    name: str
    """One of `GRAPHS`."""
    write: Callable[[Path], object]
    """Writes it to a path, with any data files next to it."""
    executions: Sequence[Execution] = ()
    """`Bundle.executions` of it."""


def save_bundle(
    folder: str | Path,
    model: ObjectiveModel,
    tokenizer: Tokenizer,
    about: About,
    graph: Graph | None = None,
    base: str = "",
) -> None:
    """Write a bundle atomically: the folder appears complete or not at all.

    A model with an adapter is written with the adapter merged into its weights, and the adapter
    alone in the subfolder `adapter`.

    Args:
        base: reference of the model that an adapter changes.
    Raises: ConfigError if `folder` already exists, or the tokenizer has more tokens than the model.
    """
    folder, task, config = Path(folder), about.task, model.encoder.config
    if folder.exists():
        raise ConfigError(
            f"{folder}: wanted a path that does not exist yet, got an existing one: "
            "remove it, or use another output"
        )
    check_vocabulary(folder, config, tokenizer, ConfigError)
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        partial.mkdir(parents=True)
        files.write_json(str(partial / CONFIG), _config_entries(model, tokenizer, task))
        if graph is None:
            _write_weights(partial, model)
            inherited = About(lineage=about.lineage, trained_rows=about.trained_rows)
            for name, _, submodel in submodels_of(model):
                save_bundle(partial / name, submodel, tokenizer, inherited)
            if adapted_modules(model):
                write_adapter(partial / ADAPTER, model, about, base)
        else:
            (partial / graph.name).parent.mkdir()
            graph.write(partial / graph.name)
        longest = (task.max_length if task else None) or config.max_length
        segments = config.embeddings.type_vocab_size > 1 and tokenizer.has_segments
        tokenizer.save(partial, min(longest, config.max_length), segments=segments)
        if len(about.trained_rows):
            np.save(partial / TRAINED_ROWS, np.unique(about.trained_rows))
        if isinstance(task, SentenceTransformer):
            for path, value in task.files(config).items():
                files.write_json(str(partial / path), value)
        write_record(partial, _record_entries(about, graph), names_in(partial))
        _sync(partial)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _config_entries(
    model: ObjectiveModel, tokenizer: Tokenizer, task: Task | None
) -> dict[str, Any]:
    """Return the contents of `config.json`, as transformers reads it."""
    config = model.encoder.config
    entries = encoder_config_to_huggingface(config) | {
        "architectures": [architecture(config, model.in_transformers)],
        "dtype": "float32",
    }
    special = {"cls": tokenizer.cls_id, "sep": tokenizer.sep_id}
    token_ids = LAYOUTS[config.family].token_ids
    entries |= {entry: special[token] for entry, token in token_ids.items()}
    for objective in model.objectives.values():
        if task is not None and isinstance(objective, Classification):
            entries["problem_type"] = objective.problem_type
    if labels := _labels(model, task):
        entries |= label_entries(labels)
    return entries | (task.config_entries() if isinstance(task, SentenceTransformer) else {})


def _record_entries(about: About, graph: Graph | None) -> dict[str, Any]:
    """Return the contents of `raybert.json` without the files."""
    task, runs = about.task, [] if graph is None else [run._asdict() for run in graph.executions]
    optional = {"runs": runs, "spent": about.spent, "examples": list(about.examples)}
    return {
        "task": None if task is None else task.name,
        **({"labels": None} if task is None else task.record),
        "metrics": about.metrics,
        "lineage": about.lineage,
        **{name: value for name, value in optional.items() if value},
    }


def _write_weights(folder: Path, model: ObjectiveModel) -> None:
    """Write the model's own weights, without those of its submodels."""
    whole = {
        name: tensor.detach().float().cpu()
        for name, tensor in plain_state(model).items()
        if name.startswith(("encoder.", "objectives."))  # other tensors are for training only
    }
    heads = {name: tensor for name, tensor in whole.items() if _is_ours(name, model)}
    state = {name: tensor for name, tensor in whole.items() if name not in heads}
    for _, prefix, _ in submodels_of(model):
        heads = {name: tensor for name, tensor in heads.items() if not name.startswith(prefix)}
    theirs = to_huggingface(state, model.encoder.config)
    save_file(theirs, folder / WEIGHTS, metadata={"format": "pt"})
    if heads:
        save_file(heads, folder / OBJECTIVE, metadata={"format": "pt"})


def _is_ours(name: str, model: ObjectiveModel) -> bool:
    """Whether no transformers class has this tensor."""
    if not name.startswith("objectives."):
        return False
    _, known_as, part, *_ = name.split(".")
    objective = model.objectives[known_as]
    assert isinstance(objective, Objective)
    return known_as not in model.in_transformers or part in objective.not_in_transformers


def submodels_of(model: ObjectiveModel) -> list[tuple[str, str, ObjectiveModel]]:
    """Return the models that objectives own, as (folder, prefix of the tensor names, model)."""
    return [
        (folder, f"objectives.{name}.{folder}.", submodel)
        for name, objective in model.objectives.items()
        if isinstance(objective, Objective)
        for folder, submodel in objective.submodels().items()
    ]


def _labels(model: ObjectiveModel, task: Task | None) -> list[str]:
    """Return the labels that a model predicts; without a task, transformers' default names."""
    if task is not None:
        return task.labels
    heads = [getattr(objective, "head", None) for objective in model.objectives.values()]
    counts = [head.linear.out_features for head in heads if isinstance(head, LinearHead)]
    return [f"LABEL_{index}" for index in range(max(counts, default=0))]


def _sync(folder: Path) -> None:
    """Flush a folder's files to disk, so that a rename never exposes empty files."""
    for name in names_in(folder):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
