"""Words that no row has: training without them gives what training with all gives."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bert_core.batches import RankBatches, WindowSource
from bert_core.data.order import GlobalOrder
from bert_core.data.windows import Window
from bert_core.errors import ConfigError
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.objectives.distillation import Distillation
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.train.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_optimizer,
    load_weights,
)
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import Step, training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.words import ReadWords, train_read_words
from tests import tiny

VOCABULARY, PAD, STEPS = 200, 0, 6
CONFIG = tiny.encoder_config(VOCABULARY)
# Decay that shows in a few steps.
OPTIMIZER = OptimizerConfig(lr=0.01, weight_decay=0.3, max_grad_norm=0.5)
EVEN = np.arange(2, VOCABULARY, 2)


def windows(rows: int = 40) -> list[Window]:
    """Rows of words with even ids."""
    random = np.random.default_rng(0)
    made = []
    for row in range(rows):
        ids = random.choice(EVEN, random.integers(3, 12)).astype(np.uint32)
        labels = {"labels": np.array([row % 2])}
        made.append(Window(row=row, ids=(ids,), segment_b_start=(len(ids),), labels=labels))
    return made


def model(*, by_read_words: bool) -> ObjectiveModel:
    torch.manual_seed(0)
    made = ObjectiveModel(CONFIG, [Classification(CONFIG, num_labels=2)])
    if by_read_words:
        train_read_words(made, windows(), PAD)
    return made


def words_of(trained: ObjectiveModel) -> nn.Embedding:
    return trained.encoder.embeddings.word_embeddings


def train(
    trained: ObjectiveModel, optimizer: torch.optim.Optimizer, start: int = 0
) -> Iterator[Step]:
    """With dropout; each step has eight rows, in several micro-batches."""
    rows = windows()
    batches = RankBatches(WindowSource(rows, PAD), GlobalOrder([len(rows)], seed=1), 8, 30)
    return training_steps(
        trained,
        batches.from_step(start),
        optimizer,
        lambda place: OPTIMIZER.lr * (1 - place / 10),
        LoopConfig(max_steps=STEPS, precision="fp32"),
        max_grad_norm=OPTIMIZER.max_grad_norm,
        start=start,
    )


def trained_state(
    *, by_read_words: bool, optimizer: OptimizerConfig = OPTIMIZER
) -> tuple[dict[str, Tensor], list[float]]:
    made = model(by_read_words=by_read_words)
    assert isinstance(words_of(made), ReadWords) is by_read_words
    norms = [step.grad_norm for step in train(made, build_optimizer(made, optimizer))]
    return made.state_dict(), norms


@pytest.mark.parametrize("layer_decay", [1.0, 0.6])
def test_words_that_are_read_train_as_in_a_table_of_all_and_the_others_decay_as_there(
    layer_decay: float,
) -> None:
    before = words_of(model(by_read_words=False)).weight.detach()
    slower = replace(OPTIMIZER, layer_decay=layer_decay)
    (own, norms), (whole, others) = (
        trained_state(by_read_words=on, optimizer=slower) for on in (True, False)
    )
    assert norms == pytest.approx(others, rel=1e-6)
    assert own.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(own[name], weight, rtol=2e-6, atol=1e-7, msg=name)
    table = own["encoder.embeddings.word_embeddings.weight"]
    odd = table[1::2] / before[1::2]
    assert odd.mean() < 0.999  # or nothing is seen of the decay
    torch.testing.assert_close(odd, odd.mean().expand_as(odd))
    assert not torch.allclose(table[EVEN], before[EVEN] * odd.mean(), atol=1e-3)


def test_words_that_are_not_read_stay_where_nothing_decays() -> None:
    before = words_of(model(by_read_words=False)).weight.detach()
    state, _ = trained_state(by_read_words=True, optimizer=replace(OPTIMIZER, weight_decay=0.0))
    table = state["encoder.embeddings.word_embeddings.weight"]
    assert torch.equal(table[1::2], before[1::2])
    assert not torch.allclose(table[EVEN], before[EVEN], atol=1e-3)


def test_the_optimizer_has_moments_of_words_that_are_read_alone() -> None:
    made = model(by_read_words=True)
    optimizer = build_optimizer(made, OPTIMIZER)
    next(train(made, optimizer))
    rows = len(np.unique(np.concatenate([window.ids[0] for window in windows()]))) + 2
    assert rows < 0.6 * VOCABULARY
    assert words_of(made).weight.shape == (rows, 32)  # padding and the witness among them
    assert optimizer.state[words_of(made).weight]["exp_avg"].shape == (rows, 32)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_another_optimizer_than_adamw_is_refused_if_only_read_words_are_trained(
    name: Literal["lamb", "muon"],
) -> None:
    settings = replace(OPTIMIZER, name=name)
    build_optimizer(model(by_read_words=False), settings)
    with pytest.raises(ConfigError, match=f"wanted adamw, got {name}: .* train all of them"):
        build_optimizer(model(by_read_words=True), settings)


def test_before_the_first_step_the_state_is_that_of_the_model_as_it_was() -> None:
    own, whole = (model(by_read_words=on).state_dict() for on in (True, False))
    assert all(torch.equal(own[name], whole[name]) for name in whole)


def test_a_resumed_run_ends_with_the_same_bits_in_all_words(tmp_path: Path) -> None:
    undisturbed, _ = trained_state(by_read_words=True)
    made = model(by_read_words=True)
    optimizer = build_optimizer(made, OPTIMIZER)
    for step in train(made, optimizer):
        if step.index == 3:
            break
    with CheckpointWriter(str(tmp_path), run_digest="run") as writer:
        writer.save(3, made, optimizer)
    checkpoint = latest_checkpoint(str(tmp_path))
    assert checkpoint is not None
    resumed = model(by_read_words=True)
    load_weights(checkpoint, resumed, run_digest="run")
    optimizer = build_optimizer(resumed, OPTIMIZER)
    load_optimizer(checkpoint, optimizer, run_digest="run")
    list(train(resumed, optimizer, start=3))
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, undisturbed[name]), name
    plain = model(by_read_words=False)  # as a bundle is written
    load_weights(checkpoint, plain, run_digest="run")
    assert torch.equal(
        words_of(plain).weight, made.state_dict()["encoder.embeddings.word_embeddings.weight"]
    )


def test_a_run_resumes_from_a_checkpoint_of_one_that_trained_all_words(tmp_path: Path) -> None:
    undisturbed, _ = trained_state(by_read_words=False)
    for order in ((True, False), (False, True)):
        first, second = (model(by_read_words=on) for on in order)
        optimizer = build_optimizer(first, OPTIMIZER)
        for step in train(first, optimizer):
            if step.index == 3:
                break
        folder = str(tmp_path / str(order[0]))
        with CheckpointWriter(folder, run_digest="run") as writer:
            writer.save(3, first, optimizer)
        checkpoint = latest_checkpoint(folder)
        assert checkpoint is not None
        load_weights(checkpoint, second, run_digest="run")
        optimizer = build_optimizer(second, OPTIMIZER)
        load_optimizer(checkpoint, optimizer, run_digest="run")
        list(train(second, optimizer, start=3))
        for name, weight in second.state_dict().items():
            torch.testing.assert_close(weight, undisturbed[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_word_that_no_row_has_is_refused() -> None:
    made = model(by_read_words=True)
    for odd in range(1, VOCABULARY, 2):  # the witness among them
        ids = torch.tensor([[2, odd]])
        with pytest.raises(IndexError):
            made.encode({"input_ids": ids, "token_type_ids": torch.zeros_like(ids)})


def test_a_model_that_scores_all_words_and_one_that_stays_are_left_alone() -> None:
    scoring = ObjectiveModel(CONFIG, [MaskedLanguageModeling(CONFIG)])
    staying = model(by_read_words=False)
    staying.requires_grad_(False)
    other = ObjectiveModel(CONFIG, [MaskedLanguageModeling(CONFIG)])
    measured = ObjectiveModel(CONFIG, [MaskedLanguageModeling(CONFIG)])
    # It learns from layers alone, but is measured by what it scores.
    measured = Distillation(measured, other, {"hidden": 1.0}, temperature=1.0)
    for learner in (scoring, staying, measured):
        train_read_words(learner, windows(), PAD)
        assert not isinstance(words_of(learner), ReadWords)


def test_where_every_word_is_read_all_stays_as_it_is() -> None:
    made = model(by_read_words=False)
    ids = np.arange(VOCABULARY, dtype=np.uint32)
    train_read_words(made, [Window(row=0, ids=(ids,), segment_b_start=(len(ids),))], PAD)
    assert not isinstance(words_of(made), ReadWords)
