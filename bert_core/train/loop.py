"""The training loop for pretraining and fine-tuning, on one process or many.

A step takes a rank's micro-batches of one global batch; `train.backward` computes its gradient.
Batches, reports and checkpoints are up to the caller.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bert_core.batches import prefetched, row_lengths
from bert_core.data.order import part_of_rank
from bert_core.data.windows import Window
from bert_core.errors import RaybertError
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.torch_scores import scores_of
from bert_core.train.backward import added, backward, parts_of
from bert_core.train.config import LoopConfig
from bert_core.train.joint import joint_parts, local_parts, whole_losses
from bert_core.train.parallel import (
    from_rank_0,
    gathered,
    is_part,
    is_sharded,
    joined_over_ranks,
    rank_of_world,
    replicated,
    sum_over_ranks,
)
from bert_core.train.sparse import sparse_gradients

_WAY_OUT = "train into another output with a lower lr or a longer warmup"


class DivergedError(RaybertError):
    """The gradient is not finite, or the loss has risen too far."""


class Rise:
    """Detects a rising loss: a spike from which training does not recover."""

    POINTS = 20

    def __init__(self, most: float, before: Iterable[float] = ()) -> None:
        """Set the limit. No error is raised before half of the points exist.

        Args:
            most: how far a loss may exceed the median of the previous points; 0 disables the check.
            before: losses of the run's previous points.
        """
        self._most = most
        self._losses: deque[float] = deque(before, maxlen=self.POINTS)

    @property
    def losses(self) -> list[float]:
        """Return the points that the next one is compared with."""
        return list(self._losses)

    def check(self, step: int, loss: float) -> None:
        """Compare a loss with the previous points, then add it to them.

        Raises: DivergedError if the loss exceeds their median by too much.
        """
        median = statistics.median(self._losses) if len(self._losses) >= self.POINTS // 2 else loss
        if self._most and loss > median + self._most:
            raise DivergedError(
                f"step {step}: the loss rose to {loss:.3f}, more than max_loss_rise = "
                f"{self._most:g} above {median:.3f}, the median of the previous "
                f"{len(self._losses)} points: {_WAY_OUT}, or raise max_loss_rise"
            )
        self._losses.append(loss)


@dataclass(frozen=True)
class Step:
    """One optimizer step. Sums and counts are of this rank; `Totals` adds those of all ranks."""

    index: int
    """Number of steps done, including this one."""
    last: bool
    elapsed_s: float
    """Seconds of training so far, including work between steps; rank 0's if `max_hours` is set."""
    learning_rate: float
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    seconds: float
    waited_s: float
    """Seconds of `seconds` spent waiting for a batch."""
    tokens: int
    """Real tokens of this rank."""
    padded_tokens: int
    """Tokens of this rank, padding included."""
    flops: int
    """Floating-point operations of the step, forward and backward (`model.size.training_flops`)."""
    loss_sums: dict[str, Tensor]
    correct: dict[str, Tensor]
    counts: dict[str, int]
    divisors: dict[str, float]
    """What the loss sums are divided by: the counts, or sums of weights."""


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
    """Train from step `start` to the end set by `config`, yielding after every step.

    Args:
        batches: this rank's micro-batches, at least one, for every step from `start` on.
        learning_rate: as a function of the progress in steps, from 0 (`LoopConfig.place`).
        max_grad_norm: maximum L2 norm of the whole gradient; 0 disables clipping.
        elapsed_s: seconds of training before `start`.
    Raises: DivergedError if the gradient is not finite; weights are not updated then.
    """
    for encoder in model.encoders:
        encoder.checkpointing = config.activation_checkpointing
        if config.compile:
            encoder.compile()
    trained = replicated(model)
    weights = list(model.parameters())  # collected once, since this is slow
    on_gpu = weights[0].device.type == "cuda"
    model.train()
    zero = time.perf_counter() - elapsed_s
    place = config.place(start, elapsed_s)
    if place >= config.max_steps:
        return
    by_rows = not (on_gpu or config.compile or is_sharded(model))
    with (
        # A batch that shares a loss may be large.
        closing(prefetched(batches, steps=1 if model.joint else 2, pin_memory=on_gpu)) as ahead,
        sparse_gradients(model, on=by_rows) as sparse,
    ):
        began = time.perf_counter()
        for index, micro_batches in enumerate(ahead, start):
            waited_s = time.perf_counter() - began
            lr = learning_rate(place)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_scale", 1.0)
            optimizer.zero_grad(set_to_none=True)
            model.begin_step(place / config.max_steps)
            sums = backward(trained, micro_batches, index, config)
            sparse.gather()
            grad_norm = _clipped(weights, max_grad_norm)
            if not math.isfinite(grad_norm):
                raise DivergedError(
                    f"step {index + 1}: wanted a finite gradient, got norm {grad_norm}: {_WAY_OUT}"
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
                loss_sums=sums.losses,
                correct=sums.correct,
                counts=sums.counts,
                divisors=sums.divisors,
            )
            if place >= config.max_steps:
                return
            began = time.perf_counter()


