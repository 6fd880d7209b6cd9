"""Low-rank adapters: which layers of an encoder they change, and what of a model then learns."""

import re
from collections.abc import Mapping

from torch import nn

from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig
from bert_core.model.disentangled import KeylessBiasLinear
from bert_core.model.encoder import Encoder
from bert_core.model.hf_weights import names_of_module
from bert_core.model.layers import without_values
from bert_core.model.low_rank import Adapted
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.train.config import AdapterConfig
from bert_core.wording import nearest, one_of

ALL = "all-linear"
"""All linear layers of the encoder, as peft names them."""
SAVED_HEADS = frozenset({"classification", "token_classification", "span", "multiple_choice"})
"""Objectives whose heads peft saves as modules of a transformers class."""


def check_adapter(config: EncoderConfig, adapter: AdapterConfig, objective: Objective) -> None:
    """Check that an encoder can have an adapter, before there are weights.

    Args:
        objective: what it is trained for.
    Raises: ConfigError if a target names no layer, the rank is higher than that of a layer, or the
        head could not be saved beside the adapter.
    """
    learns = any(True for _ in objective.parameters())
    if learns and (objective.name not in SAVED_HEADS or not objective.in_transformers):
        raise ConfigError(
            f"adapter: wanted a task with one of the heads {', '.join(sorted(SAVED_HEADS))} of "
            f"transformers, which peft saves beside an adapter, or with none, got the head "
            f"{objective.name}: leave the adapter out, or choose other options of the task"
        )
    with without_values():
        encoder = Encoder(config, pooler=False)
    for name, parts in targets_of(encoder, adapter).items():
        outputs, inputs = encoder.get_submodule(name).get_parameter("weight").shape
        most = min(outputs // len(parts), inputs)
        if adapter.rank > most:
            theirs = names_of_module(f"encoder.{name}", config)[0]
            raise ConfigError(
                f"adapter.rank: wanted at most {most}, the rank of {theirs}, got {adapter.rank}: "
                "lower it, or train all weights"
            )


def adapt(model: ObjectiveModel, adapter: AdapterConfig) -> None:
    """Add an adapter to a model's encoder, before its optimizer is made.

    The adapter learns, and the head with its pooler. The factors are drawn from torch's global
    generator.
    """
    model.freeze_weights()
    for name, parts in targets_of(model.encoder, adapter).items():
        owner, _, child = name.rpartition(".")
        base = model.encoder.get_submodule(name)
        changed = Adapted(
            base, parts, rank=adapter.rank, scale=adapter.scale, dropout=adapter.dropout
        )
        setattr(model.encoder.get_submodule(owner), child, changed)


def targets_of(encoder: Encoder, adapter: AdapterConfig) -> Mapping[str, tuple[bool, ...]]:
    """Return the linear layers that an adapter changes, by name, with the parts of their outputs
    that it changes. Raises: ConfigError if one of its targets names no layer."""
    config = encoder.config
    linear = {
        name: names_of_module(f"encoder.{name}", config)
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear | KeylessBiasLinear) and not name.startswith("pooler.")
    }
    targets = adapter.targets or _usual(config)
    known = [name for names in linear.values() for name in names]
    for target in targets:
        if target != ALL and not any(_is_meant(name, target) for name in known):
            ends = sorted({_end(name) for name in known})
            raise ConfigError(
                f"adapter.targets: wanted ends of names of linear layers, {one_of([*ends, ALL])}, "
                f"got {target!r}{nearest(target, ends)}"
            )
    chosen = {
        name: tuple(any(_is_meant(each, target) for target in targets) for each in names)
        for name, names in linear.items()
    }
    return {name: parts for name, parts in chosen.items() if any(parts)}


def _is_meant(name: str, target: str) -> bool:
    return target == ALL or name == target or name.endswith(f".{target}")


def _usual(config: EncoderConfig) -> list[str]:
    """Return query and value, or the matrix that holds them (Hu et al. 2022, section 4.2)."""
    names = names_of_module("encoder.layers.0.attention.qkv", config)
    return [_end(name) for name in (names if len(names) == 1 else (names[0], names[2]))]


def _end(name: str) -> str:
    """Return the end of a layer's name that is the same in all layers of an encoder."""
    *_, last = re.split(r"\.\d+\.", name)
    return last.removeprefix("attention.self.")
