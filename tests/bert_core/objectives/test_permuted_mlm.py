"""Masked and permuted words beside a reference written from the paper, row by row."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig, FeedForwardConfig
from bert_core.model.size import training_flops
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.permuted_mlm import PermutedMaskedLanguageModeling
from tests import tiny

VOCABULARY, PAD = 40, 1


def config_of(variant: str) -> EncoderConfig:
    config = VARIANTS[variant].config
    return replace(
        config,
        hidden_size=16,
        num_hidden_layers=2,
        initializer_range=0.3,
        attention=replace(config.attention, num_heads=2),
        feed_forward=FeedForwardConfig(intermediate_size=24),
    ).adapted(vocab_size=VOCABULARY, pad_token_id=PAD, hidden_dropout_prob=0, attention_dropout=0)


def model_of(
    variant: str, objective: tiny.Build = PermutedMaskedLanguageModeling
) -> ObjectiveModel:
    return tiny.model(config_of(variant), objective, noise=0.2).double().train()


def batch_of(chosen: list[list[int]], lengths: list[int], seed: int = 0) -> Batch:
    """Rows padded to the longest, with the places in each row that are predicted."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(5, VOCABULARY, mask.shape, generator=generator)
    places = [row * max(lengths) + place for row, some in enumerate(chosen) for place in some]
    return {
        "input_ids": ids * mask + PAD * (1 - mask),
        "token_type_ids": (torch.arange(max(lengths)) >= 3).long() * mask,
        "attention_mask": mask,
        "mlm_positions": torch.tensor(places),
        "mlm_labels": torch.randint(5, VOCABULARY, (len(places),), generator=generator),
        "mlm_draws": torch.rand(len(places), generator=generator, dtype=torch.float64),
    }


CHOSEN, LENGTHS = [[2, 3, 8], [1], [4, 5]], [10, 6, 8]


def packed(batch: Batch) -> Batch:
    real = batch["attention_mask"].flatten().bool()
    ends = batch["attention_mask"].sum(1).cumsum(0)
    return {
        **{name: value for name, value in batch.items() if name.startswith("mlm_")},
        "input_ids": batch["input_ids"].flatten()[real],
        "token_type_ids": batch["token_type_ids"].flatten()[real],
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), ends]),
        "mlm_positions": (real.cumsum(0) - 1)[batch["mlm_positions"]],
    }


def reference(model: ObjectiveModel, batch: Batch) -> list[Tensor]:
    """The loss of each chosen token, by a pass of its own over a row in which the tokens before it
    in the order stand, and those from it on are masked.

    Two streams differ from such a pass only in what the other tokens know: here they would know of
    the tokens before it too. With one layer that makes no difference.
    """
    objective = model.objectives["mlm"]
    assert isinstance(objective, PermutedMaskedLanguageModeling)
    width = batch["input_ids"].shape[1]
    losses = []
    for place, label, draw in zip(
        batch["mlm_positions"], batch["mlm_labels"], batch["mlm_draws"], strict=True
    ):
        row = int(place) // width
        ids = batch["input_ids"][row].clone()
        for other, known, drawn in zip(
            batch["mlm_positions"], batch["mlm_labels"], batch["mlm_draws"], strict=True
        ):
            if int(other) // width == row and drawn < draw:
                ids[int(other) % width] = known
        real = batch["attention_mask"][row].bool()
        shown = ids[real][None]
        segments = batch["token_type_ids"][row][real][None]
        hidden = model.encoder(shown, segments).hidden[0, int(place) % width]
        scores = objective.head(hidden[None], model.word_embeddings)[0]
        losses.append(-scores.log_softmax(-1)[label])
    return losses


@pytest.mark.parametrize("variant", ["mpnet-base", "bert-tiny"])
def test_each_token_is_predicted_from_those_before_it_in_the_order(variant: str) -> None:
    config = replace(config_of(variant), num_hidden_layers=1)
    model = tiny.model(config, PermutedMaskedLanguageModeling, noise=0.2).double().train()
    batch = batch_of(CHOSEN, LENGTHS)
    part = model(batch)["mlm"]
    assert part.count == 6
    torch.testing.assert_close(part.sum, torch.stack(reference(model, batch)).sum())
    torch.testing.assert_close(model(packed(batch))["mlm"].sum, part.sum)


@pytest.mark.parametrize("variant", ["mpnet-base", "bert-tiny"])
def test_a_row_with_one_chosen_token_is_an_ordinary_masked_row(variant: str) -> None:
    batch = batch_of([[2], [1], [5]], LENGTHS)
    permuted = model_of(variant)(batch)["mlm"].sum
    plain = model_of(variant, MaskedLanguageModeling)(batch)["mlm"].sum
    torch.testing.assert_close(permuted, plain)


def test_no_token_is_predicted_from_itself_or_one_after_it_through_any_layers() -> None:
    model, batch = model_of("mpnet-base"), batch_of([[1, 3, 4, 7]], [9])
    rank = batch["mlm_draws"].argsort().argsort()
    objective = model.objectives["mlm"]
    assert isinstance(objective, PermutedMaskedLanguageModeling)

    def scores(labels: Tensor) -> Tensor:
        shown, _ = objective.shown(batch | {"mlm_labels": labels})
        return model.logits(shown)["mlm"]

    before = scores(batch["mlm_labels"])
    for index in range(4):
        labels = batch["mlm_labels"].clone()
        labels[index] = 5 + (labels[index] - 4) % (VOCABULARY - 5)
        moved = (scores(labels) - before).abs().amax(1) > 1e-9
        assert torch.equal(moved, rank > rank[index])


def test_measured_it_predicts_ordinary_masked_rows() -> None:
    batch = batch_of(CHOSEN, LENGTHS)
    permuted = model_of("mpnet-base").eval()(batch)["mlm"].sum
    plain = model_of("mpnet-base", MaskedLanguageModeling).eval()(batch)["mlm"].sum
    assert torch.equal(permuted, plain)


def test_rows_as_long_as_the_encoder_reads_may_be_longer_with_masks_and_queries() -> None:
    config = config_of("mpnet-base")
    embeddings = replace(config.embeddings, max_position_embeddings=14)
    config = replace(config, embeddings=embeddings)
    model = tiny.model(config, PermutedMaskedLanguageModeling).train()
    assert config.max_length == 12
    assert model(batch_of([[3, 4]], [12]))["mlm"].sum > 0


def test_masks_and_queries_count_as_computation() -> None:
    model, batch = model_of("bert-tiny"), batch_of(CHOSEN, LENGTHS)
    lengths, config = batch["attention_mask"].sum(1).numpy(), model.encoder.config
    more = training_flops(config, lengths + np.array([6, 2, 4])) - training_flops(config, lengths)
    plain = model_of("bert-tiny", MaskedLanguageModeling).flops(batch, lengths)
    assert model.flops(batch, lengths) == plain + more


@pytest.mark.parametrize("variant", ["modernbert-base", "deberta-v3-tiny"])
def test_an_encoder_that_cannot_hide_tokens_from_single_others_is_refused(variant: str) -> None:
    config = VARIANTS[variant].config
    with pytest.raises(ConfigError, match="permuted_mlm an encoder that attends as BERT or MPNet"):
        PermutedMaskedLanguageModeling(config)
