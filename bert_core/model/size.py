"""Counts an encoder's parameters and FLOPs, from its modules on the meta device (no memory)."""

from functools import cache

import numpy as np
import torch
from jaxtyping import Integer
from torch import nn

from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig, RotaryAttentionConfig
from bert_core.model.disentangled import KeylessBiasLinear, RelativePositions
from bert_core.model.encoder import Encoder
from bert_core.model.families import LAYOUTS
from bert_core.model.layers import without_values


def count_parameters(config: EncoderConfig, *, pooler: bool | None = None) -> int:
    """Return the number of parameters of the encoder without objectives' heads, each counted once.

    Args:
        pooler: whether the pooler counts; by default, if transformers' class without a head has
            one.
    """
    if pooler is None:
        pooler = "encoder.pooler.dense" in LAYOUTS[config.family].heads["Model"]
    with without_values():
        encoder = Encoder(config, pooler=pooler)
    return sum(parameter.numel() for parameter in encoder.parameters())


def flops_per_token(config: EncoderConfig, length: int) -> int:
    """Return the floating-point operations of a forward and backward pass per token of a row of
    `length`, without heads: `training_flops` of that row, divided by `length`."""
    return training_flops(config, np.array([length])) // length


def training_flops(
    config: EncoderConfig,
    lengths: Integer[np.ndarray, "rows"],
    predictions: int = 0,
    outputs: int | None = None,
) -> int:
    """Return the floating-point operations of a forward and backward pass over rows of these
    lengths.

    Per token, 6 per weight of the matrix products it passes through and 12 L D length for
    attention; the backward pass costs twice the forward pass (Narayanan et al. 2021, appendix).
    Padding and recomputation are not counted. Disentangled attention adds 12 L D per distance that
    it scores; a local layer scores its window only. Work done once per batch is left out.

    Args:
        predictions: positions at which the masked-word head scores the vocabulary.
        outputs: number of tokens whose vectors the last layer returns; the other tokens skip what
            comes after its attention. None means all.
    """
    head = config.embedding_size * (config.hidden_size + config.vocab_size)
    weights, after = _weights(config)
    tokens = int(lengths.sum())
    spared = 0 if outputs is None else 6 * after * (tokens - outputs)
    scored = 12 * config.hidden_size * int((_scored(config, lengths) * lengths).sum())
    return 6 * weights * tokens - spared + scored + 6 * head * predictions


@cache
def _weights(config: EncoderConfig) -> tuple[int, int]:
    """Return the number of weights of the encoder's matrix products that each token passes through,
    and how many of these are in one layer after its query, key and value."""
    with without_values():
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
    """Return the number of keys and distances that a token of each row is scored with, over all
    layers."""
    layers, attention = config.num_hidden_layers, config.attention
    if isinstance(attention, DisentangledAttentionConfig):
        with without_values():
            positions = RelativePositions(config)
        reach = positions.bucket(torch.from_numpy(lengths - 1)).numpy()
        return layers * (lengths + np.minimum(2 * reach + 1, 2 * attention.span))
    if isinstance(attention, RotaryAttentionConfig):
        reaches = [attention.reach(index) for index in range(layers)]
        windows = [lengths if r is None else np.minimum(lengths, 2 * r + 1) for r in reaches]
        return np.sum(windows, axis=0)
    return layers * lengths
