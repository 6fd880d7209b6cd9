"""Converts weights to and from Hugging Face's names, per family. Tensor values do not change.

We join query, key and value in one tensor and store a tied decoder once. Hugging Face splits query,
key and value (DeBERTa v1 joins them head by head), and its files omit the decoder.
"""

import re
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from bert_core.errors import FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.families import ARCHITECTURES, LAYOUTS, Layout, Names
from bert_core.model.hf import objectives_among


def to_huggingface(state: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
    """Return the state of an `ObjectiveModel` under the names that the family's classes use.

    Raises: FormatError if a tensor has no counterpart there.
    """
    layout = LAYOUTS[config.family]
    ending = ARCHITECTURES.get(objectives_among(state), "Model")
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


def names_of_module(module: str, config: EncoderConfig) -> list[str]:
    """Return the names in Hugging Face's classes of an encoder's linear layer: three for query, key
    and value, where they are three there."""
    layout, weight = LAYOUTS[config.family], f"{module}.weight"
    if _QKV.search(weight) and layout.split is not None:
        tables = [{_qkv_module(weight): layout.prefix + part} for part in layout.split]
    else:
        tables = [_names(layout, "Model")]
    names = [_renamed(weight, table) for table in tables]
    return [name.removesuffix(".weight") for name in names if name is not None]


def factor_by_head(
    factor: Float[Tensor, "outputs rank"], module: str, config: EncoderConfig
) -> Float[Tensor, "outputs rank"]:
    """Return the factor B of a change of a linear layer, its rows in the family's order."""
    by_head = LAYOUTS[config.family].by_head and module.endswith("qkv")
    return _by_head(factor, config.attention.num_heads) if by_head else factor


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
