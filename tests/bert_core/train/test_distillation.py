"""A student's gradient is that of the global batch, for any number of workers and micro-batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_core.batches import RankBatches, WindowSource
from bert_core.data.order import GlobalOrder
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.distillation import Distillation
from bert_core.tasks.text_classification import TextClassification
from bert_core.train.config import LoopConfig
from bert_core.train.loop import evaluate, training_steps
from bert_core.train.parallel import is_part, rank_of_world, shard
from tests import tiny
from tests.ranks import on_ranks

WORDS = [f"word{number}" for number in range(50)]
TOKENIZER = tiny.tokenizer(WORDS)
WEIGHTS = {"soft": 5.0, "hard": 2.0, "embeddings": 1.0, "hidden": 1.0, "attention": 1.0}
LOOP = LoopConfig(max_steps=2, precision="fp32")
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def gradient_of(
    dtype: torch.dtype,
    budget: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    general: bool = False,
    sharded: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the second global batch, and what an evaluation gives; `general` asks no head
    for anything, not even one that reads all words."""
    rng = np.random.default_rng(0)
    rows = [
        {"text": " ".join(rng.choice(WORDS, rng.integers(1, 28))), "label": "ab"[number % 2]}
        for number in range(40)
    ]
    task = TextClassification.from_rows(rows)
    windows = task.encode(rows, TOKENIZER, 32, labelled=True)
    torch.manual_seed(0)
    models = []
    for hidden, layers in ((16, 2), (32, 4)):
        config = tiny.encoder_config(
            TOKENIZER.vocab_size, hidden_size=hidden, num_hidden_layers=layers, dropout=0.0
        )
        objective = task.build_objective(config)
        if general:
            vars(objective)["reads_words"] = True
        models.append(ObjectiveModel(config, [objective]))
    weights = {"hidden": 1.0} if general else WEIGHTS
    model = Distillation(models[0], models[1], weights, temperature=2.0).to(dtype)
    if sharded:
        shard(model)
    batches = RankBatches(
        WindowSource(windows, TOKENIZER.pad_id), GlobalOrder([len(windows)], seed=0), 13,
        budget, rank, world_size,
    )  # fmt: skip
    measured = evaluate(model, batches.once(), LOOP)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps = training_steps(model, batches.from_step(0), optimizer, lambda _: 1e-3, LOOP)
    assert len(list(steps)) == 2
    parts: list[Any] = [each.grad for each in model.parameters() if each.grad is not None]
    found = [part.full_tensor() if is_part(part) else part for part in parts]
    return torch.cat([one.flatten() for one in found]), measured


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("budget", [1, 200])
@pytest.mark.parametrize(("dtype", "most"), PRECISIONS)
def test_the_micro_batch_does_not_change_the_gradient(
    budget: int, dtype: torch.dtype, most: float
) -> None:
    whole, measured = gradient_of(dtype, 1 << 20)
    parts, again = gradient_of(dtype, budget)
    assert whole.norm() > 0.01
    assert relative_error(parts, whole) < most
    assert again == pytest.approx(measured, rel=most * 10)
    weighted = sum(
        WEIGHTS.get(name, WEIGHTS["hard"]) * measured[f"{name}_loss"]
        for name in ("classification", "soft", "embeddings", "hidden", "attention")
    )
    assert measured["loss"] == pytest.approx(weighted)


@pytest.mark.guard
def test_the_number_of_workers_does_not_change_the_gradient(tmp_path: Path) -> None:
    alone = gradients(1 << 20)
    ranks = on_ranks(2, gradients_of_rank, tmp_path)
    wanted = [*zip(alone, [most for _, most in PRECISIONS] * 2, strict=True)] * 2
    for one, other, ((gradient, measured), most) in zip(*ranks, wanted, strict=True):
        assert torch.equal(one[0], other[0])
        assert relative_error(one[0], gradient) < most
        assert one[1] == pytest.approx(measured, rel=most * 10)


def gradients(
    budget: int, rank: int = 0, world_size: int = 1, *, sharded: bool = False
) -> list[tuple[Tensor, dict]]:
    """Of both kinds, in both precisions."""
    return [
        gradient_of(dtype, budget, rank, world_size, general=general, sharded=sharded)
        for general in (False, True)
        for dtype, _ in PRECISIONS
    ]


def gradients_of_rank() -> list[tuple[Tensor, dict]]:
    """With a copy of the model on each rank, and with a shard."""
    return [
        found
        for sharded in (False, True)
        for found in gradients(300, *rank_of_world(), sharded=sharded)
    ]
