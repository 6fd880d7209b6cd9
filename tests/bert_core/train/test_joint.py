"""Rows whose loss is of all of them together: nothing but the global batch decides the gradient."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bert_core.batches import RankBatches, WindowSource, collate
from bert_core.data.order import GlobalOrder
from bert_core.errors import ConfigError
from bert_core.objectives.base import ObjectiveModel
from bert_core.objectives.distillation import Distillation
from bert_core.tasks.base import Task
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.sparse_embedding import SparseEmbedding
from bert_core.tasks.text_ranking import TextRanking
from bert_core.train import backward
from bert_core.train.backward import GRAPH_KEPT_UP_TO
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.loop import Step, evaluate, training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.parallel import gathered, is_part, rank_of_world, rows_of_all_ranks, shard
from tests import tiny
from tests.ranks import on_ranks

WORDS = [f"word{number}" for number in range(50)]
TOKENIZER = tiny.tokenizer(WORDS)
CONFIG = tiny.encoder_config(TOKENIZER.vocab_size, dropout=0.0)
WIDE = tiny.encoder_config(TOKENIZER.vocab_size, hidden_size=48, dropout=0.0)
BATCH, ONE_STEP = 13, LoopConfig(max_steps=1, precision="fp32")
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]
KINDS = ["scored", "contrastive", "distilled", "ranked", "sparse", "taught"]
LOSSES_TO = 1e-6
"""How far the losses of equal batches may be apart in fp32, relative to the loss."""


def rows_of(kind: str) -> list[dict]:
    """Rows of unlike lengths, some with negatives; some texts are right for several rows."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(1, 28))) for _ in range(60)]
    if kind == "ranked":
        return [
            {"text": texts[n % 4], "text_pair": texts[n + 30], "score": float(n % 3)}
            for n in range(30)
        ]
    if kind == "scored":
        return [{"text": texts[n], "text_pair": texts[n + 30], "score": n / 6} for n in range(30)]
    if kind == "taught":
        return [
            {
                "text": texts[n],
                "text_pair": texts[n + 1],
                "negatives": texts[n + 2 : n + 3 + n % 3],
                "scores": rng.normal(size=2 + n % 3).tolist(),
            }
            for n in range(30)
        ]
    return [
        {
            "text": texts[n % 25],
            "text_pair": texts[20 + n % 9],
            "negatives": texts[40 : 40 + n % 3],
        }
        for n in range(30)
    ]


def model_of(task: Task, kind: str) -> ObjectiveModel:
    model = tiny.model(CONFIG, task.build_objective)
    if kind != "distilled":
        return model
    teacher = tiny.model(WIDE, task.build_objective, seed=1)
    weights = {"hard": 1.0, "soft": 0.5, "cosine": 0.2}
    return Distillation(model, teacher, weights, temperature=2.0)


def task_of(rows: list[dict], kind: str) -> Task:
    """The task; vectors of the kind that is distilled may be cut, too, and entries of sparse ones
    cost much."""
    if kind == "ranked":
        return TextRanking.from_rows(rows, TextRanking.options(loss="lambda"))
    if kind in ("sparse", "taught"):
        options = SparseEmbedding.options(
            loss="margin_mse" if kind == "taught" else "contrastive",
            query_flops=5.0,
            passage_flops=3.0,
            flops_warmup=0.0,
        )
        return SparseEmbedding.from_rows(rows, options)
    lengths = [20, 8] if kind == "distilled" else []
    return FeatureExtraction.from_rows(rows, FeatureExtraction.options(dimensions=lengths))


def batches_of(task: Task, rows: list[dict], budget: int) -> RankBatches:
    windows = task.encode(rows, TOKENIZER, 32, labelled=True)
    return RankBatches(
        WindowSource(windows, TOKENIZER.pad_id), GlobalOrder([len(windows)], seed=0), BATCH,
        budget, *rank_of_world(), joint=task.joint,
    )  # fmt: skip


def step_of(model: ObjectiveModel, batches: RankBatches, loop: LoopConfig = ONE_STEP) -> Step:
    """The last of the steps that the loop takes."""
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
    *_, step = training_steps(model, batches.from_step(0), optimizer, lambda _: 1e-3, loop)
    return step


def loss_of(step: Step) -> dict[str, float]:
    """The mean of each part over the global batch."""
    names = sorted(step.divisors)
    sums = torch.stack([torch.stack([step.loss_sums[name].double() for name in names])])
    divisors = torch.tensor([[step.divisors[name] for name in names]], dtype=torch.float64)
    means = rows_of_all_ranks(sums).sum(0) / rows_of_all_ranks(divisors).sum(0)
    return dict(zip(names, means.tolist(), strict=True))


