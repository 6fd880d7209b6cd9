"""The enhanced mask decoder beside one written from the paper, token by token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bert_core.bundle.format import About
from bert_core.bundle.writing import save_bundle
from bert_core.errors import ConfigError
from bert_core.inference.predictor import Predictor
from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig, FeedForwardConfig
from bert_core.model.disentangled import KeylessBiasLinear, RelativePositions
from bert_core.model.layers import EncoderLayer
from bert_core.model.size import training_flops
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling
from bert_core.tasks.fill_mask import FillMask
from tests import tiny

WIDTH, HEADS, SPAN = 12, 2, 5
LENGTHS = (9, 5, 7)  # some distances are beyond the span


def config_of(variant: str) -> EncoderConfig:
    """In small; every distance has a vector of its own, up to the span."""
    config = VARIANTS[variant].config
    assert isinstance(config.attention, DisentangledAttentionConfig)
    return replace(
        config,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        initializer_range=0.3,
        attention=replace(
            config.attention, num_heads=HEADS, max_relative_positions=SPAN, position_buckets=0
        ),
        feed_forward=FeedForwardConfig(intermediate_size=16),
    ).adapted(vocab_size=40, pad_token_id=0, hidden_dropout_prob=0.0, attention_dropout=0.0)


def model_of(variant: str) -> ObjectiveModel:
    return tiny.model(config_of(variant), EnhancedMaskedLanguageModeling, noise=0.1).double()


def objective_of(model: ObjectiveModel) -> EnhancedMaskedLanguageModeling:
    objective = model.objectives["mlm"]
    assert isinstance(objective, EnhancedMaskedLanguageModeling)
    return objective


def batch_of() -> Batch:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return {
        "input_ids": torch.randint(1, 40, mask.shape, generator=generator) * mask,
        "token_type_ids": torch.zeros_like(mask),
        "attention_mask": mask,
        "mlm_positions": torch.tensor([1, 4, 8, 9 + 2, 18 + 0, 18 + 6]),
        "mlm_labels": torch.tensor([3, 7, 7, 11, 39, 1]),
    }


def end_to_end(batch: Batch) -> Batch:
    real = batch["attention_mask"].bool()
    places = real.flatten().cumsum(0) - 1
    return {
        "input_ids": batch["input_ids"][real],
        "token_type_ids": batch["token_type_ids"][real],
        "offsets": torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)]),
        "mlm_positions": places[batch["mlm_positions"]],
        "mlm_labels": batch["mlm_labels"],
    }


def distance(asking: int, asked: int) -> int:
    """The row of the table of relative positions: equation 3."""
    return max(0, min(2 * SPAN - 1, asking - asked + SPAN))


def layer_on(layer: EncoderLayer, table: Tensor, queries: list[Tensor], keys: Tensor) -> list:
    """Equation 4 for one token after the other, and what follows it in a layer."""
    attention, size = layer.attention, WIDTH // HEADS
    query, key, value = attention.qkv.weight.chunk(3)
    nothing = torch.zeros(WIDTH, dtype=torch.float64)
    if isinstance(attention.qkv, KeylessBiasLinear):
        biases = [attention.qkv.query_bias, nothing, attention.qkv.value_bias]
        far_keys = table @ attention.position_key.weight.T
        far_queries = table @ attention.position_query.weight.T + attention.position_query.bias
    else:
        biases = list(attention.qkv.bias.chunk(3))
        far_keys, far_queries = table @ key.T + biases[1], table @ query.T + biases[0]
    found = []
    for i, vector in enumerate(queries):
        mixed = []
        for head in range(HEADS):
            own = slice(head * size, (head + 1) * size)
            asks = (query @ vector + biases[0])[own]
            scores = []
            for j, other in enumerate(keys):
                looked_at = (key @ other + biases[1])[own]
                content = asks @ looked_at
                to_position = asks @ far_keys[distance(i, j)][own]
                # Equation 4 says (j, i); its authors' code, and so all weights, (i, j).
                from_position = looked_at @ far_queries[distance(i, j)][own]
                scores.append((content + to_position + from_position) / (3 * size) ** 0.5)
            weights = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
            values = [(value @ other + biases[2])[own] for other in keys]
            mixed.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        inner = layer.attention_norm(vector + attention.output(torch.cat(mixed)))
        found.append(layer.feed_forward_norm(inner + layer.feed_forward(inner)))
    return found


def plain_loss(model: ObjectiveModel, batch: Batch) -> tuple[Tensor, int]:
    """Sum over masked positions, and how many are right; a row at a time."""
    encoder, objective = model.encoder, objective_of(model)
    shared, last = encoder.shared, encoder.layers[-1]
    assert isinstance(shared, RelativePositions)
    assert isinstance(last, EncoderLayer)
    table = shared.embeddings.weight
    table = table if shared.norm is None else shared.norm(table)
    words, total, right = model.word_embeddings, torch.zeros((), dtype=torch.float64), 0
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row : row + 1, :length]
        hidden = encoder(ids, ids * 0, all_layers=True).layers[-2][0]
        states = [hidden[i] + objective.positions.weight[i] for i in range(length)]
        for _ in range(2):
            states = layer_on(last, table, states, hidden)
        for place, label in zip(batch["mlm_positions"], batch["mlm_labels"], strict=True):
            if place // max(LENGTHS) == row:
                vector = objective.head.transform(states[place % max(LENGTHS)])
                scores = words @ vector + objective.head.bias
                total = total - scores.log_softmax(0)[label]
                right += int(scores.argmax() == label)
    return total, right


@pytest.mark.parametrize("variant", ["deberta-base", "deberta-v3-base"])
def test_loss_and_gradient_are_those_of_a_decoder_written_from_the_paper(variant: str) -> None:
    model, batch = model_of(variant), batch_of()
    wanted, right = plain_loss(model, batch)
    wanted.backward()
    gradients = {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }
    assert len(gradients) == len([*model.parameters()])
    assert all(each.any() for each in gradients.values())
    for rows in (batch, end_to_end(batch)):
        model.zero_grad()
        part = model(rows)["mlm"]
        assert (part.count, part.correct) == (6, right)
        torch.testing.assert_close(part.sum, wanted.detach(), rtol=1e-10, atol=0)
        part.sum.backward()
        for name, each in model.named_parameters():
            torch.testing.assert_close(each.grad, gradients[name], rtol=1e-8, atol=1e-10)


def test_masked_words_are_distinguished_by_position() -> None:
    model, batch = model_of("deberta-base"), batch_of()
    scores = model.logits(batch)["mlm"]
    with torch.no_grad():
        objective_of(model).positions.weight[4] += 1
    moved = (model.logits(batch)["mlm"] - scores).abs().amax(1) > 1e-6
    assert moved.tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("variant", ["deberta-base", "deberta-v3-base"])
def test_scores_of_every_token_are_those_of_the_chosen_ones(variant: str) -> None:
    model, batch = model_of(variant), batch_of()
    objective = objective_of(model)
    wanted = model.logits(batch)["mlm"]
    del batch["mlm_positions"]
    every = objective.every(model.encode(batch, all_layers=True), model.word_embeddings)
    assert every.shape == (len(LENGTHS) * max(LENGTHS), 40)
    found = every[batch_of()["mlm_positions"]]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recorded", [True, False])
def test_a_bundle_fills_masks_as_it_was_trained_to(recorded: bool, tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer(tiny.ALPHABET)
    model = model_of("deberta-base").float().eval()
    save_bundle(tmp_path / "bundle", model, tokenizer, About())
    if not recorded:
        (tmp_path / "bundle" / "raybert.json").unlink()
    predictor = Predictor(tmp_path / "bundle", device="cpu")
    assert predictor.task.is_comparable(FillMask())
    windows = predictor.encode(predictor.rows(["a [MASK] b [MASK]", "[MASK]"]))
    for window, found in zip(windows, predictor.forward(windows), strict=True):
        ids = torch.from_numpy(window.ids[0].astype("int64"))[None]
        places = torch.from_numpy(window.positions["mlm_positions"])
        batch = {"input_ids": ids, "token_type_ids": ids * 0, "mlm_positions": places}
        wanted = model.logits(batch)["mlm"].detach()
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-5, rtol=1e-5)
        hidden = model.encode(batch).hidden.flatten(0, 1)[places]  # of the last layer by itself
        plain = objective_of(model).head(hidden, model.word_embeddings)
        assert (plain - wanted).abs().max() > 0.1


def test_the_decoders_computation_is_counted() -> None:
    model, batch = model_of("deberta-base"), batch_of()
    lengths = batch["attention_mask"].sum(1).numpy()
    config = model.encoder.config
    one_layer = replace(config, num_hidden_layers=1)
    encoder = training_flops(config, lengths, predictions=6, outputs=0)
    assert model.flops(batch, lengths) == encoder + 2 * training_flops(
        one_layer, lengths, outputs=6
    )


def test_an_encoder_that_has_positions_already_is_refused() -> None:
    bert = VARIANTS["bert-tiny"].config
    with pytest.raises(ConfigError, match=r"emd_mlm an encoder with disentangled.*family bert"):
        EnhancedMaskedLanguageModeling(bert)
