"""Weights and configs to and from Hugging Face's names. Every tensor keeps its values.

Ours join query, key and value in one tensor and keep the tied decoder once; theirs split the
first, and their files leave out the second.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from bert_core.errors import ConfigError, FormatError
from bert_core.model.variants import EncoderConfig

# Ours → theirs. `{n}` is a layer's number; a name stands for its weight and its bias.
_NAMES = {
    "encoder.embeddings.word_embeddings": "bert.embeddings.word_embeddings",
    "encoder.embeddings.position_embeddings": "bert.embeddings.position_embeddings",
    "encoder.embeddings.token_type_embeddings": "bert.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "bert.embeddings.LayerNorm",
    "encoder.layers.{n}.attention.output": "bert.encoder.layer.{n}.attention.output.dense",
    "encoder.layers.{n}.attention_norm": "bert.encoder.layer.{n}.attention.output.LayerNorm",
    "encoder.layers.{n}.feed_forward.up": "bert.encoder.layer.{n}.intermediate.dense",
    "encoder.layers.{n}.feed_forward.down": "bert.encoder.layer.{n}.output.dense",
    "encoder.layers.{n}.feed_forward_norm": "bert.encoder.layer.{n}.output.LayerNorm",
    "encoder.pooler.dense": "bert.pooler.dense",
    "objectives.mlm.head.dense": "cls.predictions.transform.dense",
    "objectives.mlm.head.norm": "cls.predictions.transform.LayerNorm",
    "objectives.mlm.head": "cls.predictions",
    "objectives.nsp.head.linear": "cls.seq_relationship",
    "objectives.classification.head.linear": "classifier",
}
_OURS = {theirs: ours for ours, theirs in _NAMES.items()}
_QKV = "encoder.layers.{n}.attention.qkv"
_SPLIT = ("query", "key", "value")
_SELF = "bert.encoder.layer.{n}.attention.self."
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_DECODER = "cls.predictions.decoder."
_WORDS = "bert.embeddings.word_embeddings.weight"
# The tanh approximation has three spellings there, the exact one two.
_ACTIVATIONS = {"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


def _parts(name: str) -> tuple[str, str, str]:
    """A tensor's name as (module with `{n}` for the layer, layer or "", weight or bias)."""
    module, _, kind = name.rpartition(".")
    layer = _LAYER.search(module + ".")
    if layer is None:
        return module, "", kind
    return module[: layer.start()] + "{n}" + module[layer.end() :], layer.group(), kind


def to_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an `ObjectiveModel` under the names of transformers' BERT classes.

    Raises: FormatError if a tensor has no place there.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, layer, kind = _parts(name)
        if module == _QKV:
            for part, rows in zip(_SPLIT, tensor.chunk(3), strict=True):
                renamed[f"{_SELF}{part}.{kind}".replace("{n}", layer)] = rows.contiguous()
        elif module in _NAMES:
            renamed[f"{_NAMES[module]}.{kind}".replace("{n}", layer)] = tensor
        else:
            raise FormatError(f"tensor {name}: Hugging Face's BERT has no such part")
    return renamed


def from_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `to_huggingface`, for what any version of transformers wrote.

    Old files say `gamma` and `beta`, bare encoders lack the `bert.` prefix, and some hold
    `position_ids` and the tied decoder: all are understood. Heads that this project does not know
    are left out.
    Raises: FormatError if the encoder holds a part that BERT lacks, lacks a third of a joined
        tensor, or its decoder is not the word embedding.
    """
    theirs = {_modern(name): tensor for name, tensor in state.items()}
    renamed: dict[str, Tensor] = {}
    joined: dict[str, dict[str, Tensor]] = {}
    for name, tensor in theirs.items():
        module, layer, kind = _parts(name)
        if module.startswith(_SELF) and module.removeprefix(_SELF) in _SPLIT:
            ours = f"{_QKV}.{kind}".replace("{n}", layer)
            joined.setdefault(ours, {})[module.removeprefix(_SELF)] = tensor
        elif module in _OURS:
            renamed[f"{_OURS[module]}.{kind}".replace("{n}", layer)] = tensor
        elif name.startswith(_DECODER):
            _check_tied(name, tensor, theirs)
        elif name.startswith("bert.") and not name.endswith(".position_ids"):
            raise FormatError(
                f"tensor {name}: BERT's encoder has no such part; wanted the weights of a BERT"
            )
    for name, thirds in joined.items():
        if len(thirds) != len(_SPLIT):
            raise FormatError(
                f"tensor {name}: wanted {', '.join(_SPLIT)}, found only {', '.join(thirds)}"
            )
        renamed[name] = torch.cat([thirds[part] for part in _SPLIT])
    return renamed


def _modern(name: str) -> str:
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


def _check_tied(name: str, tensor: Tensor, theirs: Mapping[str, Tensor]) -> None:
    twin = theirs.get(_WORDS if name.endswith(".weight") else "cls.predictions.bias")
    if twin is None or not torch.equal(tensor, twin):
        raise FormatError(
            f"tensor {name}: wanted the word embedding's own values, found others: "
            "only a decoder that is tied to the embedding is supported"
        )


def encoder_config_to_huggingface(config: EncoderConfig) -> dict[str, Any]:
    """The entries of `config.json` that describe the encoder."""
    return {"model_type": "bert", **asdict(config)}


def encoder_config_from_huggingface(entries: Mapping[str, Any]) -> EncoderConfig:
    """The encoder that a `config.json` describes; what is left out has BERT's default.

    Raises: FormatError if it describes another family, a decoder, or sizes that do not fit.
    """
    family = entries.get("model_type", "bert")
    if family != "bert":
        raise FormatError(
            f"model_type = {family!r}: wanted 'bert', the one family that is supported"
        )
    for name, wanted in (
        ("is_decoder", False),
        ("position_embedding_type", "absolute"),
        ("tie_word_embeddings", True),
    ):
        if entries.get(name, wanted) != wanted:
            raise FormatError(
                f"{name} = {entries[name]!r}: wanted {wanted!r}, as BERT was published"
            )
    known = {
        field.name: entries[field.name]
        for field in fields(EncoderConfig)
        if entries.get(field.name) is not None
    }
    activation = known.get("hidden_act", "gelu")
    try:
        return EncoderConfig(**(known | {"hidden_act": _ACTIVATIONS.get(activation, activation)}))
    except (ConfigError, TypeError) as error:
        raise FormatError(f"config.json does not describe a BERT: {error}") from error
