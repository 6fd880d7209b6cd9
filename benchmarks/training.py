"""Our training loop as benchmarks run it: in this process, without Ray, from the first step."""

from collections.abc import Iterator

from bert_core.batches import RankBatches
from bert_core.objectives.base import ObjectiveModel
from bert_core.train.config import LoopConfig, OptimizerConfig, ScheduleConfig
from bert_core.train.loop import Step, training_steps
from bert_core.train.optim import build_optimizer


def steps_of(
    model: ObjectiveModel,
    batches: RankBatches,
    loop: LoopConfig,
    optimizer: OptimizerConfig,
    *,
    warmup_steps: int,
) -> Iterator[Step]:
    """Train a model, a step at a time."""
    schedule = ScheduleConfig(warmup_steps=warmup_steps)
    return training_steps(
        model,
        batches.from_step(0),
        build_optimizer(model, optimizer),
        schedule.learning_rate(optimizer.lr, loop.max_steps),
        loop,
        max_grad_norm=optimizer.max_grad_norm,
    )
