"""Encoder configs: their checks, and their size beside transformers' own class."""

import re
from dataclasses import asdict, replace

import pytest
import torch
from transformers import BertConfig, BertModel

from bert_core.errors import ConfigError
from bert_core.model.encoder import Encoder
from bert_core.model.variants import VARIANTS, EncoderConfig, count_parameters


@pytest.mark.parametrize("pooler", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_count_parameters_is_the_size_of_transformers_class(name: str, pooler: bool) -> None:
    with torch.device("meta"):
        theirs = BertModel(BertConfig(**asdict(VARIANTS[name])), add_pooling_layer=pooler)
        ours = Encoder(VARIANTS[name], pooler=pooler)
    assert count_parameters(VARIANTS[name], pooler=pooler) == sum(
        parameter.numel() for parameter in theirs.parameters()
    )
    assert sum(parameter.numel() for parameter in ours.parameters()) == count_parameters(
        VARIANTS[name], pooler=pooler
    )


def test_bert_large_has_the_published_335_1_million_parameters() -> None:
    assert round(count_parameters(VARIANTS["bert-large"]) / 1e6, 1) == 335.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size = 768: wanted a multiple of num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: wanted at least 1"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob = 1.0: wanted at least 0 and below 1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps = 0.0: wanted above 0"),
        ({"pad_token_id": 30522}, "pad_token_id = 30522: wanted an id of the vocabulary"),
    ],
)
def test_a_config_out_of_range_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EncoderConfig(**change)


def test_an_unknown_activation_is_refused() -> None:
    config = EncoderConfig()
    object.__setattr__(config, "hidden_act", "swish")  # past the types, which are checked here
    with pytest.raises(ConfigError, match="'swish': wanted one of gelu, gelu_new, relu"):
        config.__post_init__()


def test_a_config_cannot_be_changed() -> None:
    assert replace(EncoderConfig(), hidden_size=24).hidden_size == 24
    with pytest.raises(AttributeError):
        EncoderConfig().hidden_size = 24  # type: ignore[misc]
