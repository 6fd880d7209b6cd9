"""The one training loop, for pretraining and fine-tuning, on one process or many.

A step takes a rank's micro-batches of one global batch. Parts of the loss come as sums; here alone
they are divided, by the counts of the whole global batch, so that the gradient depends on neither
the number of workers nor the micro-batch. Where batches come from, what is reported and what is
kept is for the caller.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bert_core.batches import prefetched, row_lengths
from bert_core.data.order import part_of_rank
from bert_core.data.windows import Window
from bert_core.errors import RaybertError
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.scores import scores_of
from bert_core.train.config import LoopConfig
from bert_core.train.parallel import (
    from_rank_0,
    gathered,
    joined_over_ranks,
    rank_of_world,
    replicated,
    sum_gradients,
    sum_over_ranks,
)
from bert_core.train.sparse import sparse_gradients

_WAY_OUT = "train into another output with a lower optimizer.lr or longer schedule.warmup_steps"


class DivergedError(RaybertError):
    """The loss is no longer a number, or has left where it was."""


class Rise:
    """Whether a loss has left where it was: a spike that training does not come back from."""

    POINTS = 20

    def __init__(self, most: float, before: Iterable[float] = ()) -> None:
        """Nothing is said before half of the points are there.

        Args:
            most: how far above the median of the points before a loss may be; 0 is any.
            before: losses of the points that the run has behind it.
        """
        self._most = most
        self._losses: deque[float] = deque(before, maxlen=self.POINTS)

    @property
    def losses(self) -> list[float]:
        """The points that the next one is held against."""
        return list(self._losses)

    def check(self, step: int, loss: float) -> None:
        """Raises: DivergedError."""
        usual = statistics.median(self._losses) if len(self._losses) >= self.POINTS // 2 else loss
        if self._most and loss > usual + self._most:
            raise DivergedError(
                f"step {step}: the loss rose to {loss:.3f}, where the median of the "
                f"{len(self._losses)} points before is {usual:.3f}, more than max_loss_rise = "
                f"{self._most:g} above it: {_WAY_OUT}, or raise max_loss_rise"
            )
        self._losses.append(loss)


@dataclass(frozen=True)
class Step:
    """One optimizer step. Sums and counts are this rank's own; `Totals` adds all ranks'."""

    index: int
    """Steps done, this one included."""
    last: bool
    elapsed_s: float
    """Seconds of training so far, with what was done between steps; rank 0's where hours end it."""
    learning_rate: float
    grad_norm: float
    """L2 norm of the whole gradient before it is scaled down."""
    seconds: float
    waited_s: float
    """Seconds of these for which there was no batch."""
    tokens: int
    """Real tokens of this rank."""
    padded_tokens: int
    """The same with padding."""
    flops: int
    """What they take to compute, forward and backward (`model.size.training_flops`)."""
    loss_sums: dict[str, Tensor]
    correct: dict[str, Tensor]
    counts: dict[str, int]


