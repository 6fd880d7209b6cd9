"""Does the work of one training worker, on Ray Train (`ray_worker`) or in this process.

The file is ordered by the flow: place, data, model, then steps with their reports and checkpoints.
"""

import json
import logging
import math
import socket
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch

from bert_core import files
from bert_core.batches import PhasedBatches, RankBatches
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.errors import ResourceError
from bert_core.objectives.base import ObjectiveModel
from bert_core.train.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Progress,
    best_checkpoint,
    checkpoint_at,
    latest_checkpoint,
    load_optimizer,
    load_weights,
    read_points,
    read_progress,
)
from bert_core.train.clock import Clock
from bert_core.train.config import LoopConfig, OptimizerConfig
from bert_core.train.hardware import (
    keep_freed_memory,
    make_deterministic,
    peak_flops,
    peak_memory_bytes,
)
from bert_core.train.loop import DivergedError, Rise, Step, Totals, training_steps
from bert_core.train.optim import build_optimizer
from bert_core.train.parallel import from_rank_0, rank_of_world, shard
from bert_core.wording import first_line
from pipelines.runtime.description import STARTED
from pipelines.training.config import TrainingConfig
from pipelines.training.records import (
    CHECKPOINTS,
    Notice,
    Records,
    Report,
    StoppedError,
)
from tracking.runs import metric_names as names
from tracking.runs.goodput import clock_metrics
from tracking.runs.metric_names import LOSS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankPlace:
    """The rank of this process, the number of workers, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def here(cls, threads: int) -> "RankPlace":
        """Return this process's place, and make torch compute the same bits every time on CPU.

        Args:
            threads: CPU threads of torch.
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        make_deterministic(device)
        return cls(*rank_of_world(), device)


def check_storage(output: str, rank: int) -> None:
    """Check before the first step, not at the first checkpoint, that checkpoints can be written.

    Raises: ResourceError if this node cannot write to `output`, or does not see what the driver
        wrote there.
    """
    check_shared(output)
    probe = files.join(output, CHECKPOINTS, f"probe-{rank}")
    files.write_bytes(probe, b"")
    files.remove(probe)


def check_shared(output: str) -> None:
    """Raise ResourceError if this node does not see what the driver wrote to `output`."""
    if not files.exists(files.join(output, STARTED)):
        raise ResourceError(
            f"{output}: wanted a place that all nodes share, {socket.gethostname()} does not see "
            "what the driver wrote there: give a folder that is mounted on all nodes, or a URI"
        )


