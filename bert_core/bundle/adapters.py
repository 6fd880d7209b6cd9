"""Low-rank adapters (LoRA, Hu et al. 2022) in peft's folders, merged into their base's weights.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Tensors are named after modules
of the family's class in transformers: the two factors of a change, or, without factors, a tensor
that replaces the base's, such as a head's.

Source: peft 0.21, `LoraConfig`, `LoraLayer.update_layer`, `get_pattern_key`,
`get_peft_model_state_dict`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import Tensor

from bert_core.bundle.adapter_layout import (
    BASE,
    BASE_VERSION,
    CONFIG,
    PICKLE,
    TASK_TYPES,
    WEIGHTS,
)
from bert_core.bundle.foreign import task_of_transformers
from bert_core.bundle.format import Bundle, read_trained_rows, recorded_task
from bert_core.bundle.layout import (
    TRAINED_ROWS,
    digest_of,
    label_entries,
    path_of,
    read_json,
    sha256s_of,
)
from bert_core.bundle.tensors import read_tensors
from bert_core.bundle.weights import require_weights
from bert_core.containment import has_file
from bert_core.errors import FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.families import ARCHITECTURES, LAYOUTS
from bert_core.model.hf import objectives_among, objectives_of
from bert_core.model.hf_weights import from_huggingface, names_of_module, to_huggingface
from bert_core.tasks.base import Task
from bert_core.tasks.digests import NO_ROWS, Digests
from bert_core.typed import as_type
from bert_core.wording import one_of

_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_WRAPPERS = re.compile(r"\.(default|base_layer|modules_to_save)(?=\.|$)")
"""Names of modules that peft puts around those of the model; older versions keep them in files."""
_UNUSED = ".original_module."
"""In names of tensors that a saved module stands for; they are in files with biases."""
_PATTERN = re.compile(r"\^?[\w.]+")
"""Patterns of names that are read: without repetitions, which could take forever to match."""
_WANTED: dict[str, tuple[Any, str]] = {
    "use_dora": (False, "its magnitudes change with the weights that they scale"),
    "use_qalora": (False, "its factors are of quantized groups"),
    "lora_bias": (False, "it has biases of factors"),
    "fan_in_fan_out": (False, "its factors are of transposed weights"),
    "layer_replication": (None, "its layers are not those of the base"),
    "trainable_token_indices": (None, "it replaces embeddings of tokens"),
    "target_parameters": (None, "it changes parameters rather than modules"),
    "megatron_config": (None, "its weights are in parts"),
    "alora_invocation_tokens": (None, "it applies after certain tokens only"),
    "arrow_config": (None, "it chooses among several adapters"),
}
"""Settings of peft under which factors mean something else → the value that they must have, why."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The entries of `adapter_config.json` that decide what the tensors mean."""

    peft_type: str
    task_type: str | None = None
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    init_lora_weights: bool | str = True


@dataclass(frozen=True, kw_only=True)
class Base:
    """The contents of `base.json`: what peft's files do not say."""

    format_version: int
    base: str
    """`Bundle.digest` of the base."""
    task: str | None = None
    labels: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LowRank:
    """A change of a weight, `scale * B @ A`."""

    a: Float[Tensor, "rank inputs"]
    b: Float[Tensor, "outputs rank"]
    scale: float
    transposed: bool
    """Whether it is of an embedding, whose weight is (inputs, outputs)."""

    def applied(self, weight: Float[Tensor, "_ _"], name: str) -> Float[Tensor, "_ _"]:
        """Return the changed weight. Raises: FormatError if its shape is another."""
        shape = (self.b.shape[0], self.a.shape[1])
        shape = shape[::-1] if self.transposed else shape
        if tuple(weight.shape) != shape:
            raise FormatError(
                f"{WEIGHTS}: wanted factors of {name}, {tuple(weight.shape)}, got those of "
                f"{shape}: give the base that the adapter was trained on"
            )
        change = self.scale * (self.b.double() @ self.a.double())
        return (weight.double() + (change.T if self.transposed else change)).to(weight.dtype)


