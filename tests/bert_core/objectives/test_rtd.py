"""Replaced-token detection beside one written from the papers, token by token."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_core.errors import ConfigError
from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig, FeedForwardConfig
from bert_core.model.encoder import Encoder
from bert_core.model.sharing import load_plain_state, plain_state
from bert_core.model.size import training_flops
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, Objective, ObjectiveModel
from bert_core.objectives.linear_cross_entropy import linear_sample
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.rtd import ReplacedTokenDetection, generator_of
from tests import tiny

VOCABULARY = 40
DIFFERENCE = "encoder.embeddings.word_embeddings.parametrizations.weight.original"
GENERATED = "objectives.rtd.generator."
WORDS = "embeddings.word_embeddings.weight"


def config_of(layers: int = 4) -> EncoderConfig:
    config = VARIANTS["deberta-v3-base"].config
    assert isinstance(config.attention, DisentangledAttentionConfig)
    return replace(
        config,
        hidden_size=16,
        num_hidden_layers=layers,
        initializer_range=0.3,
        attention=replace(
            config.attention, num_heads=2, max_relative_positions=20, position_buckets=8
        ),
        feed_forward=FeedForwardConfig(intermediate_size=24),
    ).adapted(vocab_size=VOCABULARY, pad_token_id=0, hidden_dropout_prob=0.0, attention_dropout=0.0)


def model_of(config: EncoderConfig | None = None) -> ObjectiveModel:
    """In fp64, with no weight where it began."""
    return tiny.model(config or config_of(), ReplacedTokenDetection, noise=0.2).double()


def detection(model: ObjectiveModel) -> ReplacedTokenDetection:
    objective = model.objectives["rtd"]
    assert isinstance(objective, ReplacedTokenDetection)
    return objective


def grad_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def batch_of(masked: int = 4) -> Batch:
    """Rows with padding; draws from all over the range."""
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(16) < torch.tensor([[16], [9], [12]])).long()
    positions = torch.arange(3).repeat_interleave(masked) * 16
    drawn = [torch.randperm(9, generator=generator)[:masked] for _ in range(3)]
    positions += torch.cat(drawn)
    count = len(positions)
    return {
        "input_ids": torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask,
        "token_type_ids": torch.zeros_like(mask),
        "attention_mask": mask,
        "mlm_positions": positions,
        "mlm_labels": torch.randint(1, VOCABULARY, (count,), generator=generator),
        "mlm_draws": (torch.randperm(count, generator=generator) + 0.5).double() / max(1, count),
    }


def plain_parts(model: ObjectiveModel, batch: Batch) -> tuple[Tensor, Tensor, int, Encoder]:
    """Both sums, how many tokens the encoder is right about, and an encoder of the same weights
    that shares none."""
    objective = detection(model)
    generator = objective.generator
    masked_words = generator.objectives["mlm"]
    assert isinstance(masked_words, MaskedLanguageModeling)
    head, words = masked_words.head, generator.word_embeddings
    hidden = generator.encode(batch).hidden.flatten(0, 1)
    ids, replaced = batch["input_ids"].flatten().clone(), [False] * batch["input_ids"].numel()
    mlm = torch.zeros((), dtype=torch.float64)
    for place, label, draw in zip(
        *(batch[f"mlm_{name}"].tolist() for name in ("positions", "labels", "draws")), strict=True
    ):
        scores = words @ head.transform(hidden[place]) + head.bias
        shares = scores.exp() / scores.exp().sum()
        mlm = mlm - shares[label].log()
        known = shares.tolist()
        guess, passed = 0, known[0]
        while passed <= draw:
            guess += 1
            passed += known[guess]
        ids[place], replaced[place] = guess, guess != label
    plain = Encoder(model.encoder.config, pooler=False).double()
    state = {n.removeprefix("encoder."): t for n, t in plain_state(model).items()}
    plain.load_state_dict({name: state[name] for name in plain.state_dict()})
    shown = ids.view_as(batch["input_ids"])
    hidden = plain(shown, shown * 0, batch["attention_mask"]).hidden.flatten(0, 1)
    rtd, right = torch.zeros((), dtype=torch.float64), 0
    for place, real in enumerate(batch["attention_mask"].flatten().tolist()):
        if real:
            inner = torch.nn.functional.gelu(objective.head.dense(hidden[place]))
            share = 1 / (1 + (-objective.head.linear(inner)[0]).exp())
            rtd = rtd - (share if replaced[place] else 1 - share).log()
            right += int((share > 0.5) == replaced[place])
    return mlm, rtd, right, plain


def test_losses_and_gradients_are_those_of_a_plain_reference() -> None:
    model, batch = model_of(), batch_of()
    mlm, rtd, right, plain = plain_parts(model, batch)
    parts = model(batch)
    assert list(parts) == ["mlm", "rtd"]
    assert {name: part.count for name, part in parts.items()} == model.counts(batch)
    assert model.counts(batch) == {"mlm": 12, "rtd": 37}
    assert parts["rtd"].correct == right
    torch.testing.assert_close(parts["mlm"].sum, mlm, rtol=1e-10, atol=0)
    torch.testing.assert_close(parts["rtd"].sum, rtd, rtol=1e-10, atol=0)
    parts["rtd"].sum.backward()
    rtd.backward(inputs=list(plain.parameters()))
    moved = {name for name, each in model.named_parameters() if each.grad is not None}
    assert moved == {n for n, _ in model.named_parameters() if not n.startswith(GENERATED)}
    ours = {name: each.grad for name, each in model.named_parameters() if name in moved}
    ours["encoder." + WORDS] = ours.pop(DIFFERENCE)  # what the whole gets, the difference gets
    for name, each in plain.named_parameters():
        torch.testing.assert_close(ours[f"encoder.{name}"], each.grad, rtol=1e-8, atol=1e-10)
    model.zero_grad()
    model(batch)["mlm"].sum.backward()
    moved = {name for name, each in model.named_parameters() if each.grad is not None}
    assert moved == {n for n, _ in model.named_parameters() if n.startswith(GENERATED)}
    own = dict(model.named_parameters())
    ours = {name: grad_of(own[name]).clone() for name in moved}
    for parameter in model.parameters():
        parameter.grad = None
    mlm.backward()
    for name in moved:
        torch.testing.assert_close(ours[name], own[name].grad, rtol=1e-8, atol=1e-10)


def test_a_guess_that_is_right_is_not_replaced() -> None:
    model, batch = model_of(), batch_of()
    shown, _ = detection(model).shown(batch)
    guesses = shown["input_ids"].flatten()[batch["mlm_positions"]]
    assert (guesses != batch["mlm_labels"]).all(), "or it would be no test"
    again, _ = detection(model).shown(batch | {"mlm_labels": guesses})
    assert torch.equal(again["input_ids"], shown["input_ids"])
    assert shown["replaced"].sum() == 12
    assert not again["replaced"].any()


def test_the_encoder_begins_with_its_generators_words_and_half_of_it_is_a_generator() -> None:
    config = config_of(layers=5)
    model = ObjectiveModel(config, [ReplacedTokenDetection(config)])
    generator = detection(model).generator
    assert not dict(model.named_parameters())[DIFFERENCE].any()
    assert torch.equal(model.word_embeddings, generator.word_embeddings)
    assert generator.encoder.config == replace(config, num_hidden_layers=2)
    assert model.encoders == [model.encoder, generator.encoder]


def electra(variant: str = "electra-small", **changes: Any) -> EncoderConfig:
    config = replace(VARIANTS[variant].config, num_hidden_layers=2, **changes)
    return config.adapted(vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_dropout=0.0)


@pytest.mark.parametrize(
    ("variant", "width", "heads", "inner"),
    [  # Clark et al. 2020, table 6
        ("electra-small", 64, 1, 256),
        ("electra-base", 256, 4, 1024),
        ("electra-large", 256, 4, 1024),
    ],
)
def test_electras_generator_is_as_deep_and_narrower_as_its_paper_says(
    variant: str, width: int, heads: int, inner: int
) -> None:
    config = VARIANTS[variant].config
    smaller = generator_of(config)
    assert (smaller.hidden_size, smaller.attention.num_heads) == (width, heads)
    assert smaller.feed_forward.intermediate_size == inner
    assert smaller.num_hidden_layers == config.num_hidden_layers
    assert smaller.embedding_size == config.embedding_size
    assert ReplacedTokenDetection.weight == 50.0


def test_electra_and_its_generator_train_the_same_embeddings() -> None:
    model, batch = tiny.model(electra(), ReplacedTokenDetection), batch_of()
    own, others = model.encoder.embeddings, detection(model).generator.encoder.embeddings
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings", "norm"):
        assert getattr(own, name) is getattr(others, name)
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if name.startswith(f"{GENERATED}encoder.embeddings.word")]
    for part in ("mlm", "rtd"):
        model.zero_grad()
        model(batch)[part].sum.backward()
        assert grad_of(own.word_embeddings.weight).any()


def test_weights_are_put_back_as_they_were_used() -> None:
    model, other = model_of(), model_of(config_of())
    state = plain_state(model)
    assert "encoder." + WORDS in state
    assert DIFFERENCE not in state
    generated = dict(model.named_parameters())[f"{GENERATED}encoder.{WORDS}"]
    difference = dict(model.named_parameters())[DIFFERENCE]
    torch.testing.assert_close(state["encoder." + WORDS] - generated, difference)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_plain_state(other, state)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-12, atol=1e-14)


def test_classes_are_drawn_as_often_as_the_softmax_says() -> None:
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(1, 8), torch.randn(50, 8), torch.randn(50)
    shares = (rows @ weight.T + bias).softmax(-1)[0].double().numpy()
    draws = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    found = linear_sample(rows.expand(20_000, -1), weight, bias, draws)
    counts = np.bincount(found.numpy(), minlength=50)
    # Draws lie at equal distances: a class has as many as fit its share, but for its two ends.
    assert np.abs(counts - shares * 20_000).max() <= 1.1
    least = linear_sample(rows, weight, bias, torch.zeros(1, dtype=torch.float64))
    most = linear_sample(rows, weight, bias, torch.tensor([math.nextafter(1.0, 0.0)]).double())
    assert (int(least), int(most)) == (0, 49)
    assert len(linear_sample(rows[:0], weight, bias, draws[:0])) == 0


def test_the_generators_computation_is_counted() -> None:
    model, batch = model_of(), batch_of()
    lengths = batch["attention_mask"].sum(1).numpy()
    config = model.encoder.config
    half = replace(config, num_hidden_layers=2)
    encoder = training_flops(config, lengths, outputs=37) + 6 * 37 * (16 * 16 + 16)
    assert model.flops(batch, lengths) == encoder + training_flops(half, lengths, 12, 12)


def test_an_encoder_of_one_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="wanted for rtd an encoder of at least 2 layers"):
        ReplacedTokenDetection(config_of(layers=1))


def test_a_duplicate_part_is_refused() -> None:
    config = config_of()
    objectives: list[Objective] = [MaskedLanguageModeling(config), ReplacedTokenDetection(config)]
    with pytest.raises(ConfigError, match="wanted each part of the loss once, got mlm, mlm, rtd"):
        ObjectiveModel(config, objectives)
