"""Converts configs to and from Hugging Face's names, per family, and names its classes;
`hf_weights` converts weights."""

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from bert_core.errors import ConfigError, FormatError
from bert_core.model.config import ConvolutionConfig, EncoderConfig
from bert_core.model.families import ARCHITECTURES, LAYOUTS, Layout
from bert_core.typed import as_type


def architecture(config: EncoderConfig, objectives: frozenset[str]) -> str:
    """Return the name of the transformers class for an encoder with these objectives.

    Raises: ConfigError if the family has no such class.
    """
    layout = LAYOUTS[config.family]
    ending = ARCHITECTURES.get(objectives, "")
    if ending not in layout.heads or objectives_among(layout.heads[ending]) != objectives:
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
    return objectives_among(layout.heads.get(name.removeprefix(layout.title), {}))


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


def objectives_among(names: Iterable[str]) -> frozenset[str]:
    """Return the objectives that tensors under our names belong to."""
    return frozenset(name.split(".")[1] for name in names if name.startswith("objectives."))


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