def _clipped(weights: Sequence[Tensor], most: float) -> float:
    """Clip the whole gradient to norm `most`, in place; return the norm before.

    Unlike torch's clipping, this does not multiply by 1 if the norm is smaller, which would be one
    more pass over all gradients.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm: Any = nn.utils.get_total_norm([_row_norms(gradient) for gradient in gradients])
    whole = float(norm.full_tensor() if is_part(norm) else norm)
    if 0 < most < whole:
        nn.utils.clip_grads_with_norm_(weights, most, norm)
    return whole


def _row_norms(gradient: Tensor) -> Tensor:
    """Return a tensor with the same norm as `gradient`: on a CPU, a matrix's row norms, whose
    computation, unlike that of a single norm, uses all cores; elsewhere the gradient itself."""
    if gradient.is_sparse:
        gradient = gradient.values()
    if gradient.is_cuda or gradient.ndim < 2 or is_part(gradient):
        return gradient
    return torch.linalg.vector_norm(gradient, dim=-1)


class Totals:
    """Metrics of many steps, or of an evaluation: sums over all ranks, then means."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """Start with no metrics.

        Args:
            weights: weight of each part in `loss`; 1 for parts not listed.
        """
        self._weights = weights or {}
        self._sums: dict[str, float] = {}

    def add(self, name: str, value: float | Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def add_step(self, step: Step) -> None:
        for name in ("tokens", "padded_tokens", "flops", "waited_s"):
            self.add(name, getattr(step, name))
        for name, count in step.counts.items():
            self.add(f"{name}/count", count)
            self.add(f"{name}/divisor", step.divisors[name])
            self.add(f"{name}/loss_sum", step.loss_sums[name])
            if name in step.correct:
                self.add(f"{name}/correct", step.correct[name])

    def means(self) -> dict[str, float]:
        """Return the loss and accuracy of each part, sums of tokens and the like, and `loss`, the
        weighted sum that is minimised.

        Collective: every rank calls it, having added the same names.
        """
        names = sorted(self._sums)
        values = [self._sums[name] for name in names]
        summed = sum_over_ranks(torch.tensor(values, dtype=torch.float64))
        sums = dict(zip(names, summed.tolist(), strict=True))
        means = {name: value for name, value in sums.items() if "/" not in name} | {"loss": 0.0}
        for part in [name.removesuffix("/count") for name in names if name.endswith("/count")]:
            means[f"{part}_loss"] = sums[f"{part}/loss_sum"] / (sums[f"{part}/divisor"] or 1.0)
            if f"{part}/correct" in sums:
                count = max(1.0, sums[f"{part}/count"])
                means[f"{part}_accuracy"] = sums[f"{part}/correct"] / count
            means["loss"] += self._weights.get(part, 1.0) * means[f"{part}_loss"]
        return means


@torch.no_grad()
def evaluate(
    model: ObjectiveModel, batches: Iterable[list[Batch]], config: LoopConfig
) -> dict[str, float]:
    """Return the loss and accuracy of each part over all ranks' batches, dropout off.
    Collective."""
    device = next(model.parameters()).device
    totals = Totals(model.weights)
    for name, chooses in model.chooses.items():
        for key in ("count", "divisor", "loss_sum", *(["correct"] if chooses else [])):
            totals.add(f"{name}/{key}", 0.0)  # for ranks without rows
    model.eval()
    with gathered(model):
        for micro_batches in batches:
            every = [parts_of(model, batch, device, config) for batch in micro_batches]
            whole = whole_losses([joint_parts(parts) for parts in every])
            for name, divisor in added(map(model.divisors, micro_batches)).items():
                totals.add(f"{name}/divisor", divisor)
            for parts in [*map(local_parts, every), whole]:
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
    *,
    most_tokens: int,
    packed_from: float = 1.0,
) -> list[np.ndarray]:
    """Return `scores.scores_of` of all windows, as `raybert evaluate` computes it: in fp32,
    whatever the precision of the steps. Each window is computed by a single rank, dropout off.
    Collective."""
    part = part_of_rank(len(windows), *rank_of_world())
    model.eval()
    with gathered(model):
        scores = scores_of(
            model,
            windows[part.start : part.stop],
            pad_id,
            packed_from=packed_from,
            most_tokens=most_tokens,
        )
    model.train()
    return joined_over_ranks(scores)
