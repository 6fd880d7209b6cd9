"""Names and configs of files that others wrote: old ones, foreign ones, unfit ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bert_core.errors import ConfigError, FormatError
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoder
from bert_core.model.families import LAYOUTS
from bert_core.model.hf import (
    architecture,
    encoder_config_from_huggingface,
    encoder_config_to_huggingface,
    objectives_of,
)
from bert_core.model.hf_weights import from_huggingface, to_huggingface
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Objective, ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.sentence_pairs import NextSentencePrediction
from tests import tiny

SIZES = tiny.entries(97, hidden_size=32, num_hidden_layers=3, max_position_embeddings=24)
CONFIG = encoder_config_from_huggingface(SIZES)
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}


def state_of(*names: str, config: EncoderConfig = CONFIG) -> dict[str, Tensor]:
    torch.manual_seed(1)
    objectives: dict[str, Objective] = {
        "mlm": MaskedLanguageModeling(config),
        "nsp": NextSentencePrediction(config),
        "classification": Classification(config, 5),
    }
    model = ObjectiveModel(config, [objectives[name] for name in names])
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_every_activation_is_transformers_own(activation: str) -> None:
    from transformers import BertConfig, BertModel

    entries = SIZES | {"hidden_act": activation}
    ours = Encoder(encoder_config_from_huggingface(entries)).eval()
    theirs = BertModel(BertConfig(**entries)).eval()
    theirs.load_state_dict(
        {
            name.removeprefix("bert."): tensor
            for name, tensor in to_huggingface(
                {f"encoder.{name}": tensor for name, tensor in ours.state_dict().items()}, CONFIG
            ).items()
        }
    )
    ids = torch.arange(1, 49).view(4, 12)
    torch.testing.assert_close(
        ours(ids, ids * 0).hidden, theirs(ids).last_hidden_state, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", LAYOUTS)
def test_old_names_are_understood(family: str) -> None:
    layout = LAYOUTS[family]
    entries = SIZES | {"model_type": family} | (DEBERTA if "deberta" in family else {})
    if family == "deberta-v2":
        entries |= {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
    if family == "distilbert":
        entries |= {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48}
    if family == "modernbert":
        entries |= {"pad_token_id": 0}
    config = encoder_config_from_huggingface(entries)
    state = state_of("mlm", config=config)
    old = {}
    for name, tensor in to_huggingface(state, config).items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old[name.replace("LayerNorm.bias", "LayerNorm.beta").removeprefix(layout.prefix)] = tensor
    old["embeddings.position_ids"] = torch.arange(24)[None]
    for name, twin in layout.tied.items():
        old[name] = old[twin.removeprefix(layout.prefix)].clone()
    assert family == "modernbert" or "embeddings.LayerNorm.gamma" in old
    again = from_huggingface(old, config, f"{layout.title}ForMaskedLM")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_a_classifier_that_was_converted_may_hold_an_unused_pooler() -> None:
    config = encoder_config_from_huggingface(SIZES | {"model_type": "roberta"})
    state = state_of("classification", config=config)
    theirs = to_huggingface(state, config)
    theirs["roberta.pooler.dense.weight"] = torch.zeros(32, 32)
    theirs["roberta.pooler.dense.bias"] = torch.zeros(32)
    again = from_huggingface(theirs, config, "RobertaForSequenceClassification")
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_more_heads_than_the_class_has_are_read_too() -> None:
    state = state_of("mlm", "nsp")
    again = from_huggingface(to_huggingface(state, CONFIG), CONFIG, "BertForMaskedLM")
    assert again.keys() == state.keys()


@pytest.mark.parametrize("name", ["BertForTokenClassification", "BertForSomethingElse", ""])
def test_heads_that_are_none_of_the_class_are_left_out(name: str) -> None:
    theirs = to_huggingface(state_of("classification"), CONFIG) | {"x.weight": torch.zeros(2, 32)}
    again = from_huggingface(theirs, CONFIG, name)
    assert "objectives.classification.head.linear.weight" not in again
    assert "encoder.pooler.dense.weight" in again


def test_weights_of_another_architecture_are_refused() -> None:
    theirs = to_huggingface(state_of("mlm", "nsp"), CONFIG)
    foreign = theirs | {"bert.encoder.layer.0.crossattention.self.query.weight": torch.zeros(1)}
    with pytest.raises(FormatError, match=r"crossattention.*encoder of Bert has no such tensor"):
        from_huggingface(foreign, CONFIG)
    untied = theirs | {"cls.predictions.decoder.weight": torch.zeros(97, 32)}
    with pytest.raises(FormatError, match=r"decoder\.weight: wanted the values of bert\.embed"):
        from_huggingface(untied, CONFIG)
    del theirs["bert.encoder.layer.1.attention.self.key.bias"]
    with pytest.raises(
        FormatError, match=r"layers\.1.*wanted query, key, value.*only query, value"
    ):
        from_huggingface(theirs, CONFIG)


def test_a_tensor_without_a_name_in_transformers_is_refused() -> None:
    with pytest.raises(FormatError, match=r"objectives\.sbo\.weight: Hugging Face's Bert has no"):
        to_huggingface({"objectives.sbo.weight": torch.zeros(1)}, CONFIG)


def test_a_class_has_the_objectives_that_it_was_made_for() -> None:
    roberta = VARIANTS["roberta-base"].config
    assert architecture(roberta, frozenset({"mlm"})) == "RobertaForMaskedLM"
    assert objectives_of(roberta, "RobertaForMaskedLM") == {"mlm"}
    assert objectives_of(roberta, "RobertaForCausalLM") == frozenset()
    for config, objectives in ((roberta, {"mlm", "nsp"}), (EncoderConfig(), {"mlm", "sop"})):
        with pytest.raises(ConfigError, match="wanted the heads of a Hugging Face class"):
            architecture(config, frozenset(objectives))


def test_the_decoder_has_one_bias_under_either_name() -> None:
    config = encoder_config_from_huggingface(SIZES | {"model_type": "albert"})
    state = state_of("mlm", config=config)
    theirs = to_huggingface(state, config)
    second = theirs["predictions.bias"].clone()
    both = theirs | {"predictions.decoder.bias": second}
    only_decoder = {name: one for name, one in both.items() if name != "predictions.bias"}
    for files in (both, only_decoder):
        again = from_huggingface(files, config, "AlbertForMaskedLM")
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], state[name]) for name in state)
    other = theirs | {"predictions.decoder.bias": second + 1}
    with pytest.raises(FormatError, match=r"decoder\.bias: wanted the values of predictions\.bias"):
        from_huggingface(other, config, "AlbertForMaskedLM")


def test_a_file_may_hold_the_decoder_alone_and_names_of_parallel_training() -> None:
    state = state_of("mlm")
    theirs = to_huggingface(state, CONFIG)
    words = theirs.pop("bert.embeddings.word_embeddings.weight")
    theirs["cls.predictions.decoder.weight"] = words
    parallel = {f"module.{name}": tensor for name, tensor in theirs.items()}
    for files in (theirs, parallel):
        again = from_huggingface(files, CONFIG, "BertForMaskedLM")
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], state[name]) for name in state)


def test_an_untied_decoder_matters_only_to_a_head_for_masked_words() -> None:
    config = encoder_config_from_huggingface(SIZES | {"tie_word_embeddings": False})
    theirs = to_huggingface(state_of("classification"), config)
    assert from_huggingface(theirs, config, "BertForSequenceClassification")


def test_configs_say_what_transformers_means_where_they_are_silent() -> None:
    assert encoder_config_from_huggingface({}) == EncoderConfig()
    nothing = {"position_embedding_type": None, "tie_word_embeddings": None, "hidden_size": None}
    assert encoder_config_from_huggingface(nothing) == EncoderConfig()
    read = encoder_config_from_huggingface({"hidden_act": "gelu_python"})
    assert read.feed_forward.activation == "gelu"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_config_of_every_variant_goes_there_and_back(name: str) -> None:
    config = VARIANTS[name].config
    pad = 1 if config.family == "mpnet" else 3
    for one in (config, config.adapted(vocab_size=99, pad_token_id=pad, hidden_dropout_prob=0.3)):
        assert encoder_config_from_huggingface(encoder_config_to_huggingface(one)) == one


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2': wanted one of the families bert, roberta,"),
        ({"model_type": ["bert"]}, "model_type = .'bert'.: wanted one of the families"),
        ({"is_decoder": True}, "is_decoder = True: wanted False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*: wanted None"),
        ({"position_embedding_type": "relative_key"}, "wanted 'absolute'"),
        ({"hidden_size": 30}, "does not describe a Bert: hidden_size: wanted .*, got 30"),
        ({"model_type": "albert", "num_hidden_groups": 2}, "num_hidden_groups = 2: wanted 1"),
        ({"model_type": "deberta"}, "relative_attention = False: wanted True"),
        ({"model_type": "deberta", **DEBERTA, "pos_att_type": "c2p"}, "pos_att_type = 'c2p'"),
        ({"model_type": "deberta-v2", **DEBERTA}, "share_att_key = False: wanted True"),
        ({"model_type": "mpnet", "pad_token_id": 0}, "MPNet: pad_token_id: wanted 1 for the fam"),
        (
            {"model_type": "mpnet", "relative_attention_num_buckets": 16},
            "relative_attention_num_buckets = 16: wanted 32",
        ),
        (
            {"model_type": "electra", "summary_type": "mean"},
            "summary_type = 'mean': wanted 'first'",
        ),
        ({"model_type": "modernbert", "norm_bias": True}, "norm_bias = True: wanted False"),
        (
            {"model_type": "modernbert", "layer_types": ["full_attention"] * 2 + ["sliding"]},
            "layer_types = .*wanted full_attention first and at equal intervals",
        ),
        (
            {"model_type": "modernbert", "layer_types": ["sliding_attention"] * 4},
            "layer_types = .*wanted full_attention first",
        ),
        (
            {"model_type": "modernbert", "global_attn_every_n_layers": 0},
            "global_every: wanted at least 1, got 0",
        ),
        (
            {"model_type": "modernbert", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling = .*yarn.*: wanted none",
        ),
        (
            {"model_type": "modernbert", "rope_parameters": "yarn"},
            "rope_parameters: wanted an object or null, got text",
        ),
        (
            {
                "model_type": "modernbert",
                "rope_parameters": {"full_attention": {"rope_type": "yarn"}},
            },
            "rope_type = 'yarn': wanted 'default'",
        ),
    ],
)
def test_a_config_of_another_model_is_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encoder_config_from_huggingface(entries)


HEAD = {"classifier_bias": True}, {"classifier_activation": "relu"}
OF_HEADS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("modernbert", {"mlp_dropout": 0.1}, set()),
    *(("modernbert", each, {*LAYOUTS["modernbert"].heads} - {"Model"}) for each in HEAD),
    ("modernbert", {"decoder_bias": False}, {"ForMaskedLM"}),
    ("electra", {"summary_type": "mean"}, {"ForMultipleChoice"}),
    ("electra", {"summary_activation": None}, set()),  # transformers' default
    ("electra", {"summary_use_proj": False}, {"ForMultipleChoice"}),
    ("deberta-v2", {"conv_groups": 2}, set()),
    ("deberta-v2", {"conv_groups": 2, "conv_kernel_size": 3}, {*LAYOUTS["deberta-v2"].heads}),
]


@pytest.mark.parametrize(("family", "entries", "read_by"), OF_HEADS)
def test_an_entry_matters_to_the_classes_that_read_it(
    family: str, entries: dict[str, Any], read_by: set[str]
) -> None:
    """As in the code of transformers 5.23: `ModernBertPredictionHead`, `ElectraSequenceSummary`,
    `DebertaV2`'s `ConvLayer`; `mlp_dropout` is for training only."""
    layout = LAYOUTS[family]
    whole = encoder_config_to_huggingface(layout.defaults)
    relative = {"pos_att_type": ["p2c", "c2p"]} if family == "deberta-v2" else {}
    for ending in layout.heads:
        asked = {**whole, **relative, **entries, "architectures": [layout.title + ending]}
        if ending in read_by:
            with pytest.raises(FormatError, match=f"{next(iter(entries))} = .*: wanted"):
                encoder_config_from_huggingface(asked)
        else:
            assert encoder_config_from_huggingface(asked) == layout.defaults
    if read_by:  # of an unknown class it is not known
        with pytest.raises(FormatError, match=f"{next(iter(entries))} = .*: wanted"):
            encoder_config_from_huggingface({**whole, **relative, **entries})
