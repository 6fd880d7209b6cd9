"""Weights and configs to and from Hugging Face's names, per family. Every tensor keeps its values.

Ours join query, key and value in one tensor and keep the tied decoder once; theirs split the
first (DeBERTa v1 joins it head by head), and their files leave out the second.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bert_core.errors import ConfigError, FormatError
from bert_core.model.config import ConvolutionConfig, EncoderConfig
from bert_core.model.families import ARCHITECTURES, LAYOUTS, Layout, Names


def architecture(config: EncoderConfig, objectives: frozenset[str]) -> str:
    """Name of transformers' class for an encoder with these objectives.

    Raises: ConfigError if the family has no such class.
    """
    layout = LAYOUTS[config.family]
    ending = ARCHITECTURES.get(objectives, "")
    if ending not in layout.heads or _objectives(layout.heads[ending]) != objectives:
        can = sorted(layout.title + end for end in layout.heads if end != "Model")
        raise ConfigError(
            f"family {config.family}: wanted heads that a class of Hugging Face has "
            f"({', '.join(can)}), got {', '.join(sorted(objectives)) or 'none'}: "
            "choose another task or other objectives, or a model of another family"
        )
    return layout.title + ending


def objectives_of(config: EncoderConfig, name: str) -> frozenset[str]:
    """The objectives whose heads a class of transformers has; none for a class unknown here."""
    layout = LAYOUTS[config.family]
    return _objectives(layout.heads.get(name.removeprefix(layout.title), {}))


def to_huggingface(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """The state of an `ObjectiveModel` under the names of the family's classes.

    Raises: FormatError if a tensor has no place there.
    """
    layout = LAYOUTS[config.family]
    ending = ARCHITECTURES.get(_objectives(state), "Model")
    names = _names(layout, ending)
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if _QKV.search(name) and layout.split is not None:
            for part, rows in zip(layout.split, tensor.chunk(3), strict=True):
                theirs = _renamed(name, {_qkv_module(name): layout.prefix + part})
                renamed[theirs or ""] = rows.contiguous()
            continue
        theirs = _renamed(name, names)
        if theirs is None:
            raise FormatError(f"tensor {name}: Hugging Face's {layout.title} has no such part")
        heads = config.attention.num_heads
        by_head = layout.by_head and name.endswith("qkv.weight")
        renamed[theirs] = _by_head(tensor, heads) if by_head else tensor
    return renamed


def from_huggingface(
    state: Mapping[str, Tensor], config: EncoderConfig, name: str = ""
) -> dict[str, Tensor]:
    """The reverse of `to_huggingface`, for what any version of transformers wrote.

    Old files say `gamma` and `beta`, bare encoders lack the prefix, and some hold `position_ids`
    and the tied decoder: all are understood. Heads that this project does not know are left out.

    Args:
        name: the class that the file is of, which says what a `classifier` is.
    Raises: FormatError if the encoder holds a part that the family lacks, lacks a third of a joined
        tensor or has it in another shape, or its decoder is not the word embedding.
    """
    layout = LAYOUTS[config.family]
    theirs = _modern(state, layout)
    names = _readable(layout, name.removeprefix(layout.title))
    renamed: dict[str, Tensor] = {}
    joined: dict[str, dict[str, Tensor]] = {}
    thirds = {layout.prefix + part: part for part in layout.split or ()}
    for name, tensor in theirs.items():
        part = _renamed(name, dict.fromkeys(thirds, "encoder.layers.{n}.attention.qkv"))
        ours = _renamed(name, names)
        if part is not None:
            third = next(thirds[one] for one in thirds if _renamed(name, {one: one}))
            _check_shape(name, tensor, config.hidden_size, config)
            joined.setdefault(part, {})[third] = tensor
        elif ours is not None:
            heads = config.attention.num_heads
            by_head = layout.by_head and ours.endswith("qkv.weight")
            if by_head:
                _check_shape(name, tensor, 3 * config.hidden_size, config)
            renamed[ours] = _by_kind(tensor, heads) if by_head else tensor
        elif name in layout.tied:
            if name.endswith(".weight"):  # a second bias is read by no version of today
                _check_tied(name, layout.tied[name], theirs)
        elif name.startswith(layout.prefix) and not _ignored(name, config):
            raise FormatError(
                f"tensor {name}: the encoder of {layout.title} has no such part here; wanted the "
                f"weights of a {layout.title} as it was published"
            )
    for part, found in joined.items():
        wanted = layout.split or ()
        if len(found) != len(wanted):
            short = [one.rpartition(".")[2] for one in wanted]
            came = [one.rpartition(".")[2] for one in found]
            raise FormatError(
                f"tensor {part}: wanted {', '.join(short)}, found only {', '.join(came)}"
            )
        renamed[part] = torch.cat([found[one] for one in wanted])
    return renamed


def encoder_config_to_huggingface(config: EncoderConfig) -> dict[str, Any]:
    """The entries of `config.json` that describe the encoder."""
    layout = LAYOUTS[config.family]
    flat = _flat(config)
    entries = {
        key: flat[path]
        for path, key in layout.keys.items()
        if flat.get(path) is not None and not key.startswith("_")
    }
    return {"model_type": config.family, **layout.wanted, **entries}


def encoder_config_from_huggingface(entries: Mapping[str, Any]) -> EncoderConfig:
    """The encoder that a `config.json` describes; what is left out has transformers' default.

    Raises: FormatError if it describes a family that is not known here, a decoder, another
        mathematics than was published, or sizes that do not fit.
    """
    entries = {name: value for name, value in entries.items() if value is not None}
    family = entries.get("model_type", "bert")
    if not isinstance(family, str) or family not in LAYOUTS:
        raise FormatError(
            f"model_type = {family!r}: wanted one of the families {', '.join(LAYOUTS)}"
        )
    layout = LAYOUTS[family]
    for name, wanted in (_WANTED | dict(layout.wanted)).items():
        came = entries.get(name, layout.absent.get(name, wanted))
        if _plain(came) != _plain(wanted):
            raise FormatError(
                f"{name} = {came!r}: wanted {wanted!r}, as {layout.title} was published"
            )
    try:
        read = layout.read(dict(entries))
        known = {path: read[key] for path, key in layout.keys.items() if read.get(key) is not None}
        for path in known:
            if path.endswith("activation"):
                known[path] = _ACTIVATIONS.get(known[path], known[path])
        return _changed(layout.defaults, known)
    except (ConfigError, TypeError, ValueError) as error:
        raise FormatError(f"config.json does not describe a {layout.title}: {error}") from error


_QKV = re.compile(r"^encoder\.layers\.\d+\.attention\.qkv\.(weight|bias)$")
_BARE = ("embeddings.", "encoder.", "transformer.", "layers.", "final_norm.", "pooler.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WANTED = {"is_decoder": False, "position_embedding_type": "absolute", "tie_word_embeddings": True}
# The tanh approximation has three spellings there, the exact one two.
_ACTIVATIONS = {"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


def _objectives(names: Iterable[str]) -> frozenset[str]:
    """Whose parts these are, of names as ours are."""
    return frozenset(name.split(".")[1] for name in names if name.startswith("objectives."))


def _names(layout: Layout, ending: str) -> dict[str, str]:
    """Ours → theirs, whole, for a class."""
    encoder = {f"encoder.{ours}": layout.prefix + theirs for ours, theirs in layout.encoder.items()}
    return encoder | dict(layout.heads.get(ending, layout.heads["Model"]))


def _readable(layout: Layout, ending: str) -> dict[str, str]:
    """Theirs → ours: the class's own names, and those of other classes that mean one thing only."""
    own = _names(layout, ending if ending in layout.heads else "Model")
    meanings: dict[str, set[str]] = {}
    for names in layout.heads.values():
        for ours, theirs in names.items():
            meanings.setdefault(theirs, set()).add(ours)
    others = {
        theirs: ours.pop()
        for theirs, ours in meanings.items()
        if len(ours) == 1 and not ours & own.keys()
    }
    return others | {theirs: ours for ours, theirs in own.items()}