def gradient_of(
    dtype: torch.dtype, budget: int, kind: str, *, sharded: bool = False
) -> tuple[Tensor, dict[str, float], dict[str, float]]:
    """The gradient of the first global batch, its loss, and what an evaluation gives."""
    rows = rows_of(kind)
    task = task_of(rows, kind)
    model = model_of(task, kind).to(dtype)
    if sharded:
        shard(model)
    batches = batches_of(task, rows, budget)
    measured = evaluate(model, batches.once(), ONE_STEP)
    loss = loss_of(step_of(model, batches))
    if isinstance(task, SparseEmbedding):
        measured["entries"] = entries_of(model, task)
    return whole_gradient(model), loss, measured


def entries_of(model: ObjectiveModel, task: Task) -> float:
    """The number of entries of all rows' vectors that are not 0."""
    windows = task.encode(rows_of("sparse"), TOKENIZER, 32)
    model.eval()
    with torch.no_grad(), gathered(model):
        vectors = model.logits(collate(windows, TOKENIZER.pad_id))["mlm"]
    return float(vectors.count_nonzero())


def whole_gradient(model: ObjectiveModel) -> Tensor:
    gradients: list[Any] = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    whole = [each.full_tensor() if is_part(each) else each for each in gradients]
    return torch.cat([each.flatten() for each in whole])


def plain_autograd(dtype: torch.dtype, kind: str) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the first global batch and its loss: one forward pass over all rows, and
    torch's backward."""
    rows = rows_of(kind)
    task = task_of(rows, kind)
    model = model_of(task, kind).to(dtype)
    windows = task.encode(rows, TOKENIZER, 32, labelled=True)
    places = GlobalOrder([len(windows)], seed=0).samples(0, BATCH).rows
    batch = collate([windows[place] for place in places], TOKENIZER.pad_id)
    parts = model(batch)
    divisors = model.divisors(batch)
    means = {name: part.sum / divisors[name] for name, part in parts.items()}
    sum(model.weights.get(name, 1.0) * mean for name, mean in means.items()).backward()
    return whole_gradient(model), {name: float(mean.detach()) for name, mean in means.items()}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "most"), PRECISIONS)
def test_any_micro_batch_has_the_gradient_and_the_loss_of_plain_autograd(
    kind: str, dtype: torch.dtype, most: float
) -> None:
    wanted, loss = plain_autograd(dtype, kind)
    assert wanted.norm() > 0.01
    _, _, measured = gradient_of(dtype, 1 << 20, kind)
    for budget in (1, 200, 500, 1 << 20):
        found, step_loss, again = gradient_of(dtype, budget, kind)
        assert relative_error(found, wanted) < most
        assert step_loss == pytest.approx(loss, rel=min(most * 10, LOSSES_TO))
        assert again == pytest.approx(measured, rel=most * 10)


@pytest.mark.guard
@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_workers_changes_neither_gradient_nor_loss(
    workers: int, tmp_path: Path
) -> None:
    alone = [
        (*plain_autograd(dtype, kind), gradient_of(dtype, 1 << 20, kind)[2], most)
        for kind in KINDS
        for dtype, most in PRECISIONS
    ]
    ranks = on_ranks(workers, gradients_of_rank, tmp_path)
    for rank in ranks:
        for (found, loss, measured), (gradient, wanted, whole, most) in zip(
            rank, alone * 2, strict=True
        ):
            assert relative_error(found, gradient) < most
            assert loss == pytest.approx(wanted, rel=min(most * 10, LOSSES_TO))
            assert measured == pytest.approx(whole, rel=most * 10)
    for number in range(len(alone)):
        assert torch.equal(ranks[0][number][0], ranks[1][number][0])


def gradients_of_rank() -> list[tuple[Tensor, dict, dict]]:
    """With a copy of the model on each rank, and with a shard. Rank 0 keeps the graph of its last
    micro-batch, the others have too many for that."""
    backward.GRAPH_KEPT_UP_TO = 0 if rank_of_world()[0] else 100
    return [
        gradient_of(dtype, 300, kind, sharded=sharded)
        for sharded in (False, True)
        for kind in KINDS
        for dtype, _ in PRECISIONS
    ]


