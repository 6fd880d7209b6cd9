"""The one training loop, for pretraining and fine-tuning, on one process or many.

A step takes a rank's micro-batches of one global batch. Parts of the loss come as sums; here alone
they are divided, by the counts of the whole global batch, so that the gradient depends on neither
the number of workers nor the micro-batch. Where batches come from, what is reported and what is
kept is for the caller.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bert_core.batches import token_count
from bert_core.errors import RaybertError
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig


class DivergedError(RaybertError):
    """The loss is no longer a number; weights are those before the step that diverged."""


@dataclass(frozen=True)
class Step:
    """One optimizer step. Sums and counts are this rank's own; `Totals` adds all ranks'."""

    index: int
    """Steps done, this one included."""
    learning_rate: float
    grad_norm: float
    """L2 norm of the whole gradient before it is scaled down."""
    seconds: float
    tokens: int
    """Real tokens of this rank."""
    loss_sums: dict[str, Tensor]
    correct: dict[str, Tensor]
    counts: dict[str, int]


def training_steps(
    model: ObjectiveModel,
    batches: Iterable[list[Batch]],
    optimizer: torch.optim.Optimizer,
    schedule: ScheduleConfig,
    config: LoopConfig,
    optimizer_config: OptimizerConfig,
    *,
    start: int = 0,
) -> Iterator[Step]:
    """Train from step `start` to `config.max_steps`, and yield after every step.

    Args:
        batches: for every step from `start` on, this rank's micro-batches; at least one.
    Raises: DivergedError if the gradient is not finite; that step is not taken.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    trained = DistributedDataParallel(model) if world_size > 1 else model
    device = next(model.parameters()).device
    model.train()
    for index, micro_batches in zip(range(start, config.max_steps), batches, strict=False):
        began = time.perf_counter()
        learning_rate = optimizer_config.lr * schedule.factor(index, config.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad(set_to_none=True)
        micro_batches = [
            {key: value.to(device, non_blocking=True) for key, value in batch.items()}
            for batch in micro_batches
        ]
        counts = _sum_counts([model.counts(batch) for batch in micro_batches])
        global_counts = dict(
            zip(counts, sum_over_ranks(torch.tensor(list(counts.values()))).tolist(), strict=True)
        )
        loss_sums: dict[str, Tensor] = {}
        correct: dict[str, Tensor] = {}
        for number, batch in enumerate(micro_batches):
            # Dropout depends on where the run is, not on what ran before: a resumed run draws
            # what an undisturbed one draws, and no generator's state has to be kept.
            torch.manual_seed(_dropout_seed(config.seed, index, rank, number))
            last = number == len(micro_batches) - 1
            with _sync_only(trained, last):
                with autocast(device, config):
                    parts = trained(batch)
                # NOTE: DistributedDataParallel averages gradients over ranks, we want the sum.
                loss = sum(
                    part.sum * (world_size / max(1, global_counts[name]))
                    for name, part in parts.items()
                )
                loss.backward()
            for name, part in parts.items():
                loss_sums[name] = loss_sums.get(name, 0) + part.sum.detach()
                correct[name] = correct.get(name, 0) + part.correct
        limit = optimizer_config.max_grad_norm or float("inf")
        grad_norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        if grad_norm != grad_norm or grad_norm == float("inf"):
            raise DivergedError(
                f"step {index + 1}: wanted a finite gradient, its norm is {grad_norm}: "
                "lower optimizer.lr or lengthen schedule.warmup_steps; "
                "the checkpoints written so far are whole"
            )
        optimizer.step()
        yield Step(
            index=index + 1,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            seconds=time.perf_counter() - began,
            tokens=sum(token_count(batch) for batch in micro_batches),
            loss_sums=loss_sums,
            correct=correct,
            counts=counts,
        )


class Totals:
    """What is reported of many steps, or of an evaluation: sums over all ranks, then means."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_step(self, step: Step) -> None:
        self.add("tokens", step.tokens)
        for name, count in step.counts.items():
            self.add(f"{name}/count", count)
            self.add(f"{name}/loss_sum", step.loss_sums[name])
            self.add(f"{name}/correct", step.correct[name])

    def means(self) -> dict[str, float]:
        """Loss and accuracy of each part, tokens, and `loss` (the parts' losses added).

        Collective: every rank calls it, with the same names added.
        """
        names = sorted(self._sums)
        values = [self._sums[name] for name in names]
        summed = sum_over_ranks(torch.tensor(values, dtype=torch.float64))
        sums = dict(zip(names, summed.tolist(), strict=True))
        means = {"tokens": sums.get("tokens", 0.0), "loss": 0.0}
        for part in [name.removesuffix("/count") for name in names if name.endswith("/count")]:
            count = max(1.0, sums[f"{part}/count"])
            means[f"{part}_loss"] = sums[f"{part}/loss_sum"] / count
            means[f"{part}_accuracy"] = sums[f"{part}/correct"] / count
            means["loss"] += means[f"{part}_loss"]
        return means


@torch.no_grad()
def evaluate(
    model: ObjectiveModel, batches: Iterable[list[Batch]], config: LoopConfig
) -> dict[str, float]:
    """Loss and accuracy of each part over all ranks' batches, dropout off. Collective."""
    device = next(model.parameters()).device
    totals = Totals()
    for name in list(model.objectives):
        for key in ("count", "loss_sum", "correct"):
            totals.add(f"{name}/{key}", 0.0)
    model.eval()
    for micro_batches in batches:
        for batch in micro_batches:
            with autocast(device, config):
                parts = model({key: value.to(device) for key, value in batch.items()})
            for name, part in parts.items():
                totals.add(f"{name}/count", part.count)
                totals.add(f"{name}/loss_sum", part.sum)
                totals.add(f"{name}/correct", part.correct)
    model.train()
    return totals.means()


def autocast(device: torch.device, config: LoopConfig) -> AbstractContextManager:
    """bfloat16 matrix products where the config asks for them."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def _sync_only(model: nn.Module, last: bool) -> AbstractContextManager:
    """Let gradients cross the network at the last micro-batch only."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def _sum_counts(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in counts[0]}


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` of all ranks added, on every rank. Collective; the same `values` for one rank."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return values
    summed = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(summed)
    return summed.cpu()


def _dropout_seed(seed: int, step: int, rank: int, micro_batch: int) -> int:
    # 2^61 - 1 is prime; distinct multipliers keep (step, rank, micro-batch) apart.
    mixed = seed * 1_000_003 + step * 7_368_787 + rank * 15_485_863 + micro_batch * 32_452_843
    return mixed % (2**61 - 1)