def check_agreement(checkpoints: str, step: int) -> None:
    """Check that this rank resumes from the same step as rank 0. Collective.

    Raises: ResourceError if its newest checkpoint is another one.
    """
    expected = round(from_rank_0(step))
    if step != expected:
        raise ResourceError(
            f"{checkpoints}: wanted the checkpoint after step {expected}, from which rank 0 "
            f"resumes, {socket.gethostname()} finds step {step} as the newest: give a folder that "
            "all nodes share, or a URI"
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model to train, with everything that `train` needs."""

    config: TrainingConfig
    place: RankPlace
    model: ObjectiveModel
    batches: RankBatches | PhasedBatches
    measure: Callable[[ObjectiveModel], dict[str, float]] | None
    """Metrics of a model on rows that it is not trained on; None to measure nothing during
    training. Collective."""
    measured_as: str = HELD_OUT
    """Name of these rows."""
    measure_before: bool = True
    """Whether to measure the untrained model too."""
    measure_every_steps: int = 0
    """Steps between measurements, each with a checkpoint; the last step always has one."""
    cost: Callable[[dict[str, float]], float] = itemgetter(LOSS)
    """The cost of these metrics; the model with the lowest is the best."""
    patience: int = 0
    """Stop after this many measurements in a row without improvement; 0 disables."""
    optimizer: OptimizerConfig
    learning_rate: Callable[[float], float]
    """Learning rate of a step, counted from 0."""
    loop: LoopConfig
    digest: str
    checkpoints: str
    clock: Clock = field(default_factory=Clock)
    """This worker's; a stage that trains several models has one for all."""
    carried: Checkpoint | None = None
    """Another run's checkpoint of these weights, with whose optimizer the first step begins; None
    for a fresh one."""
    first_record: int = 0
    """Added to the step of every record, for a stage that trains several models in turn."""


def train(training: Training, report: Report) -> None:
    """Train to the end, from the newest checkpoint or from the beginning.

    Raises: StoppedError, when the last checkpoint of a run that is to stop is written.
    """
    config, model, clock = training.config, training.model, training.clock
    clock.switch("starting")
    start = started(training)
    rise = Rise(config.max_loss_rise, start.before.losses)
    measurements = Measurements(training, start.before.costs)
    points = Points(report, training.first_record, start.recorded)
    if training.measure_before and not start.step:
        points.add(0, measurements.take(model))
    interval, steps = Interval(training, start.step), start.steps(training)
    writer = CheckpointWriter(
        training.checkpoints, run_digest=training.digest, keep=config.keep_checkpoints
    )
    # Exited in reverse: pending writes finish before `explained` names the newest checkpoint.
    with explained(training.checkpoints), writer, closing(steps):
        clock.switch("computing")
        for step in () if measurements.enough else steps:
            interval.add(step)
            due = due_after(step, training)
            last, checkpointing, cost = step.last, due.checkpoint, None
            notice: Notice = "nothing"
            if due.point:
                numbers = interval.numbers(step)
                points.add(step.index, numbers)
                with points.reported_if_diverged():
                    rise.check(step.index, _unweighted(numbers))
                if due.measurement and training.measure is not None:
                    numbers |= measurements.take(model)
                    last, cost = last or measurements.enough, measurements.costs[-1]
                interval = Interval(training, step.index)
                # Before the checkpoint, so that a run resumed from it has all points of the curve.
                if checkpointing or from_rank_0(points.waited_s >= config.report_every_s):
                    notice = points.report(last=False)
                    checkpointing |= notice != "nothing"
            if checkpointing:
                progress = Progress(rise.losses, measurements.costs, step.elapsed_s)
                with clock.during("checkpointing"):
                    writer.save(step.index, model, start.optimizer, cost, progress, points.so_far())
            if notice == "stop":
                writer.wait()
                raise StoppedError
            if last:
                break
        with clock.during("checkpointing"):
            writer.wait()
    points.add(interval.after, time_spent(clock))
    points.report(last=True)


@dataclass(frozen=True)
class Start:
    """The step that training begins at, with the model and optimizer already in that state."""

    step: int
    """The number of steps that were done before."""
    optimizer: torch.optim.Optimizer
    before: Progress
    recorded: Records
    """Points of the curves until here; empty on all ranks but 0, whose points are recorded."""

    def steps(self, training: Training) -> Generator[Step]:
        """Yield the steps from here to the last."""
        return training_steps(
            training.model,
            training.batches.from_step(self.step),
            self.optimizer,
            training.learning_rate,
            training.loop,
            max_grad_norm=training.optimizer.max_grad_norm,
            start=self.step,
            elapsed_s=self.before.elapsed_s,
        )


def started(training: Training) -> Start:
    """Bring the model to the newest checkpoint, if there is one, and to its device. Collective."""
    place, model = training.place, training.model
    checkpoint = latest_checkpoint(training.checkpoints)
    step = checkpoint.step if checkpoint else 0
    check_agreement(training.checkpoints, step)
    if checkpoint is not None:
        load_weights(checkpoint, model, run_digest=training.digest)
    model.to(place.device)
    if training.config.fsdp and place.world_size > 1:
        shard(model)
    optimizer = build_optimizer(model, training.optimizer, training.loop.precision)
    if checkpoint is None:
        if training.carried is not None:
            load_optimizer(training.carried, optimizer, run_digest=None)
        return Start(0, optimizer, Progress(), [])
    load_optimizer(checkpoint, optimizer, run_digest=training.digest)
    recorded = [] if place.rank else read_points(checkpoint)
    return Start(step, optimizer, read_progress(checkpoint), recorded)


@dataclass(frozen=True)
class Due:
    """Actions that are due after a step."""

    measurement: bool
    checkpoint: bool
    point: bool
    """Whether the curves get a point; measurements and checkpoints come with one."""


def due_after(step: Step, training: Training) -> Due:
    """Return the actions due after a step; after the last step they are all due."""
    config = training.config
    measurement = step.last or _is_due(step.index, training.measure_every_steps)
    checkpoint = measurement or _is_due(step.index, config.checkpoint_every_steps)
    return Due(measurement, checkpoint, checkpoint or _is_due(step.index, config.log_every_steps))


class Interval:
    """Gathers the numbers of the steps since the last point of the curves."""

    def __init__(self, training: Training, after: int) -> None:
        """Start gathering.

        Args:
            after: the step of the last point.
        """
        self._training, self.after = training, after
        self._totals, self._since = Totals(training.model.weights), time.monotonic()

    def add(self, step: Step) -> None:
        self._totals.add_step(step)

    def numbers(self, step: Step) -> dict[str, float]:
        """Return the next point, given the last step before it. Collective."""
        means, place = self._totals.means(), self._training.place
        numbers = _numbers(step, means, time.monotonic() - self._since, place)
        waited_s = means["waited_s"] / place.world_size
        return numbers | time_spent(self._training.clock, step.index - self.after, waited_s)


class Points:
    """Points of the curves on their way to the run's record.

    NOTE: a report returns before it is recorded, and is lost if the controller dies in between. The
    record is lost with its machine, except for what was copied. So each checkpoint stores all
    points, and a resumed run reports them again; the controller drops those already recorded.
    """

    def __init__(self, report: Report, first_record: int, before: Records) -> None:
        """Start with the points of an earlier start.

        Args:
            first_record: the record step that step 0 has.
            before: the points in the checkpoint that the run resumes from.
        """
        self._report, self._first_record = report, first_record
        self._waiting, self._new = list(before), list(before)
        self._lines = bytearray()
        self._reported = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Return the seconds since the last report."""
        return time.monotonic() - self._reported

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """Add a point; its numbers may be completed until the next report."""
        point = self._first_record + step, numbers
        self._waiting.append(point)
        self._new.append(point)

    def report(self, *, last: bool) -> Notice:
        """Report the points since the last report; return what `Report` returns. Collective."""
        waiting, self._waiting = self._waiting, []
        self._reported = time.monotonic()
        return self._report(waiting, last)

    @contextmanager
    def reported_if_diverged(self) -> Iterator[None]:
        """If the block diverges, report the points before training ends, so that the curve shows
        why."""
        try:
            yield
        except DivergedError:
            self.report(last=True)
            raise

    def so_far(self) -> bytes:
        """Return all points, to store with the checkpoint that is being written."""
        for point in self._new:
            self._lines += json.dumps(point).encode() + b"\n"
        self._new = []
        return bytes(self._lines)


class Measurements:
    """Holds the costs of all measurements of a model, and says whether there have been enough."""

    def __init__(self, training: Training, costs: Sequence[float]) -> None:
        """Start with the costs of an earlier start.

        Args:
            costs: those measured before this start.
        """
        self._training, self.costs = training, list(costs)

    def take(self, model: ObjectiveModel) -> dict[str, float]:
        """Measure the model; return the metrics, named as in the record. Collective."""
        assert self._training.measure is not None
        with self._training.clock.during("measuring"):
            numbers = self._training.measure(model)
        self.costs.append(self._training.cost(numbers))
        return _named(self._training.measured_as, numbers)

    @property
    def enough(self) -> bool:
        """Whether the last `patience` measurements in a row found no better model."""
        patience = self._training.patience
        since_best = len(self.costs) - 1 - int(np.argmin(self.costs)) if self.costs else 0
        return 0 < patience <= since_best


def chosen_checkpoint(checkpoints: str, rank: int) -> Checkpoint:
    """Return the best checkpoint, or the newest if none was measured, as rank 0 sees it.
    Collective."""
    chosen = None if rank else best_checkpoint(checkpoints) or latest_checkpoint(checkpoints)
    return checkpoint_at(checkpoints, round(from_rank_0(chosen.step if chosen else 0)))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _numbers(
    step: Step, means: dict[str, float], elapsed_s: float, place: RankPlace
) -> dict[str, float]:
    """Return a point of the curves: means since the last point, over all workers."""
    flops_per_s = means["flops"] / elapsed_s
    peak = peak_flops(place.device)
    return {
        **names.on_all(TRAIN, {k: v for k, v in means.items() if k not in _OF_A_STEP}),
        names.LOSS: means[LOSS],
        names.ELAPSED_S: step.elapsed_s,
        names.WORKERS: place.world_size,
        names.LEARNING_RATE: step.learning_rate,
        names.GRAD_NORM: step.grad_norm,
        names.TOKENS: means["tokens"],
        names.TOKENS_PER_S: means["tokens"] / elapsed_s,
        names.TFLOPS_PER_S: flops_per_s / 1e12,
        **({names.MFU: flops_per_s / (peak * place.world_size)} if peak else {}),
        names.PADDING_SHARE: 1 - means["tokens"] / means["padded_tokens"],
        names.DATA_WAIT_SHARE: means["waited_s"] / (elapsed_s * place.world_size),
        names.MEMORY_GB: peak_memory_bytes(place.device) / 1e9,
    }


def time_spent(clock: Clock, steps: int = 0, waited_s: float = 0.0) -> dict[str, float]:
    """Return the numbers of a point that say where the time since the last point went.

    Args:
        steps: steps done in that time.
        waited_s: how long a worker waited for data in that time, on average.
    """
    spent_s = clock.take()
    computed_s = spent_s.get(names.COMPUTING, 0.0)
    waited_s = min(waited_s, computed_s)
    spent_s |= {names.COMPUTING: computed_s - waited_s, names.WAITING_FOR_DATA: waited_s}
    return clock_metrics(clock.began_s, clock.taken, steps, spent_s)


def _unweighted(numbers: dict[str, float]) -> float:
    """Return the sum of the parts' losses without weights: with a weight of 50, noise would look
    like a rise."""
    return sum(value for name, value in numbers.items() if name.endswith("_loss"))


_OF_A_STEP = {"tokens", "padded_tokens", "flops", "waited_s"}


@contextmanager
def explained(checkpoints: str) -> Iterator[None]:
    """Add to an error that ends training what the user can do about it.

    Raises: DivergedError naming the newest of `checkpoints`; ResourceError if memory ran out.
    """
    try:
        yield
    except RuntimeError as error:
        reason = first_line(str(error))
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in reason:
            raise
        raise ResourceError(
            f"training: wanted more memory than there is ({reason}): lower micro_batch_tokens, "
            "which does not change gradients, or pretrain with loop.activation_checkpointing"
        ) from error
    except DivergedError as error:
        checkpoint = latest_checkpoint(checkpoints)
        whole = f"{checkpoint.folder} has the weights" if checkpoint else "there is no checkpoint"
        after = f" after step {checkpoint.step}" if checkpoint else " yet"
        raise DivergedError(f"{error}; {whole}{after}") from error


def _named(prefix: str, means: dict[str, float]) -> dict[str, float]:
    named = names.on_all(prefix, means)
    if names.MLM_LOSS in means:
        named[names.on(prefix, names.PERPLEXITY)] = math.exp(min(means[names.MLM_LOSS], 700.0))
    return named
