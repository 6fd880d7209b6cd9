"""Encoder configs: their checks, and every variant's size beside transformers' own class."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bert_core.errors import ConfigError
from bert_core.model.config import (
    AttentionConfig,
    BiasedAttentionConfig,
    ConvolutionConfig,
    DisentangledAttentionConfig,
    EmbeddingsConfig,
    EncoderConfig,
    FeedForwardConfig,
    HeadConfig,
    RotaryAttentionConfig,
)
from bert_core.model.encoder import Encoder
from bert_core.model.hf import encoder_config_to_huggingface
from bert_core.model.size import count_parameters, flops_per_token
from bert_core.model.variants import VARIANTS

# From the papers, or what the field knows of the published files, in millions.
KNOWN = {
    "bert-large": 335.1,
    "albert-xlarge": 58.7,
    "albert-xxlarge": 222.6,
    "deberta-base": 138.6,
    "deberta-v3-base": 183.8,
    "modernbert-base": 149.0,
    "xlm-roberta-base": 278.0,
    "mpnet-base": 109.5,
    "electra-small": 13.5,
    "electra-base": 108.9,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_as_many_parameters_as_transformers_class(name: str) -> None:
    import transformers

    config = VARIANTS[name].config
    with torch.device("meta"):
        entries = encoder_config_to_huggingface(config)
        theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**entries))
    assert count_parameters(config) == sum(one.numel() for one in theirs.parameters())
    if name in KNOWN:
        assert round(count_parameters(config) / 1e6, 1) == KNOWN[name]


def test_work_per_token_is_what_torch_counts() -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3}
    for name, shared in (
        ("bert-tiny", 0),
        ("albert-base", 0),
        ("deberta-v3-small", 1),
        ("modernbert-base", 0),
        ("mpnet-base", 0),
        ("electra-small", 0),
    ):
        published = VARIANTS[name].config
        config = replace(
            published,
            **sizes,
            attention=replace(published.attention, num_heads=4, dropout=0.0),
            feed_forward=replace(published.feed_forward, intermediate_size=128),
        ).adapted(vocab_size=50, pad_token_id=1, hidden_dropout_prob=0.0)
        encoder, length = Encoder(config, pooler=False), 48
        ids = torch.randint(2, 50, (2, length))
        # The fused kernel of the CPU is not counted.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            encoder(ids, ids * 0).hidden.sum().backward()
        counted = counter.get_total_flops() / ids.numel()
        # Products that are made once a batch, and the gradient that ids do not have, are left out.
        assert flops_per_token(config, length) == pytest.approx(counted, rel=0.02 + 0.2 * shared)


def test_a_local_layer_works_on_its_window_only() -> None:
    config = VARIANTS["modernbert-base"].config  # 8 of 22 layers look at whole rows
    more = flops_per_token(config, 8192) - flops_per_token(config, 4096)
    assert more == 12 * 768 * 8 * 4096


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AttentionConfig(dropout=1.0), "dropout: wanted at least 0 and below 1, got 1"),
        (lambda: AttentionConfig(num_heads=0), "num_heads: wanted at least 1, got 0"),
        (
            lambda: EncoderConfig(attention=AttentionConfig(num_heads=5)),
            "hidden_size: wanted a multiple of num_attention_heads = 5",
        ),
        (lambda: EncoderConfig(num_hidden_layers=0), "num_hidden_layers: wanted at least 1, got 0"),
        (lambda: EncoderConfig(layer_norm_eps=0.0), "layer_norm_eps: wanted above 0, got 0.0"),
        (lambda: EncoderConfig(hidden_dropout_prob=-0.1), "hidden_dropout_prob: wanted"),
        (lambda: EmbeddingsConfig(pad_token_id=30522), "pad_token_id: wanted an id of"),
        (lambda: EmbeddingsConfig(size=0), "size: wanted at least 1, got 0"),
        (lambda: EmbeddingsConfig(type_vocab_size=-1), "type_vocab_size: wanted at least 0"),
        (lambda: EmbeddingsConfig(position_offset=512), "position_offset: wanted at least"),
        (lambda: ConvolutionConfig(kernel_size=2), "kernel_size: wanted an odd number"),
        (lambda: DisentangledAttentionConfig(position_buckets=-1), "position_buckets: wanted"),
        (lambda: BiasedAttentionConfig(num_buckets=6), "num_buckets: wanted a multiple of 4, got"),
        (lambda: BiasedAttentionConfig(max_distance=8), "max_distance: wanted more than num_buc"),
        (
            lambda: EncoderConfig(family="mpnet"),
            "pad_token_id: wanted 1 for the family mpnet, whose class in transformers counts",
        ),
        (lambda: RotaryAttentionConfig(window=7), "window: wanted an even number"),
        (lambda: RotaryAttentionConfig(global_every=0), "global_every: wanted at least 1, got 0"),
        (lambda: RotaryAttentionConfig(theta=0.5), "theta: wanted above 1, got 0.5"),
        (
            lambda: EncoderConfig(hidden_size=36, attention=RotaryAttentionConfig(num_heads=4)),
            "hidden_size: wanted an even width for each of num_attention_heads = 4",
        ),
        (lambda: EncoderConfig(initializer_cutoff=0.0), "initializer_cutoff: wanted above"),
        (lambda: HeadConfig(classifier_dropout=1.5), "classifier_dropout: wanted at least 0"),
    ],
)
def test_a_config_out_of_range_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_an_unknown_activation_is_refused() -> None:
    config = FeedForwardConfig()
    object.__setattr__(config, "activation", "swish")  # past the types, which are checked here
    with pytest.raises(ConfigError, match="wanted one of gelu, gelu_new, relu, tanh, got 'swish'"):
        config.__post_init__()


def test_an_encoder_is_adapted_to_its_vocabulary() -> None:
    config = VARIANTS["roberta-base"].config.adapted(vocab_size=99, pad_token_id=0)
    assert (config.vocab_size, config.embeddings.position_offset) == (99, 1)
    assert config.hidden_dropout_prob == 0.1
    bert = VARIANTS["bert-base"].config.adapted(attention_dropout=0.0)
    assert bert == replace(EncoderConfig(), attention=AttentionConfig(dropout=0.0))


@pytest.mark.parametrize("name", VARIANTS)
def test_any_encoder_takes_the_sizes_of_another_and_is_itself_again_with_its_own(name: str) -> None:
    config = VARIANTS[name].config
    small = config.adapted(sizes_of=VARIANTS["bert-tiny"].config)
    sizes = small.hidden_size, small.attention.num_heads, small.feed_forward.intermediate_size
    assert (small.num_hidden_layers, *sizes) == (2, 128, 2, 512)
    assert small.adapted(sizes_of=config) == config


def test_a_config_cannot_be_changed() -> None:
    assert replace(EncoderConfig(), hidden_size=24).hidden_size == 24
    with pytest.raises(AttributeError):
        EncoderConfig().hidden_size = 24  # type: ignore[misc]
