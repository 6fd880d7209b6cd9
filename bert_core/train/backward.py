"""The gradient of a global batch, from a rank's micro-batches.

Loss parts are sums; only this module divides them, by the counts of the whole global batch, so that
the gradient depends on neither the number of workers nor the micro-batch size.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_core.objectives.base import Batch, JointPart, LossPart, ObjectiveModel
from bert_core.train.config import LoopConfig
from bert_core.train.joint import Parts, joint_losses, joint_parts, local_parts
from bert_core.train.parallel import rank_of_world, sum_gradients, sum_over_ranks

GRAPH_KEPT_UP_TO = 8
"""Micro-batches of a rank up to which the last one's graph is kept while a joint loss is computed,
which saves a forward pass. Of more, that pass is a small share, and the loss needs the memory."""


@dataclass(frozen=True)
class Sums:
    """Sums of one step over this rank's micro-batches, by part."""

    counts: dict[str, int]
    divisors: dict[str, float]
    losses: dict[str, Tensor] = field(default_factory=dict)
    correct: dict[str, Tensor] = field(default_factory=dict)

    def add(self, parts: Mapping[str, LossPart]) -> None:
        for name, part in parts.items():
            self.losses[name] = self.losses.get(name, 0) + part.sum.detach()
            if part.correct is not None:
                self.correct[name] = self.correct.get(name, 0) + part.correct


def backward(
    model: nn.Module, micro_batches: Sequence[Batch], index: int, config: LoopConfig
) -> Sums:
    """Compute the gradient of global batch `index` into the parameters. Collective.

    Args:
        model: as `parallel.replicated` returns it.
        micro_batches: this rank's part of the global batch, at least one.
    """
    whole: Any = model.module if isinstance(model, DistributedDataParallel) else model
    passes = _Passes(model, whole, micro_batches, index, rank_of_world()[0], config)
    sums = Sums(added(map(whole.counts, micro_batches)), added(map(whole.divisors, micro_batches)))
    scales = _scales(whole, sums.divisors)
    if whole.joint:
        _add_jointly(sums, passes, scales)
        return sums
    for number in passes.numbers:
        with sum_gradients(model, now=number == passes.numbers[-1]):
            parts = passes.parts(number)
            _loss(parts, scales).backward()
        sums.add(local_parts(parts))
    return sums


def _add_jointly(sums: Sums, passes: "_Passes", scales: Mapping[str, float]) -> None:
    """Compute the gradient of a loss of the whole global batch, and add its parts to `sums`."""
    *others, last = passes.numbers
    is_kept = len(passes.numbers) <= GRAPH_KEPT_UP_TO
    with torch.no_grad():
        vectors = [
            joint_parts(passes.parts(number, passes.whole))
            for number in (others if is_kept else passes.numbers)
        ]
    joint = None if is_kept else joint_losses(vectors)
    order = [last, *others] if is_kept else passes.numbers
    for number in order:
        with sum_gradients(passes.model, now=number == order[-1]):
            parts = passes.parts(number)
            if joint is None:
                joint = joint_losses([*vectors, joint_parts(parts)])
            vectors.clear()
            slopes = {name: loss.slopes[number] for name, loss in joint.items()}
            _loss(parts, scales, slopes).backward()
        sums.add(local_parts(parts))
    assert joint is not None
    sums.add({name: loss.part for name, loss in joint.items()})


@dataclass(frozen=True)
class _Passes:
    """Forward passes of one rank's micro-batches; repeated, a pass draws the same dropout."""

    model: nn.Module
    whole: ObjectiveModel
    micro_batches: Sequence[Batch]
    index: int
    rank: int
    config: LoopConfig

    @property
    def numbers(self) -> range:
        return range(len(self.micro_batches))

    def parts(self, number: int, model: nn.Module | None = None) -> Parts:
        # Dropout depends only on the position in the run, not on what ran before: a resumed run
        # draws what an uninterrupted one draws, and no generator state needs saving.
        torch.manual_seed(_dropout_seed(self.config.seed, self.index, self.rank, number))
        device = next(self.whole.parameters()).device
        return parts_of(model or self.model, self.micro_batches[number], device, self.config)


def parts_of(model: nn.Module, batch: Batch, device: torch.device, config: LoopConfig) -> Parts:
    """Return the loss parts of a batch, which is moved to the model's device."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    with autocast(device, config):
        return model(moved)


def _scales(model: ObjectiveModel, divisors: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each part's sum in the loss. Collective.

    NOTE: gradients are averaged over ranks, but we want the sum.
    """
    _, world_size = rank_of_world()
    own = torch.tensor(list(divisors.values()), dtype=torch.float64)
    whole = dict(zip(divisors, sum_over_ranks(own).tolist(), strict=True))
    return {
        name: model.weights.get(name, 1.0) * world_size / (whole[name] or 1.0) for name in divisors
    }


def _loss(
    parts: Parts, scales: Mapping[str, float], slopes: Mapping[str, Tensor] | None = None
) -> Any:
    """Return what has the gradient of a micro-batch's share of the loss.

    Args:
        slopes: the gradient of each joint part's sum with respect to its vectors.
    """
    return sum(
        (
            (part.vectors[0] * (slopes or {})[name]).sum()
            if isinstance(part, JointPart)
            else part.sum
        )
        * scales[name]
        for name, part in parts.items()
    )


def autocast(device: torch.device, config: LoopConfig) -> AbstractContextManager:
    """Return a context that autocasts to bfloat16 if the config says so."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def added(batches: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the batches' numbers, by name."""
    sums: dict[str, Any] = {}
    for batch in batches:
        for name, number in batch.items():
            sums[name] = sums.get(name, 0) + number
    return sums


def _dropout_seed(seed: int, step: int, rank: int, micro_batch: int) -> int:
    # 2^61 - 1 is prime; distinct multipliers keep (step, rank, micro-batch) apart.
    mixed = seed * 1_000_003 + step * 7_368_787 + rank * 15_485_863 + micro_batch * 32_452_843
    return mixed % (2**61 - 1)