def training_steps(
    model: ObjectiveModel,
    batches: Iterable[list[Batch]],
    optimizer: torch.optim.Optimizer,
    learning_rate: Callable[[float], float],
    config: LoopConfig,
    *,
    max_grad_norm: float = 0.0,
    start: int = 0,
    elapsed_s: float = 0.0,
) -> Generator[Step]:
    """Train from step `start` to the end that `config` sets, and yield after every step.

    Args:
        batches: for every step from `start` on, this rank's micro-batches; at least one.
        learning_rate: of a step, counted from 0, or of the place in the run that hours give.
        max_grad_norm: the whole gradient is scaled down to this L2 norm; 0 leaves it as it is.
        elapsed_s: seconds that the run has behind it at `start`.
    Raises: DivergedError if the gradient is not finite; that step is not taken.
    """
    for encoder in model.encoders:
        encoder.checkpointing = config.activation_checkpointing
        if config.compile:
            encoder.compile()
    trained = replicated(model)
    weights = list(model.parameters())  # to look for them takes a while
    on_gpu = weights[0].device.type == "cuda"
    model.train()
    zero = time.perf_counter() - elapsed_s
    place = config.place(start, elapsed_s)
    if place >= config.max_steps:
        return
    by_rows = not (on_gpu or config.compile or isinstance(model, FSDPModule))
    with (
        closing(prefetched(batches, pin_memory=on_gpu)) as ahead,
        sparse_gradients(model, on=by_rows) as sparse,
    ):
        began = time.perf_counter()
        for index, micro_batches in enumerate(ahead, start):
            waited_s = time.perf_counter() - began
            lr = learning_rate(place)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            optimizer.zero_grad(set_to_none=True)
            loss_sums, correct, counts = _backward(trained, micro_batches, index, config)
            sparse.gather()
            grad_norm = _clipped(weights, max_grad_norm)
            if not math.isfinite(grad_norm):
                raise DivergedError(
                    f"step {index + 1}: wanted a finite gradient, its norm is {grad_norm}: "
                    f"{_WAY_OUT}"
                )
            sparse.spread()
            optimizer.step()
            lengths = np.concatenate([row_lengths(batch) for batch in micro_batches])
            elapsed_s = time.perf_counter() - zero
            if config.max_hours is not None:
                elapsed_s = from_rank_0(elapsed_s)
            place = config.place(index + 1, elapsed_s)
            yield Step(
                index=index + 1,
                last=place >= config.max_steps,
                elapsed_s=elapsed_s,
                learning_rate=lr,
                grad_norm=grad_norm,
                seconds=time.perf_counter() - began,
                waited_s=waited_s,
                tokens=int(lengths.sum()),
                padded_tokens=sum(batch["input_ids"].numel() for batch in micro_batches),
                flops=sum(model.flops(batch, row_lengths(batch)) for batch in micro_batches),
                loss_sums=loss_sums,
                correct=correct,
                counts=counts,
            )
            if place >= config.max_steps:
                return
            began = time.perf_counter()


def _clipped(weights: Sequence[Tensor], most: float) -> float:
    """The norm of the whole gradient, which is scaled down to `most` where it is above; not by 1,
    as torch's own clipping does it, which is one more pass over all gradients."""
    gradients = [one.grad for one in weights if one.grad is not None]
    norm = nn.utils.get_total_norm([_row_norms(one) for one in gradients])
    whole = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if 0 < most < whole:
        nn.utils.clip_grads_with_norm_(weights, most, norm)
    return whole


def _row_norms(gradient: Tensor) -> Tensor:
    """What has the norm of `gradient`: on a CPU those of a matrix's rows, which all cores take, as
    they do not take one norm; elsewhere itself."""
    if gradient.is_sparse:
        gradient = gradient.values()
    if gradient.is_cuda or gradient.ndim < 2 or isinstance(gradient, DTensor):
        return gradient
    return torch.linalg.vector_norm(gradient, dim=-1)


def _backward(
    model: nn.Module,
    micro_batches: list[Batch],
    index: int,
    config: LoopConfig,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """Leave the global batch's gradient in the parameters; this rank's loss sums, number of items
    that were right, and number of items, by part."""
    rank, world_size = rank_of_world()
    own: Any = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(model.parameters()).device
    counts = _sum_counts([own.counts(batch) for batch in micro_batches])
    global_counts = dict(
        zip(counts, sum_over_ranks(torch.tensor(list(counts.values()))).tolist(), strict=True)
    )
    loss_sums: dict[str, Tensor] = {}
    correct: dict[str, Tensor] = {}
    for number, micro_batch in enumerate(micro_batches):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in micro_batch.items()}
        # Dropout depends on where the run is, not on what ran before: a resumed run draws what an
        # undisturbed one draws, and no generator's state has to be kept.
        torch.manual_seed(_dropout_seed(config.seed, index, rank, number))
        last = number == len(micro_batches) - 1
        with sum_gradients(model, now=last):
            with autocast(device, config):
                parts = model(batch)
            # NOTE: gradients are averaged over ranks, we want the sum.
            loss = sum(
                part.sum * (own.weights.get(name, 1.0) * world_size / max(1, global_counts[name]))
                for name, part in parts.items()
            )
            loss.backward()
        for name, part in parts.items():
            loss_sums[name] = loss_sums.get(name, 0) + part.sum.detach()
            if part.correct is not None:
                correct[name] = correct.get(name, 0) + part.correct
    return loss_sums, correct, counts