@dataclass(frozen=True)
class Adapter:
    """The contents of an adapter's folder."""

    changes: dict[str, LowRank]
    """By the name of the module, as the class in transformers has it."""
    replaced: dict[str, Tensor]
    """Tensors that the base's are replaced by."""
    task_type: str | None
    digest: str
    """sha256 over the names and sha256 of its files."""
    base: str = ""
    """Digest of the bundle that it was trained on; empty if peft wrote it."""
    task: Task | None = None
    """As it was trained for; None if peft wrote it."""
    trained_rows: Digests | None = None
    """Digests of the rows that it was trained on; None if they are not known."""

    @property
    def ending(self) -> str:
        """Return the end of the name of its class in transformers; empty if it is not known."""
        if self.task is not None:
            return ARCHITECTURES.get(frozenset({self.task.objective}), "")
        return TASK_TYPES.get(self.task_type or "", "")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than a whole model."""
    return has_file(folder, CONFIG)


def read_adapter(folder: str | Path) -> Adapter:
    """Read a folder that peft wrote.

    Raises: FormatError if it is not LoRA, or a kind that cannot be merged, or is damaged.
    """
    folder = Path(folder)
    if not has_file(folder, WEIGHTS) and has_file(folder, PICKLE):
        raise FormatError(
            f"{folder / PICKLE}: wanted {WEIGHTS}, got a pickle, which could run any code: save "
            "the adapter again with peft's save_pretrained"
        )
    settings = _settings(folder)
    changes: dict[str, dict[str, Tensor]] = {}
    embeddings, replaced = set(), {}
    try:
        stored = read_tensors(path_of(folder, WEIGHTS))
    except SafetensorError as error:
        raise FormatError(f"{folder / WEIGHTS}: {error}: copy the adapter again") from error
    for name, tensor in stored.items():
        plain = _WRAPPERS.sub("", name.removeprefix("base_model.").removeprefix("model."))
        if "lora_magnitude_vector" in plain:
            raise FormatError(f"{folder / WEIGHTS}: wanted LoRA, got DoRA's {name}: {_MERGE}")
        found = _FACTOR.fullmatch(plain)
        if _UNUSED in plain:
            continue
        if found is None:
            replaced[plain] = tensor.float()
            continue
        module, is_embedding, factor = found.groups()
        changes.setdefault(module, {})[factor] = tensor.float()
        embeddings |= {module} if is_embedding else set()
    names = [CONFIG, WEIGHTS, *(name for name in (BASE, TRAINED_ROWS) if has_file(folder, name))]
    adapter = Adapter(
        {
            module: _low_rank(folder, settings, module, factors, module in embeddings)
            for module, factors in changes.items()
        },
        replaced,
        settings.task_type,
        digest_of(sha256s_of(folder, names)),
    )
    return _with_base(folder, adapter) if BASE in names else adapter


def _with_base(folder: Path, adapter: Adapter) -> Adapter:
    """Return an adapter with what `base.json` says of it."""
    where = str(folder / BASE)
    said: Base = as_type(Base, read_json(folder / BASE), where)
    if said.format_version > BASE_VERSION:
        raise FormatError(
            f"{where}: wanted format_version {BASE_VERSION} or older, got {said.format_version}: "
            "it was made by a newer raybert, update this one"
        )
    known = has_file(folder, TRAINED_ROWS)
    return replace(
        adapter,
        base=said.base,
        task=recorded_task(where, said.task, said.labels, said.options),
        trained_rows=read_trained_rows(folder) if known else NO_ROWS,
    )


_MERGE = "merge it into its base with peft's merge_and_unload, and save the whole model"


def _settings(folder: Path) -> _Settings:
    entries, where = read_json(folder / CONFIG), str(folder / CONFIG)
    known: _Settings = as_type(
        _Settings, {name: value for name, value in entries.items() if value is not None}, where
    )
    if known.peft_type != "LORA":
        raise FormatError(f"{where}: peft_type: wanted LORA, got {known.peft_type}: {_MERGE}")
    for name, (wanted, why) in _WANTED.items():
        if (entries.get(name) or wanted) != wanted:
            raise FormatError(
                f"{where}: {name}: wanted {wanted}, got {entries[name]!r}, under which {why}: "
                f"{_MERGE}"
            )
    start = known.init_lora_weights
    if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
        raise FormatError(
            f"{where}: init_lora_weights: wanted a start that leaves the base as it is, got "
            f"{start!r}, which changes it: save the adapter as LoRA, with peft's "
            "path_initial_model_for_weight_conversion"
        )
    for pattern in (*known.rank_pattern, *known.alpha_pattern):
        if not _PATTERN.fullmatch(pattern):
            raise FormatError(
                f"{where}: wanted names of modules in rank_pattern and alpha_pattern, got "
                f"{pattern!r}: write the names out"
            )
    return known


def _low_rank(
    folder: Path, settings: _Settings, module: str, factors: Mapping[str, Tensor], embedding: bool
) -> LowRank:
    if factors.keys() != {"A", "B"} or any(each.ndim != 2 for each in factors.values()):
        raise FormatError(
            f"{folder / WEIGHTS}: wanted matrices lora_A and lora_B of {module}, got "
            f"{', '.join(f'{k} of shape {tuple(v.shape)}' for k, v in sorted(factors.items()))}: "
            f"save the adapter again, or {_MERGE}"
        )
    rank = _of_pattern(settings.rank_pattern, module, settings.r)
    alpha = _of_pattern(settings.alpha_pattern, module, settings.lora_alpha)
    a, b = factors["A"], factors["B"]
    if not rank == a.shape[0] == b.shape[1]:
        raise FormatError(
            f"{folder / WEIGHTS}: wanted factors of rank {rank} for {module}, as {CONFIG} says, "
            f"got {tuple(a.shape)} and {tuple(b.shape)}: copy or save the adapter again"
        )
    return LowRank(a, b, alpha / (rank**0.5 if settings.use_rslora else rank), embedding)


def _of_pattern(patterns: Mapping[str, float], module: str, usual: float) -> Any:
    """Return the value of the first pattern that the module's name ends with."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return usual


