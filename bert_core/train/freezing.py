"""Freezes parts of an encoder: no gradient, no dropout, and nothing kept to compute a gradient
from."""

from torch import nn

from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.train.config import Frozen


def check_frozen(config: EncoderConfig, part: Frozen, layers: int, objective: Objective) -> None:
    """Check that a part of an encoder can be frozen, before there are weights.

    Args:
        part: as in `freeze`, and so are `layers`.
        objective: what the encoder is trained for.
    Raises: ConfigError if the encoder does not have the part, or nothing is left to train.
    """
    most = config.num_hidden_layers - 1
    if layers and config.shared_layers:
        raise ConfigError(
            f"freeze_layers: wanted 0 for an encoder whose {most + 1} layers are one and the same, "
            f"got {layers}: set freeze to embeddings or encoder"
        )
    if layers > most:
        raise ConfigError(
            f"freeze_layers: wanted at most {most}, all layers but the last, got {layers}: set "
            "freeze = encoder to train the head alone"
        )
    if part == "weights" and not config.biases:
        raise ConfigError(
            f"freeze: wanted an encoder with biases, which are all that would learn, got weights "
            f"for {config.family}, which has none: train an adapter instead (--adapter.rank)"
        )
    learns = objective.needs_pooler or any(True for _ in objective.parameters())
    if part == "encoder" and not learns:
        raise ConfigError(
            f"freeze: wanted a part of the encoder, since {objective.name} has no head that could "
            "learn instead, got encoder: set freeze_layers, or leave it out"
        )


def freeze(model: ObjectiveModel, part: Frozen, layers: int) -> None:
    """Freeze a part of a model's encoder, before its optimizer is made.

    Layers are frozen together with all that is below them, and with the relative positions that
    all layers share, or gradients would have to pass through them. A pooler is never frozen: it
    belongs to the head.

    Args:
        part: `embeddings`, or all of the `encoder`, or its `weights`, all but the biases (BitFit,
            Ben Zaken et al. 2022); `nothing` freezes only `layers`.
        layers: how many of the first layers to freeze.
    """
    encoder = model.encoder
    if part == "weights":
        model.freeze_weights(but="bias")
        return
    whole = part == "encoder"
    if part == "nothing" and not layers:
        return
    frozen: list[nn.Module | None] = [encoder.embeddings]
    if whole or layers:
        frozen += [encoder.shared, encoder.convolution]
        frozen += encoder.layers if whole else encoder.layers[:layers]
    if whole:
        frozen.append(encoder.norm)
    count = encoder.config.num_hidden_layers if whole else layers
    model.freeze([module for module in frozen if module is not None], count)
