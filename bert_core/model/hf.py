"""Converts weights and configs to and from Hugging Face's names, per family. Tensor values do not
change.

We join query, key and value in one tensor and store a tied decoder once. Hugging Face splits query,
key and value (DeBERTa v1 joins them head by head), and its files omit the decoder.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from bert_core.errors import ConfigError, FormatError
from bert_core.model.config import ConvolutionConfig, EncoderConfig
from bert_core.model.families import ARCHITECTURES, LAYOUTS, Layout, Names
from bert_core.typed import as_type


def architecture(config: EncoderConfig, objectives: frozenset[str]) -> str:
    """Return the name of the transformers class for an encoder with these objectives.

    Raises: ConfigError if the family has no such class.
    """
    layout = LAYOUTS[config.family]
    ending = ARCHITECTURES.get(objectives, "")
    if ending not in layout.heads or _objectives(layout.heads[ending]) != objectives:
        classes = sorted(layout.title + end for end in layout.heads if end != "Model")
        raise ConfigError(
            f"family {config.family}: wanted the heads of a Hugging Face class "
            f"({', '.join(classes)}), got {', '.join(sorted(objectives)) or 'none'}: "
            "choose another task or other objectives, or a model of another family"
        )
    return layout.title + ending


def objectives_of(config: EncoderConfig, name: str) -> frozenset[str]:
    """Return the objectives whose heads a transformers class has; empty for an unknown class."""
    layout = LAYOUTS[config.family]
    return _objectives(layout.heads.get(name.removeprefix(layout.title), {}))


def to_huggingface(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Return the state of an `ObjectiveModel` under the names that the family's classes use.

    Raises: FormatError if a tensor has no counterpart there.
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
            raise FormatError(f"tensor {name}: Hugging Face's {layout.title} has no such tensor")
        heads = config.attention.num_heads
        by_head = layout.by_head and name.endswith("qkv.weight")
        renamed[theirs] = _by_head(tensor, heads) if by_head else tensor
    return renamed


def from_huggingface(
    state: Mapping[str, Tensor], config: EncoderConfig, name: str = ""
) -> dict[str, Tensor]:
    """Do the reverse of `to_huggingface`, for files of any transformers version.

    Old files with `gamma` and `beta`, bare encoders without the prefix, names prefixed with torch's
    `module.`, and files with `position_ids` and the tied decoder, or only the decoder, are all
    read. Heads unknown to this project are dropped.

    Args:
        name: the file's class, which determines what a `classifier` is.
    Raises: FormatError if the encoder has a tensor that the family lacks, if query, key or value is
        missing or has another shape, or if the decoder is not the word embedding, or has a bias of
        its own.
    """
    layout = LAYOUTS[config.family]
    theirs = _modern(state, layout)
    names = _readable(layout, name.removeprefix(layout.title))
    has_decoder = any("objectives.mlm." in (_renamed(one, names) or "") for one in theirs)
    for twin, original in layout.tied.items():
        if twin in theirs and original not in theirs and has_decoder:
            theirs[original] = theirs[twin]
    renamed: dict[str, Tensor] = {}
    parts_of_qkv: dict[str, dict[str, Tensor]] = {}
    thirds = {layout.prefix + part: part for part in layout.split or ()}
    for name, tensor in theirs.items():
        part = _renamed(name, dict.fromkeys(thirds, "encoder.layers.{n}.attention.qkv"))
        ours = _renamed(name, names)
        if part is not None:
            third = next(thirds[key] for key in thirds if _renamed(name, {key: key}))
            _check_shape(name, tensor, config.hidden_size, config)
            parts_of_qkv.setdefault(part, {})[third] = tensor
        elif ours is not None:
            heads = config.attention.num_heads
            by_head = layout.by_head and ours.endswith("qkv.weight")
            if by_head:
                _check_shape(name, tensor, 3 * config.hidden_size, config)
            renamed[ours] = _by_kind(tensor, heads) if by_head else tensor
        elif name in layout.tied:
            if has_decoder:
                _check_tied(name, layout.tied[name], theirs)
        elif name.startswith(layout.prefix) and not _ignored(name, config):
            raise FormatError(
                f"tensor {name}: the encoder of {layout.title} has no such tensor; wanted the "
                f"weights of a {layout.title} as published"
            )
    for part, tensors in parts_of_qkv.items():
        thirds_of_qkv = layout.split or ()
        if len(tensors) != len(thirds_of_qkv):
            wanted_names = [name.rpartition(".")[2] for name in thirds_of_qkv]
            names_read = [name.rpartition(".")[2] for name in tensors]
            raise FormatError(
                f"tensor {part}: wanted {', '.join(wanted_names)}, got only {', '.join(names_read)}"
            )
        renamed[part] = torch.cat([tensors[name] for name in thirds_of_qkv])
    return renamed


def encoder_config_to_huggingface(config: EncoderConfig) -> dict[str, Any]:
    """Return the entries of `config.json` that describe the encoder."""
    layout = LAYOUTS[config.family]
    flat = _flat(config)
    entries = {
        key: flat[path]
        for path, key in layout.keys.items()
        if flat.get(path) is not None and not key.startswith("_")
    }
    filled = {key: entries[other] for key, other in layout.filled.items()}
    required = {**layout.required, **_required_of(layout)}
    return {"model_type": config.family, **required, **filled, **entries}


def encoder_config_from_huggingface(entries: Mapping[str, Any]) -> EncoderConfig:
    """Return the encoder that a `config.json` describes; missing entries take transformers'
    defaults.

    Raises: FormatError if it describes an unknown family, a decoder, a computation other than the
        published one, or sizes that do not fit together.
    """
    entries = {name: value for name, value in entries.items() if value is not None}
    family = entries.get("model_type", "bert")
    if not isinstance(family, str) or family not in LAYOUTS:
        raise FormatError(
            f"model_type = {family!r}: wanted one of the families {', '.join(LAYOUTS)}"
        )
    layout = LAYOUTS[family]
    of_head = _required_of(layout, class_name(entries).removeprefix(layout.title))
    for name, required in {**_REQUIRED, **layout.required, **of_head}.items():
        value = entries.get(name, layout.absent.get(name, required))
        if _plain(value) != _plain(required):
            raise FormatError(
                f"{name} = {value!r}: wanted {required!r}, as in the published {layout.title}"
            )
    for name, hint in {**_kinds(layout), **layout.kinds}.items():
        if name in entries:
            as_type(hint, entries[name], "config.json", key=name)
    try:
        ours = layout.read(dict(entries))
        known = {path: ours[key] for path, key in layout.keys.items() if ours.get(key) is not None}
        for path in known:
            if path.endswith("activation"):
                known[path] = _ACTIVATIONS.get(known[path], known[path])
        return _changed(layout.defaults, known)
    except (ConfigError, TypeError, ValueError) as error:
        raise FormatError(f"config.json does not describe a {layout.title}: {error}") from error


def class_name(entries: Mapping[str, Any]) -> str:
    """Return the transformers class that a `config.json` names; empty if it names none.

    Raises: FormatError if it is not named in a list.
    """
    listed = entries.get("architectures")
    names: list[str] | None = as_type(list[str] | None, listed, "config.json", key="architectures")
    return (names or [""])[0]


_QKV = re.compile(r"^encoder\.layers\.\d+\.attention\.qkv\.(weight|bias)$")
_BARE = (
    "embeddings.",
    "embeddings_project.",
    "encoder.",
    "transformer.",
    "layers.",
    "final_norm.",
    "pooler.",
)
_PARALLEL = "module."
"""torch's DataParallel and DistributedDataParallel put this before every name."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_REQUIRED = {
    "is_decoder": False,
    "position_embedding_type": "absolute",
    "quantization_config": None,
}
# Hugging Face has three names for the tanh approximation and two for the exact GELU.
_ACTIVATIONS = {"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}


def _required_of(layout: Layout, ending: str = "") -> dict[str, Any]:
    """Return the required values of the entries that a class reads; for a class that the family
    lacks, of the entries that any of its classes reads."""
    classes = [ending] if ending in layout.heads else layout.required_of
    return {
        name: value for each in classes for name, value in layout.required_of.get(each, {}).items()
    }


@cache
def _kinds_of(config: type, more: tuple[type, ...]) -> dict[str, Any]:
    """Map each dotted field to its type, without range or choices, for a config whose parts are of
    the types `more` or of those that it declares."""
    kinds: dict[str, Any] = {}
    for name, hint in get_type_hints(config).items():
        kind = next((each for each in get_args(hint) or (hint,)), hint)
        kind = next(
            (each for each in more if isinstance(kind, type) and issubclass(each, kind)), kind
        )
        if is_dataclass(kind):
            inner = _kinds_of(kind, more)
            kinds |= {f"{name}.{below}": each for below, each in inner.items()}
        else:
            kinds[name] = str if get_origin(hint) is Literal else hint
    return kinds


def _kinds(layout: Layout) -> dict[str, Any]:
    """Map the entries of `config.json` that `keys` names to their types."""
    parts = tuple(type(part) for part in vars(layout.defaults).values() if is_dataclass(part))
    kinds = _kinds_of(EncoderConfig, parts)
    return {key: kinds[path] for path, key in layout.keys.items() if not key.startswith("_")}


def _objectives(names: Iterable[str]) -> frozenset[str]:
    """Return the objectives that tensors under our names belong to."""
    return frozenset(name.split(".")[1] for name in names if name.startswith("objectives."))


def _names(layout: Layout, ending: str) -> dict[str, str]:
    """Map our full names to Hugging Face's, for a class."""
    encoder = {f"encoder.{ours}": layout.prefix + theirs for ours, theirs in layout.encoder.items()}
    return encoder | dict(layout.heads.get(ending, layout.heads["Model"]))


def _readable(layout: Layout, ending: str) -> dict[str, str]:
    """Map Hugging Face's names to ours: those of the class, and of other classes if unambiguous."""
    of_class = _names(layout, ending if ending in layout.heads else "Model")
    meanings: dict[str, set[str]] = {}
    for names in layout.heads.values():
        for ours, theirs in names.items():
            meanings.setdefault(theirs, set()).add(ours)
    of_others = {
        theirs: ours.pop()
        for theirs, ours in meanings.items()
        if len(ours) == 1 and not ours & of_class.keys()
    }
    return of_others | {theirs: ours for ours, theirs in of_class.items()}


def _renamed(name: str, names: Names) -> str | None:
    """Return a tensor's new name, looked up in a table of tensors or modules; None if not in the
    table."""
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
    """Return the tensors under the names that current transformers uses."""
    if state and all(name.startswith(_PARALLEL) for name in state):
        state = {name.removeprefix(_PARALLEL): tensor for name, tensor in state.items()}
    bare = not any(name.startswith(layout.prefix) for name in state)
    modern = {}
    for name, tensor in state.items():
        if bare and name.startswith(_BARE):
            name = layout.prefix + name
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        modern[_renamed(name, layout.aliases) or name] = tensor
    return modern


def _ignored(name: str, config: EncoderConfig) -> bool:
    """Whether a tensor is a buffer of an old version, a pooler, or positions that the model does
    not use."""
    if name.endswith((".position_ids", ".token_type_ids")) or ".pooler." in name:
        return True
    return ".position_embeddings." in name and not config.embeddings.absolute_positions


def _check_shape(name: str, tensor: Tensor, outputs: int, config: EncoderConfig) -> None:
    shape = (outputs, config.hidden_size)[: 1 if name.endswith("bias") else 2]
    if tensor.shape != shape:
        raise FormatError(f"tensor {name}: wanted shape {shape}, got {tuple(tensor.shape)}")


def _check_tied(name: str, twin: str, theirs: Mapping[str, Tensor]) -> None:
    if twin not in theirs or not torch.equal(theirs[name], theirs[twin]):
        problem = "got others" if twin in theirs else "which is missing"
        raise FormatError(
            f"tensor {name}: wanted the values of {twin}, {problem}: "
            "only a decoder tied to the word embedding, with one bias, is supported"
        )


def _by_head(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of query, key and value (3, H, d) to DeBERTa v1's order (H, 3, d)."""
    return weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def _by_kind(weight: Tensor, heads: int) -> Tensor:
    """Do the reverse of `_by_head`."""
    return weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def _plain(value: Any) -> Any:
    """Turn lists and `a|b` strings into sets of text, to ignore order."""
    if isinstance(value, str) and "|" in value:
        return {part.strip() for part in value.split("|")}
    return set(map(str, value)) if isinstance(value, list | tuple) else value


def _flat(config: Any, path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in vars(config).items():
        if is_dataclass(value):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[path + name] = value
    return flat


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a config with changes, given by dotted paths, applied."""
    parts: dict[str, dict[str, Any]] = {}
    direct: dict[str, Any] = {}
    for path, value in changes.items():
        name, _, inner_path = path.partition(".")
        if inner_path:
            parts.setdefault(name, {})[inner_path] = value
        else:
            direct[name] = value
    nested = {
        name: _changed(getattr(config, name) or ConvolutionConfig(), below)  # the one optional part
        for name, below in parts.items()
    }
    return replace(config, **direct, **nested)
