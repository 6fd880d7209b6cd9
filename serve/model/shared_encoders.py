"""Checks the weights of models that torch computes, and keeps those of equal encoders in memory
only once."""

from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import nn

from bert_core.errors import FormatError
from bert_core.model.encoder import Encoder
from bert_core.model.sharing import encoder_digest

_PARTS: WeakValueDictionary[tuple[str, torch.device, str], nn.Module] = WeakValueDictionary()
"""The modules of encoders, for as long as an encoder uses them."""


def check_weights(folder: Path, model: nn.Module) -> None:
    """Check that no weight is NaN, including weights that the examples do not use.
    Raises: FormatError.
    """
    for name, parameter in model.named_parameters():
        if bool(torch.isnan(parameter).any()):
            raise FormatError(
                f"{folder}: wanted numbers as weights, there is NaN in {name}: train the model "
                "again, with a lower learning rate"
            )


def share(encoder: Encoder) -> str:
    """Let an encoder use the modules of an equal encoder in this process, if there is one, except
    for its pooler.

    Returns: its digest (`encoder_digest`).
    """
    digest, device = encoder_digest(encoder), next(encoder.parameters()).device
    parts = {
        (digest, device, name): part for name, part in encoder.named_children() if name != "pooler"
    }
    known = {key: _PARTS.get(key) for key in parts}
    if all(_still_equal(part, known[key]) for key, part in parts.items()):
        for (_, _, name), part in known.items():
            setattr(encoder, name, part)
    else:
        _PARTS.update(parts)
    return digest


def _still_equal(part: nn.Module, known: nn.Module | None) -> bool:
    """Whether a module still exists and has the weights that it was loaded with, so that damaged
    weights do not spread."""
    if known is None:
        return False
    return all(map(torch.equal, part.state_dict().values(), known.state_dict().values()))
