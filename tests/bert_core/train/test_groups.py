"""Rows whose loss is of all of them together: nothing but the global batch decides the gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_core.batches import RankBatches, WindowSource
from bert_core.data.order import GlobalOrder
from bert_core.errors import ConfigError
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import evaluate, training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.parallel import rank_of_world
from tests import tiny
from tests.ranks import on_ranks

WORDS = [f"word{number}" for number in range(50)]
TOKENIZER = tiny.tokenizer(WORDS)
CONFIG = tiny.encoder_config(TOKENIZER.vocab_size, dropout=0.0)
GROUP, BATCH, ONE_STEP = 3, 13, LoopConfig(max_steps=1, precision="fp32")
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def rows_of(*, scored: bool) -> list[dict]:
    """Rows of unlike lengths, some with negatives; some texts are right for several rows."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 28))) for _ in range(60)]
    if scored:
        return [{"text": texts[n], "text_pair": texts[n + 30], "score": n / 6} for n in range(30)]
    return [
        {
            "text": texts[n % 25],
            "text_pair": texts[20 + n % 9],
            "negatives": texts[40 : 40 + n % 3],
        }
        for n in range(30)
    ]


def gradient_of(
    dtype: torch.dtype, budget: int, *, scored: bool, rank: int = 0, world_size: int = 1
) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the first global batch, and what an evaluation gives."""
    rows = rows_of(scored=scored)
    options = FeatureExtractionOptions() if scored else FeatureExtractionOptions(group_size=GROUP)
    task = FeatureExtraction.from_rows(rows, options)
    windows = task.encode(rows, TOKENIZER, 32, labelled=True)
    model = tiny.model(CONFIG, task.build_objective).to(dtype)
    batches = RankBatches(
        WindowSource(windows, TOKENIZER.pad_id), GlobalOrder([len(windows)], seed=0), BATCH,
        budget, rank, world_size, group_rows=task.group_rows,
    )  # fmt: skip
    measured = evaluate(model, batches.once(), ONE_STEP)
    steps = training_steps(
        model, batches.from_step(0), build_optimizer(model, OptimizerConfig(lr=1e-3)),
        lambda _: 1e-3, ONE_STEP,
    )  # fmt: skip
    [_] = list(steps)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert None not in gradients
    return torch.cat([one.flatten() for one in gradients if one is not None]), measured


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("budget", [1, 200, 500])
@pytest.mark.parametrize(("dtype", "most"), PRECISIONS)
def test_the_micro_batch_does_not_change_the_gradient(
    budget: int, scored: bool, dtype: torch.dtype, most: float
) -> None:
    whole, measured = gradient_of(dtype, 1 << 20, scored=scored)
    parts, again = gradient_of(dtype, budget, scored=scored)
    assert whole.norm() > 0.01
    assert relative_error(parts, whole) < most
    assert again == pytest.approx(measured, rel=most * 10)


@pytest.mark.guard
def test_the_number_of_workers_does_not_change_the_gradient(tmp_path: Path) -> None:
    alone = [gradient_of(dtype, 1 << 20, scored=False) for dtype, _ in PRECISIONS]
    ranks = on_ranks(2, gradients_of_rank, tmp_path)
    for number, (_, most) in enumerate(PRECISIONS):
        assert torch.equal(ranks[0][number][0], ranks[1][number][0])
        assert relative_error(ranks[0][number][0], alone[number][0]) < most
        assert ranks[0][number][1] == pytest.approx(alone[number][1], rel=most * 10)


def gradients_of_rank() -> list[tuple[Tensor, dict[str, float]]]:
    rank, world_size = rank_of_world()
    return [
        gradient_of(dtype, 300, scored=False, rank=rank, world_size=world_size)
        for dtype, _ in PRECISIONS
    ]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_groups_are_slices_of_the_global_order_for_any_number_of_workers(world_size: int) -> None:
    rows = rows_of(scored=False)
    windows = FeatureExtraction.from_rows(rows).encode(rows, TOKENIZER, 32, labelled=True)
    order = GlobalOrder([len(windows)], seed=0)
    source = WindowSource(windows, TOKENIZER.pad_id)
    ranks = [
        RankBatches(source, order, BATCH, 100, rank, world_size, GROUP).from_step(1)
        for rank in range(world_size)
    ]
    seen = []
    for batch in (batch for rank in ranks for batch in next(rank)):
        firsts = batch["texts"].split(batch["choices"].tolist())
        for group in torch.stack([its[0] for its in firsts]).split(batch["groups"].tolist()):
            seen.append(group.tolist())
    texts = [int(windows[row].labels["texts"][0]) for row in order.samples(BATCH, BATCH).rows]
    assert sorted(seen) == sorted(texts[n : n + GROUP] for n in range(0, BATCH, GROUP))


def test_every_worker_needs_a_group() -> None:
    source, order = WindowSource([], 0), GlobalOrder([9], seed=0)
    with pytest.raises(ConfigError, match="a group of 4 rows for each of 3 workers, got 8"):
        RankBatches(source, order, 8, 100, 0, 3, 4)
