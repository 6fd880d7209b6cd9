"""How large an encoder is and how much it computes; asks the modules themselves, without memory."""

from functools import cache

import numpy as np
import torch
from jaxtyping import Integer
from torch import nn

from bert_core.model.attention import KeylessBiasLinear, RelativePositions
from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig, RotaryAttentionConfig
from bert_core.model.encoder import Encoder
from bert_core.model.families import LAYOUTS


def count_parameters(config: EncoderConfig, *, pooler: bool | None = None) -> int:
    """Weights of the encoder without objectives' heads, each counted once.

    `pooler` None counts one where transformers' class without a head has one.
    """
    if pooler is None:
        pooler = "encoder.pooler.dense" in LAYOUTS[config.family].heads["Model"]
    with torch.device("meta"):
        encoder = Encoder(config, pooler=pooler)
    return sum(parameter.numel() for parameter in encoder.parameters())


def flops_per_token(config: EncoderConfig, length: int) -> int:
    """Floating-point operations of a forward and backward pass for a token of a row of `length`,
    without heads: `training_flops` of that row, shared by its tokens."""
    return training_flops(config, np.array([length])) // length


def training_flops(
    config: EncoderConfig,
    lengths: Integer[np.ndarray, "rows"],
    predictions: int = 0,
    outputs: int | None = None,
) -> int:
    """Floating-point operations of a forward and backward pass over rows of these lengths.

    6 a weight of the matrix products that a token passes, and 12 L D length a token for attention,
    backward being twice forward (Narayanan et al. 2021, appendix); nothing for padding or for what
    is computed twice. Disentangled attention adds 12 L D for each distance that it scores; a local
    layer scores its window only. What is computed once a batch is left out.

    Args:
        predictions: positions at which the head of masked words scores the vocabulary.
        outputs: tokens whose vectors the last layer has to give; others do not pass what comes
            after its attention. None for all.
    """
    head = config.embedding_size * (config.hidden_size + config.vocab_size)
    weights, after = _weights(config)
    tokens = int(lengths.sum())
    spared = 0 if outputs is None else 6 * after * (tokens - outputs)
    scored = 12 * config.hidden_size * int((_scored(config, lengths) * lengths).sum())
    return 6 * weights * tokens - spared + scored + 6 * head * predictions


@cache
def _weights(config: EncoderConfig) -> tuple[int, int]:
    """Weights of the matrix products that a token passes in the encoder, and of those among them
    that come after a layer's attention."""
    with torch.device("meta"):
        encoder = Encoder(config, pooler=False)
    parts = {
        name: part.weight.numel()
        for name, part in encoder.layers[0].named_modules()
        if isinstance(part, nn.Linear | KeylessBiasLinear) and ".position_" not in name
    }
    after = sum(size for name, size in parts.items() if not name.startswith("attention.qkv"))
    weights = config.num_hidden_layers * sum(parts.values())
    if encoder.embeddings.widen is not None:
        weights += encoder.embeddings.widen.weight.numel()
    if encoder.convolution is not None:
        weights += encoder.convolution.conv.weight.numel()
    return weights, after


def _scored(
    config: EncoderConfig, lengths: Integer[np.ndarray, "rows"]
) -> Integer[np.ndarray, "rows"]:
    """What a token of each row is scored with, keys and distances, in all layers."""
    layers, attention = config.num_hidden_layers, config.attention
    if isinstance(attention, DisentangledAttentionConfig):
        with torch.device("meta"):
            positions = RelativePositions(config)
        reach = positions.bucket(torch.from_numpy(lengths - 1)).numpy()
        return layers * (lengths + np.minimum(2 * reach + 1, 2 * attention.span))
    if isinstance(attention, RotaryAttentionConfig):
        reaches = [attention.reach(index) for index in range(layers)]
        windows = [lengths if one is None else np.minimum(lengths, 2 * one + 1) for one in reaches]
        return np.sum(windows, axis=0)
    return layers * lengths