class Totals:
    """What is reported of many steps, or of an evaluation: sums over all ranks, then means."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: how much each part counts in `loss`; 1 where it is not named."""
        self._weights = weights or {}
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_step(self, step: Step) -> None:
        for name in ("tokens", "padded_tokens", "flops", "waited_s"):
            self.add(name, getattr(step, name))
        for name, count in step.counts.items():
            self.add(f"{name}/count", count)
            self.add(f"{name}/loss_sum", step.loss_sums[name])
            if name in step.correct:
                self.add(f"{name}/correct", step.correct[name])

    def means(self) -> dict[str, float]:
        """Loss and accuracy of each part, tokens, and `loss`, what is minimised: their sum by
        `weights`.

        Collective: every rank calls it, with the same names added.
        """
        names = sorted(self._sums)
        values = [self._sums[name] for name in names]
        summed = sum_over_ranks(torch.tensor(values, dtype=torch.float64))
        sums = dict(zip(names, summed.tolist(), strict=True))
        means = {name: value for name, value in sums.items() if "/" not in name} | {"loss": 0.0}
        for part in [name.removesuffix("/count") for name in names if name.endswith("/count")]:
            count = max(1.0, sums[f"{part}/count"])
            means[f"{part}_loss"] = sums[f"{part}/loss_sum"] / count
            if f"{part}/correct" in sums:
                means[f"{part}_accuracy"] = sums[f"{part}/correct"] / count
            means["loss"] += self._weights.get(part, 1.0) * means[f"{part}_loss"]
        return means


@torch.no_grad()
def evaluate(
    model: ObjectiveModel, batches: Iterable[list[Batch]], config: LoopConfig
) -> dict[str, float]:
    """Loss and accuracy of each part over all ranks' batches, dropout off. Collective."""
    device = next(model.parameters()).device
    totals = Totals(model.weights)
    for name, chooses in model.chooses.items():
        for key in ("count", "loss_sum", *(["correct"] if chooses else [])):
            totals.add(f"{name}/{key}", 0.0)  # for a rank without rows
    model.eval()
    with gathered(model):
        for micro_batches in batches:
            for batch in micro_batches:
                with autocast(device, config):
                    parts = model({key: value.to(device) for key, value in batch.items()})
                for name, part in parts.items():
                    totals.add(f"{name}/count", part.count)
                    totals.add(f"{name}/loss_sum", part.sum)
                    if part.correct is not None:
                        totals.add(f"{name}/correct", part.correct)
    model.train()
    return totals.means()


def evaluation_scores(
    model: ObjectiveModel,
    windows: Sequence[Window],
    pad_id: int,
    config: LoopConfig,
    *,
    most_tokens: int,
    packed_from: float = 1.0,
) -> list[np.ndarray]:
    """`scores.scores_of` of all windows, each computed by one rank, dropout off. Collective."""
    part = part_of_rank(len(windows), *rank_of_world())
    device = next(model.parameters()).device
    model.eval()
    with gathered(model), autocast(device, config):
        own = scores_of(
            model,
            windows[part.start : part.stop],
            pad_id,
            packed_from=packed_from,
            most_tokens=most_tokens,
        )
    model.train()
    return joined_over_ranks(own)


def autocast(device: torch.device, config: LoopConfig) -> AbstractContextManager:
    """bfloat16 matrix products where the config asks for them."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")


def _sum_counts(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in counts[0]}


def _dropout_seed(seed: int, step: int, rank: int, micro_batch: int) -> int:
    # 2^61 - 1 is prime; distinct multipliers keep (step, rank, micro-batch) apart.
    mixed = seed * 1_000_003 + step * 7_368_787 + rank * 15_485_863 + micro_batch * 32_452_843
    return mixed % (2**61 - 1)
