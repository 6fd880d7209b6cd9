"""The loop: a gradient that nothing but the global batch decides, and a resume that is exact."""

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bert_core.batches import RankBatches, ShardSource, row_lengths
from bert_core.data.order import GlobalOrder
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import ShardRows
from bert_core.model.config import EncoderConfig, FeedForwardConfig
from bert_core.model.size import training_flops
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.catalog import PRETRAINING
from bert_core.objectives.class_loss import ClassLoss
from bert_core.objectives.classification import Classification
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.sentence_pairs import NextSentencePrediction
from bert_core.scores import Precision
from bert_core.train.checkpoint import (
    CheckpointWriter,
    latest_checkpoint,
    load_optimizer,
    load_weights,
)
from bert_core.train.config import (
    Algorithm,
    LoopConfig,
    OptimizerConfig,
    ScheduleConfig,
)
from bert_core.train.loop import DivergedError, Rise, Step, Totals, evaluate, training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.parallel import from_rank_0, rank_of_world, shard
from bert_core.train.sparse import sparse_gradients
from tests import tiny
from tests.ranks import on_ranks

VOCABULARY, GLOBAL_BATCH, LONGEST = 60, 13, 32
CONFIG = tiny.encoder_config(VOCABULARY, hidden_size=32, dropout=0.0)
DEBERTA = replace(
    VARIANTS["deberta-v3-tiny"].config,
    hidden_size=32,
    initializer_range=0.2,
    feed_forward=FeedForwardConfig(intermediate_size=64),
).adapted(vocab_size=VOCABULARY, pad_token_id=0, hidden_dropout_prob=0.0, attention_dropout=0.0)
DROPOUT = CONFIG.adapted(hidden_dropout_prob=0.1, attention_dropout=0.1)
OPTIMIZER = OptimizerConfig(lr=1e-3)
SCHEDULE = ScheduleConfig(warmup_steps=3)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices are tiny here: more threads would wait for each other and nothing else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shard_of(count: int) -> ShardRows:
    """Rows of unlike lengths with unlike numbers of masked positions, some with none."""
    rng = np.random.default_rng(0)
    lengths, picks = rng.integers(6, 32, count), rng.integers(0, 6, count)
    positions = [np.sort(rng.permutation(n)[:k]) for n, k in zip(lengths, picks, strict=True)]
    return ShardRows(
        input_ids=rng.integers(1, VOCABULARY, lengths.sum()),
        offsets=offsets_of(lengths),
        segment_b_start=lengths // 2,
        labels={"next_sentence_label": rng.integers(0, 2, count).astype(np.uint8)},
        masked_positions=np.concatenate(positions),
        masked_labels=rng.integers(1, VOCABULARY, picks.sum()),
        masked_offsets=offsets_of(picks),
    )


SHARD = shard_of(30)


def batches(micro: int, rank: int = 0, world_size: int = 1) -> RankBatches:
    """In micro-batches of as many tokens as `micro` rows of the greatest length have."""
    source = ShardSource(lambda _: SHARD, pad_id=0)
    order = GlobalOrder([len(SHARD)], seed=0)
    return RankBatches(source, order, GLOBAL_BATCH, micro * LONGEST, rank, world_size)


def model_of(config: EncoderConfig = CONFIG, seed: int = 0) -> ObjectiveModel:
    return tiny.model(config, MaskedLanguageModeling, NextSentencePrediction, seed=seed)


class WeightedClasses(Classification):
    """Of whose two classes one counts fifteen times the other."""

    label_key = "next_sentence_label"
    loss = ClassLoss(weights=(0.2, 3.0), label_smoothing=0.1)


def model_that_minimises(names: str) -> ObjectiveModel:
    kinds = PRETRAINING | {"weighted": partial(WeightedClasses, num_labels=2)}
    return tiny.model(DEBERTA, *(kinds[name] for name in names.split()))


def train(
    model: ObjectiveModel,
    steps: Iterator[list[Batch]],
    loop: LoopConfig,
    *,
    optimizer: OptimizerConfig = OPTIMIZER,
    schedule: ScheduleConfig = SCHEDULE,
) -> list[Step]:
    return list(
        training_steps(
            model,
            steps,
            build_optimizer(model, optimizer),
            schedule.learning_rate(optimizer.lr, loop.max_steps),
            loop,
            max_grad_norm=optimizer.max_grad_norm,
        )
    )


