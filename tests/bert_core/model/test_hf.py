"""Parity with transformers in both directions, outputs and gradients; every name it ever used."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TypeVar, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)

from bert_core.errors import FormatError
from bert_core.model.hf import (
    encoder_config_from_huggingface,
    encoder_config_to_huggingface,
    from_huggingface,
    to_huggingface,
)
from bert_core.model.variants import Activation, EncoderConfig
from bert_core.objectives.base import Batch, Objective, ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.nsp import NextSentencePrediction

CONFIG = EncoderConfig(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=24,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
LABELS = 5
IGNORE = -100
Model = TypeVar("Model", bound=nn.Module)

# Family member → (objectives of ours, class of theirs).
FAMILY: dict[str, tuple[Callable[[EncoderConfig], list[Objective]], type[nn.Module]]] = {
    "pretraining": (
        lambda config: [MaskedLanguageModeling(config), NextSentencePrediction(config)],
        BertForPreTraining,
    ),
    "masked_lm": (lambda config: [MaskedLanguageModeling(config)], BertForMaskedLM),
    "classification": (
        lambda config: [Classification(config, LABELS)],
        BertForSequenceClassification,
    ),
}


def ours_of(member: str, config: EncoderConfig = CONFIG) -> ObjectiveModel:
    torch.manual_seed(1)
    return scrambled(ObjectiveModel(config, FAMILY[member][0](config)))


def theirs_of(member: str, config: EncoderConfig = CONFIG) -> nn.Module:
    torch.manual_seed(2)
    settings = BertConfig(**asdict(config), num_labels=LABELS)  # type: ignore[call-arg]
    return scrambled(FAMILY[member][1](settings))


def scrambled(model: Model) -> Model:
    """Biases off zero and norms off one, or a mix-up of two of them would go unseen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def padded_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([16, 11, 5, 9])
    mask = (torch.arange(16) < lengths[:, None]).long()
    positions = torch.tensor([1, 7, 15, 18, 25, 33, 50, 55])
    return {
        "input_ids": torch.randint(1, CONFIG.vocab_size, (4, 16), generator=generator) * mask,
        "token_type_ids": (torch.arange(16) >= lengths[:, None] // 2).long() * mask,
        "attention_mask": mask,
        "mlm_positions": positions,
        "mlm_labels": torch.randint(1, CONFIG.vocab_size, positions.shape, generator=generator),
        "next_sentence_label": torch.tensor([0, 1, 1, 0]),
        "labels": torch.tensor([4, 0, 2, 2]),
    }


def loss_of_ours(model: ObjectiveModel, batch: Batch) -> Tensor:
    return torch.stack([part.sum / part.count for part in model(batch).values()]).sum()


def loss_of_theirs(member: str, model: nn.Module, batch: Batch) -> Tensor:
    inputs = {key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    if member == "classification":
        return model(**inputs, labels=batch["labels"]).loss
    labels = torch.full_like(batch["input_ids"], IGNORE).flatten()
    labels[batch["mlm_positions"]] = batch["mlm_labels"]
    labels = labels.view_as(batch["input_ids"])
    if member == "masked_lm":
        return model(**inputs, labels=labels).loss
    return model(**inputs, labels=labels, next_sentence_label=batch["next_sentence_label"]).loss


def load_into_theirs(model: nn.Module, state: dict[str, Tensor]) -> None:
    keys = model.load_state_dict(to_huggingface(state), strict=False)
    assert not keys.unexpected_keys
    # The tied decoder is the word embedding, which the module itself shares.
    assert all(name.startswith("cls.predictions.decoder.") for name in keys.missing_keys)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize("member", FAMILY)
@pytest.mark.parametrize("direction", ["ours_to_theirs", "theirs_to_ours"])
def test_loss_and_every_gradient_equal_transformers(member: str, direction: str) -> None:
    ours, theirs, batch = ours_of(member), theirs_of(member), padded_batch()
    if direction == "ours_to_theirs":
        load_into_theirs(theirs, ours.state_dict())
    else:
        ours.load_state_dict(from_huggingface(theirs.state_dict()))
    ours_loss, theirs_loss = loss_of_ours(ours, batch), loss_of_theirs(member, theirs, batch)
    torch.testing.assert_close(ours_loss, theirs_loss, atol=1e-5, rtol=0)
    ours_loss.backward()
    theirs_loss.backward()
    ours_gradients = to_huggingface(gradients(ours))
    theirs_gradients = gradients(theirs)
    assert ours_gradients.keys() == theirs_gradients.keys()
    for name, gradient in theirs_gradients.items():
        torch.testing.assert_close(ours_gradients[name], gradient, atol=1e-4, rtol=0, msg=name)
        if not name.endswith("key.bias"):  # zero by theory: softmax does not see a shift
            assert gradient.abs().max() > 1e-4, name


@pytest.mark.parametrize("activation", get_args(Activation))
def test_encoder_output_equals_transformers(activation: Activation) -> None:
    config = replace(CONFIG, hidden_act=activation)
    ours, batch = ours_of("classification", config).eval(), padded_batch()
    theirs = BertModel(BertConfig(**asdict(config))).eval()
    state = {
        name.removeprefix("bert."): tensor
        for name, tensor in to_huggingface(
            {f"encoder.{name}": tensor for name, tensor in ours.encoder.state_dict().items()}
        ).items()
    }
    theirs.load_state_dict(state)
    encoded = ours.encode(batch)
    expected = theirs(
        **{key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
    )
    torch.testing.assert_close(encoded.hidden, expected.last_hidden_state, atol=1e-5, rtol=0)
    torch.testing.assert_close(encoded.pooled, expected.pooler_output, atol=1e-5, rtol=0)


@pytest.mark.parametrize("member", FAMILY)
def test_names_there_and_back_give_every_tensor_again(member: str) -> None:
    state = ours_of(member).state_dict()
    again = from_huggingface(to_huggingface(state))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_old_names_are_understood() -> None:
    state = ours_of("pretraining").state_dict()
    old = {}
    for name, tensor in to_huggingface(state).items():
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old[name.replace("LayerNorm.bias", "LayerNorm.beta").removeprefix("bert.")] = tensor
    old["embeddings.position_ids"] = torch.arange(24)[None]
    old["cls.predictions.decoder.weight"] = old["embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    assert "embeddings.LayerNorm.gamma" in old
    assert "cls.predictions.transform.LayerNorm.beta" in old
    again = from_huggingface(old)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_heads_unknown_here_are_left_out() -> None:
    theirs = to_huggingface(ours_of("classification").state_dict())
    again = from_huggingface(theirs | {"qa_outputs.weight": torch.zeros(2, 32)})
    assert again.keys() == from_huggingface(theirs).keys()


def test_weights_that_are_no_bert_are_refused() -> None:
    theirs = to_huggingface(ours_of("pretraining").state_dict())
    foreign = theirs | {"bert.encoder.layer.0.crossattention.self.query.weight": torch.zeros(1)}
    with pytest.raises(FormatError, match=r"crossattention.*BERT's encoder has no such part"):
        from_huggingface(foreign)
    untied = theirs | {"cls.predictions.decoder.weight": torch.zeros(97, 32)}
    with pytest.raises(FormatError, match=r"decoder\.weight: wanted the word embedding's own"):
        from_huggingface(untied)
    del theirs["bert.encoder.layer.1.attention.self.key.bias"]
    with pytest.raises(
        FormatError, match=r"layers\.1.*wanted query, key, value.*only query, value"
    ):
        from_huggingface(theirs)


def test_a_tensor_without_a_name_there_is_refused() -> None:
    with pytest.raises(
        FormatError, match=r"objectives\.sop\.weight: Hugging Face's BERT has no such"
    ):
        to_huggingface({"objectives.sop.weight": torch.zeros(1)})


def test_config_goes_there_and_back() -> None:
    entries = encoder_config_to_huggingface(CONFIG)
    assert encoder_config_from_huggingface(entries) == CONFIG
    assert encoder_config_from_huggingface(BertConfig(**entries).to_dict()) == CONFIG
    assert encoder_config_from_huggingface({}) == EncoderConfig()
    assert encoder_config_from_huggingface({"hidden_act": "gelu_python"}).hidden_act == "gelu"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "roberta"}, "model_type = 'roberta': wanted 'bert'"),
        ({"is_decoder": True}, "is_decoder = True: wanted False"),
        ({"position_embedding_type": "relative_key"}, "wanted 'absolute'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False: wanted True"),
        ({"hidden_size": 30}, "does not describe a BERT: hidden_size = 30"),
    ],
)
def test_a_config_of_another_model_is_refused(entries: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encoder_config_from_huggingface(entries)
