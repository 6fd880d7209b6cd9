"""Writes the low-rank adapter that a model has learned as a folder that peft reads.

Besides peft's two files it has the bundle's task, labels and options, and the digest of the base,
in `base.json`, and the digests of the rows that it was trained on.

Source: peft 0.21, `LoraConfig`, `get_peft_model_state_dict`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from bert_core import files
from bert_core.bundle.adapter_layout import BASE, BASE_VERSION, CONFIG, TASK_TYPES, WEIGHTS
from bert_core.bundle.format import About
from bert_core.bundle.layout import TRAINED_ROWS
from bert_core.model.families import LAYOUTS
from bert_core.model.hf import architecture
from bert_core.model.hf_weights import factor_by_head, names_of_module, to_huggingface
from bert_core.model.low_rank import adapted_modules
from bert_core.model.sharing import plain_state
from bert_core.objectives.base import ObjectiveModel

_PREFIX = "base_model.model."


def write_adapter(folder: Path, model: ObjectiveModel, about: About, reference: str) -> None:
    """Write a new folder with a model's low-rank changes, its head and its pooler.

    Args:
        about: that of the bundle; `parent` of its lineage is the digest of the base.
        reference: the base, as peft may load it.
    """
    config, changes = model.encoder.config, adapted_modules(model)
    layout = LAYOUTS[config.family]
    ending = architecture(config, model.in_transformers).removeprefix(layout.title)
    prefix = layout.prefix if ending == "Model" else ""  # which a bare encoder's names lack
    tensors: dict[str, Tensor] = {}
    targets = []
    for module, change in changes.items():
        for name, factors in zip(names_of_module(module, config), change.factors(), strict=True):
            if factors is None:
                continue
            a, b = factors
            target = name.removeprefix(prefix)
            targets.append(target)
            tensors[f"{_PREFIX}{target}.lora_A.weight"] = a
            tensors[f"{_PREFIX}{target}.lora_B.weight"] = factor_by_head(b, module, config)
    head = _head(model)
    tensors |= {f"{_PREFIX}{name}": tensor for name, tensor in head.items()}
    change = next(iter(changes.values()))
    types = {each: kind for kind, each in TASK_TYPES.items()} | {"Model": "FEATURE_EXTRACTION"}
    folder.mkdir()
    files.write_json(
        str(folder / CONFIG),
        {
            "peft_type": "LORA",
            "task_type": types.get(ending),
            "base_model_name_or_path": reference,
            "r": change.rank,
            "lora_alpha": change.scale * change.rank,  # with a rank-stabilized scale too
            "lora_dropout": change.dropout.p,
            "target_modules": sorted(targets),
            "modules_to_save": sorted({_saved(name, layout.prefix) for name in head}) or None,
            "bias": "none",
            "inference_mode": True,
        },
    )
    plain = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})
    files.write_json(str(folder / BASE), _base(about))
    if len(about.trained_rows):
        np.save(folder / TRAINED_ROWS, np.unique(about.trained_rows))


def _head(model: ObjectiveModel) -> dict[str, Tensor]:
    """Return the weights of the head, and of its pooler, under the names of transformers' class."""
    heads = ("encoder.pooler.", "objectives.")
    ours = {name: value for name, value in plain_state(model).items() if name.startswith(heads)}
    known = {name: value for name, value in ours.items() if _is_known(name, model)}
    return to_huggingface(known, model.encoder.config)


def _is_known(name: str, model: ObjectiveModel) -> bool:
    return name.startswith("encoder.") or name.split(".")[1] in model.in_transformers


def _saved(name: str, prefix: str) -> str:
    """Return the module of transformers' class that has a tensor of the head."""
    return name.removeprefix(prefix).split(".")[0]


def _base(about: About) -> dict[str, Any]:
    task = about.task
    return {
        "format_version": BASE_VERSION,
        "base": about.lineage.get("parent", ""),
        "task": None if task is None else task.name,
        **({"labels": None} if task is None else task.record),
    }