def gradient(model: ObjectiveModel) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat([whole(each).flatten() for each in gradients if each is not None])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_of(
    dtype: torch.dtype,
    micro: int,
    rank: int = 0,
    world_size: int = 1,
    sharded: bool = False,
    objective: str | None = None,
) -> tuple[Tensor, Step]:
    """The gradient of the first global batch, as rank `rank` of `world_size` sees it."""
    model = (model_that_minimises(objective) if objective else model_of()).to(dtype)
    if sharded:
        shard(model)
    [step] = train(
        model,
        batches(micro, rank, world_size).from_step(0),
        LoopConfig(max_steps=1, precision="fp32"),
        optimizer=replace(OPTIMIZER, max_grad_norm=0.0),
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == gradient(model).numel()
    return gradient(model), step


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def found_by_rank(folder: Path) -> dict[str, Any]:
    """What one of several processes computes."""
    rank, world_size = rank_of_world()
    found: dict[str, Any] = {
        f"{objective}{dtype}{' sharded' if sharded else ''}": gradient_of(
            dtype, micro, rank, world_size, sharded, objective
        )[0]
        for objective in OBJECTIVES
        for dtype, micro in [(torch.float64, 3), (torch.float32, 4)]
        for sharded in (False, True)
    }
    assert from_rank_0(rank + 5.5) == 5.5
    for name in ALGORITHMS:
        of_one, own = folder / f"one {name}", folder / f"sharded {name}"
        found[name], found[f"{name} evaluated"] = sharded_training(name, of_one, own)
    return found


ALGORITHMS: list[Algorithm] = ["adamw", "stable_adamw", "lamb"]
# The last layer serves the first of two twice more, beside its own output, which the second reads.
OBJECTIVES = [None, "emd_mlm nsp", "rtd", "weighted"]


def part_of_training(
    name: Algorithm, steps: range, came_from: Path, sharded: bool = False
) -> tuple[ObjectiveModel, torch.optim.Optimizer]:
    """Train in fp64, from the checkpoint in `came_from` where the first step is not 0."""
    model = model_of(seed=steps.start).double()
    checkpoint = latest_checkpoint(str(came_from)) if steps.start else None
    if checkpoint is not None:
        load_weights(checkpoint, model, run_digest="run")
    if sharded:
        shard(model)
    optimizer = build_optimizer(model, replace(OPTIMIZER, name=name))
    if checkpoint is not None:
        load_optimizer(checkpoint, optimizer, run_digest="run")
    rank, world_size = rank_of_world()
    done = training_steps(
        model,
        batches(3, rank, world_size).from_step(steps.start),
        optimizer,
        SCHEDULE.learning_rate(OPTIMIZER.lr, 10),
        LoopConfig(max_steps=steps.stop, precision="fp32"),
        max_grad_norm=0.1,
        start=steps.start,
    )
    assert [step.index for step in done] == [index + 1 for index in steps]
    return model, optimizer


def sharded_training(name: Algorithm, of_one: Path, own: Path) -> tuple[dict, dict]:
    """Weights of a run that one process began and several went on with, and what they measure; a
    checkpoint of theirs is left in `own`."""
    model, optimizer = part_of_training(name, range(3, 6), of_one, sharded=True)
    with CheckpointWriter(str(own), run_digest="run") as writer:
        writer.save(6, model, optimizer, 1.0)
        writer.wait()
    rank, world_size = rank_of_world()
    rows = batches(GLOBAL_BATCH, rank, world_size)
    # 14 rows are a batch and one row more, which one rank alone has.
    assert [len(each) > 0 for each in rows.once(14)] == [True, rank == 0]
    measured = evaluate(model, rows.once(14), LoopConfig(max_steps=1, precision="fp32"))
    return {key: whole(value) for key, value in model.state_dict().items()}, measured


@pytest.mark.guard
def test_the_number_of_workers_does_not_change_the_gradient(tmp_path: Path) -> None:
    # 13 rows do not divide evenly: ranks have unlike numbers of micro-batches, each padded to
    # another width than in one process. Of NSP's two rows of weights, one rank has none.
    world_size = 3
    for name in ALGORITHMS:
        model, optimizer = part_of_training(name, range(3), tmp_path)
        with CheckpointWriter(str(tmp_path / f"one {name}"), run_digest="run") as writer:
            writer.save(3, model, optimizer)
    alone = {
        (objective, dtype): gradient_of(dtype, GLOBAL_BATCH, objective=objective)[0]
        for objective in OBJECTIVES
        for dtype, _ in PRECISIONS
    }
    ranks = on_ranks(world_size, partial(found_by_rank, tmp_path), tmp_path)
    for objective, dtype, kind in itertools.product(OBJECTIVES, PRECISIONS, ("", " sharded")):
        case = f"{objective}{dtype[0]}{kind}"
        for rank in ranks[1:]:
            assert torch.equal(ranks[0][case], rank[case])
        assert relative_error(ranks[0][case], alone[objective, dtype[0]]) < dtype[1], case
    for name in ALGORITHMS:
        check_sharded_training(name, tmp_path, ranks[0], world_size)


def check_sharded_training(name: Algorithm, folder: Path, found: Any, world_size: int) -> None:
    """One process ends with the weights that several end with, and goes on from theirs."""
    six, _ = part_of_training(name, range(3, 6), folder / f"one {name}")
    loop = LoopConfig(max_steps=1, precision="fp32")
    measured = evaluate(six, batches(GLOBAL_BATCH).once(14), loop)
    assert found[f"{name} evaluated"] == pytest.approx(measured, rel=1e-9)
    for key, value in six.state_dict().items():
        torch.testing.assert_close(found[name][key], value, rtol=1e-9, atol=1e-12)
    [written] = (folder / f"sharded {name}").iterdir()
    parts = [f"{n + 1:05d}-of-{world_size:05d}.safetensors" for n in range(world_size)]
    assert sorted(path.name for path in written.iterdir()) == [
        "checkpoint.json",
        *(f"{kind}-{part}" for kind in ("model", "optimizer") for part in parts),
    ]
    eight, _ = part_of_training(name, range(6, 8), folder / f"sharded {name}")
    with CheckpointWriter(str(folder / f"again {name}"), run_digest="run") as writer:
        writer.save(6, six, part_of_training(name, range(3, 6), folder / f"one {name}")[1])
    same, _ = part_of_training(name, range(6, 8), folder / f"again {name}")
    for key, value in same.state_dict().items():
        torch.testing.assert_close(eight.state_dict()[key], value, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("micro", [0, 1, 5, 12])
@pytest.mark.parametrize(("dtype", "most"), PRECISIONS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_micro_batch_does_not_change_the_gradient(
    micro: int, dtype: torch.dtype, most: float, objective: str | None
) -> None:
    whole, _ = gradient_of(dtype, GLOBAL_BATCH, objective=objective)
    assert relative_error(gradient_of(dtype, micro, objective=objective)[0], whole) < most


@pytest.mark.drill
def test_hours_end_training_where_they_are_shorter_and_the_schedule_runs_along_them() -> None:
    loop = LoopConfig(max_steps=10_000, max_hours=1.0, precision="fp32")
    assert [loop.place(5000, 0.0), loop.place(5000, 900.0), loop.place(10, 1800.0)] == [5000] * 3
    short = replace(loop, max_hours=1.0 / 3600)
    steps = train(model_of(), batches(5).from_step(0), short)
    assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-2].elapsed_s < 1 <= steps[-1].elapsed_s
    for before, step in pairwise(steps):
        rate = OPTIMIZER.lr * SCHEDULE.factor(before.elapsed_s * 10_000, 10_000)
        assert step.learning_rate == pytest.approx(rate)
    model = model_of()
    optimizer = build_optimizer(model, OPTIMIZER)
    late = training_steps(
        model, batches(5).from_step(7), optimizer, lambda _: 1.0, short, start=7, elapsed_s=1.0
    )
    assert list(late) == [], "resumed after its end"


def test_layers_that_are_computed_again_give_the_same_gradient_with_dropout_on() -> None:
    found = []
    for again in (False, True):
        model = model_of(DROPOUT)
        loop = LoopConfig(max_steps=2, precision="fp32", activation_checkpointing=again)
        train(model, batches(5).from_step(0), loop)
        found.append(gradient(model))
    assert torch.equal(*found)


@pytest.mark.drill
def test_a_compiled_encoder_gives_the_same_gradient() -> None:
    # In a process of its own, since the checks of types here are no code that compiles.
    code = "from test_loop import compiled_and_not; print(compiled_and_not())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}:{Path(__file__).parent}"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1e-5


def compiled_and_not() -> float:
    found = []
    for compiled in (False, True):
        model = model_of()
        names = list(model.state_dict())
        loop = LoopConfig(max_steps=3, precision="fp32", compile=compiled)
        train(model, batches(5).from_step(0), loop)
        assert list(model.state_dict()) == names, "a checkpoint must not tell whether it was"
        found.append(gradient(model))
    return relative_error(*found)


def test_the_gradient_is_that_of_the_mean_losses_of_the_global_batch() -> None:
    model = model_of().double()
    [batch] = next(batches(GLOBAL_BATCH).from_step(0))
    parts = model(batch)
    sum(part.sum / part.count for part in parts.values()).backward()
    ours, step = gradient_of(torch.float64, 4)
    assert relative_error(ours, gradient(model)) < 1e-12
    assert step.counts == {"mlm": len(batch["mlm_labels"]), "nsp": GLOBAL_BATCH}
    assert step.grad_norm == pytest.approx(float(gradient(model).norm()))
    for name, part in parts.items():
        assert float(step.loss_sums[name]) == pytest.approx(float(part.sum.detach()))
        assert int(step.correct[name]) == int(part.correct)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_ends_with_the_same_bits_with_dropout_on(
    precision: Precision, tmp_path: Path
) -> None:
    loop = LoopConfig(max_steps=6, precision=precision)

    def start(seed: int) -> tuple[ObjectiveModel, torch.optim.Optimizer]:
        model = model_of(DROPOUT, seed)
        return model, build_optimizer(model, OPTIMIZER)

    def go_on(model: ObjectiveModel, optimizer: torch.optim.Optimizer, step: int) -> Iterator[Step]:
        steps = batches(5).from_step(step)  # epochs end in the middle of steps 3 and 5
        rate = SCHEDULE.learning_rate(OPTIMIZER.lr, loop.max_steps)
        return training_steps(model, steps, optimizer, rate, loop, max_grad_norm=1.0, start=step)

    whole, its_optimizer = start(seed=0)
    losses = [float(step.loss_sums["mlm"].sum()) for step in go_on(whole, its_optimizer, 0)]

    killed, optimizer = start(seed=0)
    for step in go_on(killed, optimizer, 0):
        if step.index == 4:
            break
    with CheckpointWriter(str(tmp_path), run_digest="run") as writer:
        writer.save(4, killed, optimizer)
    checkpoint = latest_checkpoint(str(tmp_path))
    assert checkpoint is not None

    torch.manual_seed(123)  # what the generators hold does not matter
    resumed, optimizer = start(seed=9)
    load_weights(checkpoint, resumed, run_digest="run")
    load_optimizer(checkpoint, optimizer, run_digest="run")
    steps = list(go_on(resumed, optimizer, 4))
    assert [step.index for step in steps] == [5, 6]
    assert [float(step.loss_sums["mlm"].sum()) for step in steps] == losses[4:]
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    kept, expected = optimizer.state_dict()["state"], its_optimizer.state_dict()["state"]
    for index, values in expected.items():
        assert all(torch.equal(kept[index][key], values[key]) for key in values)


def test_dropout_differs_between_steps_micro_batches_and_seeds() -> None:
    def losses(seed: int) -> list[float]:
        model = model_of(DROPOUT)
        [batch] = next(batches(GLOBAL_BATCH).from_step(0))
        loop = LoopConfig(max_steps=2, precision="fp32", seed=seed)
        frozen = replace(OPTIMIZER, lr=1e-30)
        steps = train(model, iter([[batch, batch]] * 2), loop, optimizer=frozen)
        one = train(model, iter([[batch]] * 2), loop, optimizer=frozen)
        return [float(step.loss_sums["mlm"]) for step in [*steps, *one]]

    first, second, first_alone, _ = losses(seed=0)
    assert first != second
    assert first != pytest.approx(2 * first_alone, rel=1e-6)  # the second micro-batch differs
    assert losses(seed=0) == losses(seed=0)
    assert losses(seed=1)[0] != first


def test_earlier_work_in_the_process_changes_nothing() -> None:
    loop = LoopConfig(max_steps=2, precision="fp32")
    weights = []
    for noise in (0, 5):
        model = model_of(DROPOUT)
        torch.rand(noise)
        train(model, batches(4).from_step(0), loop)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_every_step_has_its_own_learning_rate_and_counts() -> None:
    model = model_of()
    loop = LoopConfig(max_steps=6, precision="fp32")
    steps = train(model, batches(8).from_step(0), loop)
    assert [step.index for step in steps] == [1, 2, 3, 4, 5, 6]
    expected = [OPTIMIZER.lr * SCHEDULE.factor(step, 6) for step in range(6)]
    assert [step.learning_rate for step in steps] == expected
    order = GlobalOrder([len(SHARD)], seed=0)
    for number, step in enumerate(steps):
        rows = order.samples(number * GLOBAL_BATCH, GLOBAL_BATCH).rows.tolist()
        assert step.tokens == sum(SHARD.length(row) for row in rows)
        masked = sum(len(SHARD.row(row).masked_labels) for row in rows)
        assert step.counts == {"mlm": masked, "nsp": GLOBAL_BATCH}
        assert step.seconds > 0


def test_training_learns() -> None:
    model = model_of()
    [batch] = next(batches(GLOBAL_BATCH).from_step(0))
    loop = LoopConfig(max_steps=40, precision="fp32")
    steps = train(model, iter([[batch]] * 40), loop, optimizer=replace(OPTIMIZER, lr=1e-2))
    losses = [float(step.loss_sums["mlm"]) / step.counts["mlm"] for step in steps]
    assert losses[-1] < 0.2 * losses[0]


def test_a_long_gradient_is_scaled_to_its_limit_and_a_short_one_is_left() -> None:
    norms = {}
    for limit in (0.0, 0.05, 1e6):
        model = model_of()
        loop = LoopConfig(max_steps=1, precision="fp32")
        settings = replace(OPTIMIZER, max_grad_norm=limit)
        [step] = train(model, batches(8).from_step(0), loop, optimizer=settings)
        norms[limit] = (step.grad_norm, float(gradient(model).norm()))
    before, _ = norms[0.0]
    assert before > 0.05
    assert norms[0.05] == pytest.approx((before, 0.05), rel=1e-4)
    assert norms[0.0] == norms[1e6] == pytest.approx((before, before), rel=1e-5)


@pytest.mark.parametrize("limit", [0.0, 0.05])
@pytest.mark.parametrize("name", ["mlm", "nsp"])  # one reads word embeddings whole as well
def test_gradients_of_the_rows_that_were_read_train_as_those_of_all(
    name: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for on in (True, False):
        monkeypatch.setattr(
            "bert_core.train.loop.sparse_gradients",
            lambda model, *, on, allowed=on: sparse_gradients(model, on=on and allowed),
        )
        model = tiny.model(CONFIG, PRETRAINING[name]).double()
        words = model.encoder.embeddings.word_embeddings
        by_rows: list[bool] = []
        words.weight.register_post_accumulate_grad_hook(
            lambda weight, by_rows=by_rows: by_rows.append(weight.grad.is_sparse)
        )
        steps = train(
            model,
            batches(4).from_step(0),  # several micro-batches a step
            LoopConfig(max_steps=4, precision="fp32"),
            optimizer=replace(OPTIMIZER, max_grad_norm=limit),
        )
        assert by_rows
        assert set(by_rows) == {on and name == "nsp"}
        assert not words.sparse
        found.append((gradient(model), [step.grad_norm for step in steps], model.state_dict()))
    (mine, norms, state), (theirs, others, wanted) = found
    assert relative_error(mine, theirs) < 1e-12
    assert norms == pytest.approx(others, rel=1e-12)
    for key, weight in wanted.items():
        torch.testing.assert_close(state[key], weight, atol=1e-12, rtol=0, msg=key)


def test_a_part_without_items_does_not_count() -> None:
    model = model_of()
    [batch] = next(batches(GLOBAL_BATCH).from_step(0))
    nothing = {key: batch[key][:0] for key in ("mlm_positions", "mlm_labels")}
    [step] = train(model, iter([[batch | nothing]]), LoopConfig(max_steps=1, precision="fp32"))
    assert step.counts == {"mlm": 0, "nsp": GLOBAL_BATCH}
    assert float(step.loss_sums["mlm"]) == 0
    assert np.isfinite(step.grad_norm)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_run_that_diverges_stops_before_the_step(poison: float) -> None:
    torch.manual_seed(0)
    model = ObjectiveModel(CONFIG, [Classification(CONFIG, 2)])
    last_word = VOCABULARY - 1
    with torch.no_grad():
        model.encoder.embeddings.word_embeddings.weight[last_word] = poison
    good = {
        "input_ids": torch.arange(1, 17).reshape(2, 8),
        "token_type_ids": torch.zeros(2, 8, dtype=torch.int64),
        "labels": torch.tensor([0, 1]),
    }
    bad = good | {"input_ids": torch.full((2, 8), last_word)}
    optimizer = build_optimizer(model, OPTIMIZER)
    loop = LoopConfig(max_steps=9, precision="fp32")
    made = iter([[good], [good, good], [good, bad]])
    steps = training_steps(model, made, optimizer, lambda step: 1e-3, loop, max_grad_norm=1.0)
    assert [next(steps).index, next(steps).index] == [1, 2]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        DivergedError,
        match=r"step 3: wanted a finite gradient, got norm nan: train into another output with "
        r"a lower lr or a longer warmup",
    ):
        next(steps)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_loss_that_jumps_from_its_level_is_a_divergence() -> None:
    rise = Rise(2.0)
    for step, loss in enumerate([10.0, 13.0, 8.0, 7.0, 6.0, 6.5, 5.0, 5.5, 5.0, 4.0, 5.0, 7.7]):
        rise.check(step, loss)  # the first points wander
    message = r"the loss rose to 8\.500, .* above 6\.250, the median of the previous 12 points"
    with pytest.raises(DivergedError, match=message):
        rise.check(12, 8.5)
    never = Rise(0.0)
    for step, loss in enumerate([1.0] * 30 + [1e9]):
        never.check(step, loss)


def test_an_evaluation_is_the_mean_over_every_row_without_dropout() -> None:
    model = model_of(DROPOUT)
    loop = LoopConfig(max_steps=1, precision="fp32")
    found = evaluate(model, batches(4).once(), loop)
    assert model.training
    again = evaluate(model, batches(GLOBAL_BATCH).once(), loop)
    assert found == pytest.approx(again, rel=1e-5)
    model.eval()
    rows = list(batches(8).once())
    parts = [model(batch) for micro_batches in rows for batch in micro_batches]
    expected = {"loss": 0.0}
    for name in ("mlm", "nsp"):
        count = sum(part[name].count for part in parts)
        expected[f"{name}_loss"] = sum(float(part[name].sum.detach()) for part in parts) / count
        expected[f"{name}_accuracy"] = sum(int(part[name].correct) for part in parts) / count
        expected["loss"] += expected[f"{name}_loss"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_evaluation_of_nothing_is_zero_not_an_error() -> None:
    means = evaluate(model_of(), iter([]), LoopConfig(max_steps=1))
    assert means["mlm_loss"] == means["nsp_accuracy"] == means["loss"] == 0.0


def test_a_step_knows_its_padding_its_work_and_how_long_it_waited() -> None:
    def slow() -> Iterator[list[Batch]]:
        for made in batches(5).from_step(0):
            time.sleep(0.05)
            yield made

    steps = train(model_of(), slow(), LoopConfig(max_steps=6, precision="fp32"))
    for step, made in zip(steps, batches(5).from_step(0), strict=False):
        lengths = np.concatenate([row_lengths(batch) for batch in made])
        assert step.tokens == lengths.sum()
        assert step.padded_tokens == sum(batch["input_ids"].numel() for batch in made)
        predictions = sum(len(batch["mlm_labels"]) for batch in made)
        one_by_one = sum(training_flops(CONFIG, lengths[i : i + 1]) for i in range(len(lengths)))
        head = 6 * predictions * 32 * (32 + VOCABULARY)
        # What no loss reads stops after the last attention.
        unread = step.tokens - predictions - len(lengths)
        width, inner = CONFIG.hidden_size, CONFIG.feed_forward.intermediate_size
        after = width * (width + 2 * inner)
        assert step.flops == one_by_one + head - 6 * unread * after
        assert 0 <= step.waited_s < step.seconds
    assert steps[0].waited_s > 0.03


def test_totals_of_steps_are_means_over_items_not_over_steps() -> None:
    totals = Totals({"mlm": 2.0})
    for count, loss in [(1, 10.0), (3, 2.0)]:
        totals.add_step(
            Step(
                index=1,
                last=False,
                elapsed_s=1.0,
                learning_rate=0.1,
                grad_norm=1.0,
                seconds=1.0,
                waited_s=0.25,
                tokens=5,
                padded_tokens=8,
                flops=100,
                loss_sums={"mlm": torch.tensor(loss)},
                correct={"mlm": torch.tensor(count - 1)},
                counts={"mlm": count},
                divisors={"mlm": float(count)},
            )
        )
    summed = {"tokens": 10, "padded_tokens": 16, "flops": 200, "waited_s": 0.5}
    assert totals.means() == summed | {"mlm_loss": 3.0, "mlm_accuracy": 0.5, "loss": 6.0}
