"""Checks that weights belong to a config, before anything of the config's size is allocated.

Otherwise a config of another model, or a malicious one, would take memory and time according to its
own numbers, and kill the process that loads it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from bert_core.errors import FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoder
from bert_core.model.layers import without_values

MOST_SHARED_LAYERS = 1_000
"""Where all layers share their weights, which then do not tell how many there are."""
LONGEST = 1 << 20
"""Tokens of the longest row where positions are relative, so that no weights tell it."""
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")
_TEMPLATES = 2
"""Layers that are compared by name; those after them have the names and shapes of the last."""
_NOT_OURS = "the weights do not belong to this config.json"


def check_fits(state: Mapping[str, Tensor], config: EncoderConfig) -> None:
    """Compare names and shapes of weights under our names with those that an encoder needs.

    More layers than in the config, and heads, are allowed.
    Raises: FormatError naming the first tensor that is missing or has another shape.
    """
    layers = _check_layers(state, config)
    positions = _check_positions(state, config)
    embeddings = replace(config.embeddings, max_position_embeddings=positions)
    few = replace(
        config,
        num_hidden_layers=min(layers, _TEMPLATES),
        embeddings=embeddings,
        initializer_cutoff=None,
    )
    try:
        with without_values():
            encoder = Encoder(few, pooler=False)
    except (TypeError, RuntimeError) as error:  # from torch, for sizes that no tensor can have
        raise FormatError(f"wanted sizes that tensors can have, got others: {error}") from error
    for name, parameter in encoder.named_parameters(prefix="encoder"):
        _check_shape(name, parameter, state)
        if name.startswith(last := f"encoder.layers.{_TEMPLATES - 1}."):
            for index in range(_TEMPLATES, layers):
                _check_shape(name.replace(last, f"encoder.layers.{index}.", 1), parameter, state)


def _check_layers(state: Mapping[str, Tensor], config: EncoderConfig) -> int:
    """Check the number of layers; return the number of those with weights of their own."""
    wanted = config.num_hidden_layers
    if config.shared_layers:
        if wanted > MOST_SHARED_LAYERS:
            raise FormatError(
                f"num_hidden_layers: wanted at most {MOST_SHARED_LAYERS} that share their weights, "
                f"got {wanted}"
            )
        return 1
    found = {int(match[1]) for name in state if (match := _LAYER.match(name))}
    if missing := wanted - len(found & set(range(min(wanted, len(state))))):
        raise FormatError(
            f"wanted weights of {wanted} layers (num_hidden_layers), got none of {missing} of "
            f"them: {_NOT_OURS}"
        )
    return wanted


def _check_positions(state: Mapping[str, Tensor], config: EncoderConfig) -> int:
    """Check and return the number of positions."""
    wanted = config.embeddings.max_position_embeddings
    if not config.embeddings.absolute_positions:
        if wanted > LONGEST:
            raise FormatError(
                f"max_position_embeddings: wanted at most {LONGEST}, got {wanted}: correct it"
            )
        return config.embeddings.position_offset + 1
    name = "encoder.embeddings.position_embeddings.weight"
    found = len(state[name]) if name in state else 0
    if found != wanted:
        raise FormatError(
            f"{name}: wanted {wanted} rows (max_position_embeddings), got {found}: {_NOT_OURS}"
        )
    return wanted


def _check_shape(name: str, needed: Tensor, state: Mapping[str, Tensor]) -> None:
    wanted = tuple(needed.shape)
    if name not in state:
        raise FormatError(f"wanted {name} of shape {wanted}, got none: {_NOT_OURS}")
    if (got := tuple(state[name].shape)) != wanted:
        raise FormatError(f"wanted {name} of shape {wanted}, got shape {got}: {_NOT_OURS}")