def test_a_resumed_run_ends_with_the_same_bits_with_dropout_on() -> None:
    rows = rows_of("contrastive")
    task = FeatureExtraction.from_rows(rows)
    batches = batches_of(task, rows, 200)
    config = tiny.encoder_config(TOKENIZER.vocab_size)

    def trained(*ends: int) -> dict[str, Tensor]:
        """Trained to each step in turn, the weights and the optimizer alone kept between."""
        weights, moments, start = tiny.model(config, task.build_objective).state_dict(), None, 0
        for end in ends:
            model = tiny.model(config, task.build_objective, seed=start + 1)
            model.load_state_dict(weights)
            optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3))
            if moments is not None:
                optimizer.load_state_dict(moments)
            torch.rand(start + 1)  # what else a process does
            loop = LoopConfig(max_steps=end, precision="fp32")
            steps = training_steps(
                model, batches.from_step(start), optimizer, lambda _: 1e-3, loop, start=start
            )
            assert [step.index for step in steps] == [*range(start + 1, end + 1)]
            weights, moments, start = model.state_dict(), optimizer.state_dict(), end
        return weights

    whole, resumed = trained(4), trained(1, 4)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(("budget", "keeps_last"), [(1, False), (400, True)])
def test_both_passes_of_a_micro_batch_draw_the_same_dropout(budget: int, keeps_last: bool) -> None:
    """With another dropout in the second pass, slopes would be those of other vectors. With few
    micro-batches, the last has one pass."""
    rows = rows_of("contrastive")
    task = FeatureExtraction.from_rows(rows)
    seen: list[Tensor] = []
    model = tiny.model(tiny.encoder_config(TOKENIZER.vocab_size), task.build_objective)
    model.encoder.register_forward_hook(lambda *call: seen.append(call[2].hidden.detach()))
    [batch] = list(batches_of(task, rows, budget).once(BATCH))
    assert len(batch) > 1
    assert (len(batch) <= GRAPH_KEPT_UP_TO) == keeps_last
    step_of(model, batches_of(task, rows, budget))
    first, second = seen[: len(batch)], seen[len(batch) :]
    assert len(second) == len(batch) - keeps_last
    assert all(map(torch.equal, first, second))
    assert not any(torch.equal(first[0], other) for other in first[1:])


def test_the_gradient_of_word_embeddings_takes_no_more_memory_with_more_micro_batches() -> None:
    """torch 2.13 concatenates sparse gradients: every row that was ever read would be kept."""
    rows = rows_of("contrastive")
    task = FeatureExtraction.from_rows(rows)
    model, batches = model_of(task, "contrastive"), batches_of(task, rows, 1)
    held: list[int] = []
    weight = model.encoder.embeddings.word_embeddings.weight
    weight.register_post_accumulate_grad_hook(
        lambda weight: held.append(weight.grad._indices().shape[1])
    )
    step_of(model, batches)
    read = [batch["input_ids"].numel() for batch in next(batches.from_step(0))]
    assert sum(read) > 3 * len(weight), "the tokens of the step"
    assert max(held) <= len(weight) + max(read)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_row_of_a_global_batch_knows_its_place_for_any_number_of_workers(
    world_size: int,
) -> None:
    rows = rows_of("contrastive")
    windows = FeatureExtraction.from_rows(rows).encode(rows, TOKENIZER, 32, labelled=True)
    order = GlobalOrder([len(windows)], seed=0)
    source = WindowSource(windows, TOKENIZER.pad_id)
    ranks = [
        RankBatches(source, order, BATCH, 100, rank, world_size, joint=True)
        for rank in range(world_size)
    ]
    seen: dict[int, list[int]] = {}
    for batch in (batch for rank in ranks for batch in next(rank.from_step(1))):
        texts = batch["texts"].split(batch["choices"].tolist())
        seen |= dict(zip(batch["rows"].tolist(), [each.tolist() for each in texts], strict=True))
    wanted = order.samples(BATCH, BATCH).rows
    assert [seen[place] for place in range(BATCH)] == [
        windows[row].labels["texts"].tolist() for row in wanted
    ]
    measured = [len(batches) for rank in ranks for batches in rank.once()]
    assert len(measured) == -(-len(windows) // BATCH), "each batch is measured by one rank"


def test_every_worker_needs_a_row() -> None:
    source, order = WindowSource([], 0), GlobalOrder([9], seed=0)
    with pytest.raises(ConfigError, match="at least a row for each of 3 workers, got 2"):
        RankBatches(source, order, 2, 100, 0, 3)