def merged(bundle: Bundle, folder: str | Path, labels: tuple[str, ...] = ()) -> Bundle:
    """Return a bundle with an adapter merged into its weights; the digest tells both.

    Args:
        folder: written by peft for this bundle's encoder.
        labels: names of the labels, for an adapter with a head; transformers' default names if it
            is empty.
    Raises: FormatError if the adapter cannot be read, or belongs to another base.
    """
    adapter = read_adapter(folder)
    if adapter.base and adapter.base != bundle.digest:
        raise FormatError(
            f"{folder}: wanted the base that the adapter was trained on, {adapter.base[:12]}, got "
            f"a bundle with the digest {bundle.digest[:12]}: give that one, which its {CONFIG} "
            "names"
        )
    config, layout = require_weights(bundle).encoder_config, LAYOUTS[bundle.encoder_config.family]
    has_head = any(not name.startswith(layout.prefix) for name in adapter.replaced)
    ending = adapter.ending if has_head else ""
    theirs = to_huggingface(_kept(bundle, ending), config)
    for module, change in adapter.changes.items():
        name = _named(f"{module}.weight", theirs, layout.prefix, str(folder))
        theirs[name] = change.applied(theirs[name], name)
    of_head = tuple(f"{module}." for module in layout.heads.get(ending, {}).values())
    for name, tensor in adapter.replaced.items():
        is_head = bool(ending) and (not name.startswith(layout.prefix) or name.startswith(of_head))
        theirs[name if is_head else _named(name, theirs, layout.prefix, str(folder))] = tensor
    kind = f"{layout.title}{ending}" if ending else ""
    state, task = from_huggingface(theirs, config, kind), bundle.task
    if ending:
        objectives = objectives_of(config, kind)
        if not objectives <= objectives_among(state):
            raise FormatError(
                f"{folder}: wanted the head of {kind}, got {', '.join(sorted(adapter.replaced))}: "
                "give a base of the adapter's family"
            )
        entries = label_entries(labels) if labels else {}
        own = task_of_transformers(Path(folder), objectives, entries, state)
        same = task is not None and own is not None and len(task.labels) == len(own.labels)
        task = task if same and not labels else own
    rows = NO_ROWS if adapter.trained_rows is None else adapter.trained_rows
    return replace(
        bundle,
        state=state,
        task=adapter.task if adapter.task is not None and not labels else task,
        trained_rows=np.union1d(bundle.trained_rows, rows),
        metrics={},
        digest=digest_of({"base": bundle.digest, "adapter": adapter.digest}),
    )


def factors_of(
    adapter: Adapter, outputs: Mapping[str, int], config: EncoderConfig
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A (low, inputs) and B (outputs, low), scaled, of the layers that an adapter changes.

    Args:
        outputs: number of outputs of each linear layer of the encoder, by our name.
    """
    prefix = LAYOUTS[config.family].prefix
    changes = {name.removeprefix(prefix): change for name, change in adapter.changes.items()}
    factors = {}
    for layer, size in outputs.items():
        names = names_of_module(layer, config)
        parts = [changes.get(name.removeprefix(prefix)) for name in names]
        if changed := [part for part in parts if part is not None]:
            none = torch.zeros(size // len(parts), 0)
            spread = [none if part is None else part.scale * part.b for part in parts]
            factors[layer] = torch.cat([part.a for part in changed]), torch.block_diag(*spread)
    return factors


def _kept(bundle: Bundle, ending: str) -> dict[str, Tensor]:
    """Return the weights of a base that an adapter for a class leaves: all, if the base is of that
    class or the adapter has no head (`ending` is empty); else the encoder's.
    """
    if ending in ("", ARCHITECTURES.get(objectives_among(bundle.state), "Model")):
        return dict(bundle.state)
    named = LAYOUTS[bundle.encoder_config.family].heads["Model"]
    return {
        name: tensor
        for name, tensor in bundle.state.items()
        if name.startswith("encoder.")
        and (not name.startswith("encoder.pooler.") or "encoder.pooler.dense" in named)
    }


def _named(name: str, state: Mapping[str, Tensor], prefix: str, folder: str) -> str:
    """Return the name that a base has for an adapter's tensor, which may lack the prefix."""
    for each in (name, prefix + name):
        if each in state:
            return each
    some = one_of(sorted({".".join(each.split(".")[:3]) for each in state})[:8])
    raise FormatError(
        f"{folder}: wanted tensors of the base, {some}, got {name}: give the base that the adapter "
        f"was trained on, of its family; if it is a head, write its task_type into {CONFIG}, one "
        f"of {', '.join(TASK_TYPES)}"
    )