def _renamed(name: str, names: Names) -> str | None:
    """A tensor's name by a table of names of tensors or of modules; None if it is not there."""
    module, _, kind = name.rpartition(".")
    number = _NUMBER.search(name)
    layer = number.group() if number else ""

    def general(text: str) -> str:
        return _NUMBER.sub("{n}", text + ".", count=1)[:-1]

    for key, ending in (
        (name, ""),
        (module, f".{kind}"),
        (general(name), ""),
        (general(module), f".{kind}"),
    ):
        if key in names:
            return names[key].replace("{n}", layer) + ending
    return None


def _qkv_module(name: str) -> str:
    return _NUMBER.sub("{n}", name.rpartition(".")[0], count=1)


def _modern(state: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The tensors under the names that transformers gives them today."""
    bare = not any(name.startswith(layout.prefix) for name in state)
    modern = {}
    for name, tensor in state.items():
        if bare and name.startswith(_BARE):
            name = layout.prefix + name
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        modern[_renamed(name, layout.aliases) or name] = tensor
    return modern


def _ignored(name: str, config: EncoderConfig) -> bool:
    """Buffers of old versions, and positions in files of models that do not use them."""
    if name.endswith((".position_ids", ".token_type_ids")) or ".pooler." in name:
        return True
    return ".position_embeddings." in name and not config.embeddings.absolute_positions


def _check_shape(name: str, tensor: Tensor, outputs: int, config: EncoderConfig) -> None:
    wanted = (outputs, config.hidden_size)[: 1 if name.endswith("bias") else 2]
    if tensor.shape != wanted:
        raise FormatError(f"tensor {name}: wanted shape {wanted}, found {tuple(tensor.shape)}")


def _check_tied(name: str, twin: str, theirs: Mapping[str, Tensor]) -> None:
    if twin not in theirs or not torch.equal(theirs[name], theirs[twin]):
        came = "found others" if twin in theirs else "which is not there"
        raise FormatError(
            f"tensor {name}: wanted the values of {twin}, {came}: "
            "only a decoder that is tied to the word embedding is supported"
        )


def _by_head(weight: Tensor, heads: int) -> Tensor:
    """Rows of query, key and value (3, H, d) in DeBERTa v1's order (H, 3, d)."""
    return weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def _by_kind(weight: Tensor, heads: int) -> Tensor:
    """The reverse of `_by_head`."""
    return weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def _plain(value: Any) -> Any:
    """Lists and `a|b` strings as sets, in which order means nothing."""
    if isinstance(value, str) and "|" in value:
        return {part.strip() for part in value.split("|")}
    return set(value) if isinstance(value, list | tuple) else value


def _flat(config: Any, path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in vars(config).items():
        if is_dataclass(value):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[path + name] = value
    return flat


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A config with changes given by dotted paths."""
    parts: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            parts.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    nested = {
        name: _changed(getattr(config, name) or ConvolutionConfig(), below)  # the one optional part
        for name, below in parts.items()
    }
    return replace(config, **own, **nested)
