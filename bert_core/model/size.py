"""How large an encoder is and how much it computes; asks the modules themselves, without memory."""

import torch
from torch import nn

from bert_core.model.attention import KeylessBiasLinear, RelativePositions
from bert_core.model.encoder import Encoder
from bert_core.model.families import LAYOUTS
from bert_core.model.variants import EncoderConfig, RotaryAttentionConfig


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
    """Floating-point operations of a forward and backward pass for a token of a row of `length`.

    6 a weight of the matrix products that a token passes, and 12 L D length for attention, backward
    being twice forward (Narayanan et al. 2021, appendix), without heads. Disentangled attention
    adds 12 L D for each distance that it scores; a local layer scores its window only. What is
    computed once a batch is left out.
    """
    with torch.device("meta"):
        encoder = Encoder(config, pooler=False)
    layer = sum(
        part.weight.numel()
        for name, part in encoder.layers[0].named_modules()
        if isinstance(part, nn.Linear | KeylessBiasLinear) and ".position_" not in name
    )
    weights = config.num_hidden_layers * layer
    if encoder.embeddings.widen is not None:
        weights += encoder.embeddings.widen.weight.numel()
    if encoder.convolution is not None:
        weights += encoder.convolution.conv.weight.numel()
    layers = config.num_hidden_layers
    scored = layers * length
    if isinstance(encoder.shared, RelativePositions):
        reach = int(encoder.shared.bucket(torch.tensor([length - 1])))
        scored += layers * min(2 * reach + 1, 2 * encoder.shared.config.span)
    if isinstance(config.attention, RotaryAttentionConfig):
        reaches = [config.attention.reach(index) for index in range(layers)]
        scored = sum(min(length, length if one is None else 2 * one + 1) for one in reaches)
    return 6 * weights + 12 * config.hidden_size * scored
