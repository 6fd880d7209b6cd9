"""Time and cost of a pretraining run on any number of GPUs.

A step takes what its matrix products take at the measured MFU, what of the all-reduce is not hidden
behind the backward pass, and a fixed time; but no less than it takes every rank to plan the global
batch, or every host to read it. Hosts fail, and what is between two checkpoints is done again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from benchmarks.scaling.failures import Failures, best_interval_s
from benchmarks.scaling.inputs import GPUS_PER_HOST, Values, drawn
from bert_core.model.size import count_parameters, training_flops
from bert_core.model.variants import VARIANTS

GPU_COUNTS = tuple(2**power for power in range(11))
MICRO_BATCH_TOKENS = 32_768
LONGEST_INTERVAL_S = 1_800.0
"""Most seconds between two checkpoints, however rare failures are."""
MASKED, MOST_MASKED = 0.15, {128: 20, 512: 77}
"""Share of a row that is predicted, and most positions, as the recipes' shards have them."""
Limit = Literal["compute", "all-reduce", "fixed", "plan", "reading"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps of a run that are alike."""

    steps: int
    rows: int
    """In a global batch."""
    length: int

    def flops_per_row(self, variant: str, fill: float) -> float:
        """Forward and backward passes over a row that is `fill` full."""
        length = round(self.length * fill)
        masked = min(round(MASKED * length), MOST_MASKED.get(self.length, length))
        return _flops(variant, length, masked)

    def bytes_per_row(self, fill: float) -> float:
        """Of a row with static masks, as `docs/formats.md` has shards."""
        length = self.length * fill
        masked = min(MASKED * length, MOST_MASKED.get(self.length, length))
        return 2 * length + 4 * masked + 2 * 4 + 2 + 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A pretraining run."""

    variant: str
    phases: tuple[Phase, ...]

    @property
    def tokens(self) -> int:
        return sum(phase.steps * phase.rows * phase.length for phase in self.phases)

    def with_batch(self, rows: int) -> "Recipe":
        """The same rows in batches of another size: fewer steps, as LAMB is for."""
        return Recipe(
            variant=self.variant,
            phases=tuple(
                Phase(steps=phase.steps * phase.rows // rows, rows=rows, length=phase.length)
                for phase in self.phases
            ),
        )


RECIPES = {
    # configs/pretrain/bert_base.toml and bert_large_lamb.toml.
    "bert-base": Recipe(
        variant="bert-base",
        phases=(
            Phase(steps=900_000, rows=256, length=128),
            Phase(steps=100_000, rows=256, length=512),
        ),
    ),
    "bert-large": Recipe(
        variant="bert-large",
        phases=(
            Phase(steps=7_038, rows=65_536, length=128),
            Phase(steps=1_563, rows=32_768, length=512),
        ),
    ),
}
MEASURED = Recipe(variant="bert-base", phases=(Phase(steps=1, rows=256, length=457),))
"""What the MFU was measured on."""
RECIPES["bert-base in large batches"] = RECIPES["bert-base"].with_batch(16_384)


@cache
def _flops(variant: str, length: int, masked: int) -> float:
    return float(training_flops(VARIANTS[variant].config, np.array([length]), masked))


def flops_per_s(values: Values) -> float:
    """While a GPU computes, so that with the fixed time the measured step has the measured MFU."""
    layers = VARIANTS[MEASURED.variant].config.num_hidden_layers
    flops = flops_of(MEASURED, 1.0)
    return flops / (flops / (values.peak_flops * values.mfu) - layers * values.fixed_s)


@cache
def weights(variant: str) -> int:
    """Of a BERT with its heads for masked words (decoder tied) and next sentences."""
    config = VARIANTS[variant].config
    hidden, words = config.hidden_size, config.vocab_size
    return count_parameters(config, pooler=True) + hidden**2 + 3 * hidden + words + 2 * hidden + 2


def checkpoint_bytes(variant: str) -> int:
    """Weights and AdamW's two moments, in fp32."""
    return 3 * 4 * weights(variant)


def all_reduce_s(size_bytes: float, gpus: int, values: Values) -> float:
    """A ring within hosts and between them at once, and the hops of each bucket."""
    within, hosts = min(gpus, GPUS_PER_HOST), math.ceil(gpus / GPUS_PER_HOST)
    if gpus == 1:
        return 0.0
    transfer_s = max(
        2 * (within - 1) / within * size_bytes / values.nvlink_bytes_per_s,
        2 * (hosts - 1) / hosts * size_bytes / GPUS_PER_HOST / values.network_bytes_per_s,
    )
    hops = 2 + 2 * math.log2(hosts)
    return transfer_s + math.ceil(size_bytes / values.bucket_bytes) * hops * values.hop_s


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step takes, in seconds. Planning and reading are done meanwhile."""

    compute_s: float
    exposed_s: float
    """Of the all-reduce: what the backward pass does not hide."""
    fixed_s: float
    plan_s: float
    """Every rank looks at the length of every row of the global batch, in a thread."""
    read_s: float
    """Every host reads all rows of the global batch, since any may be one of its own."""

    @property
    def total_s(self) -> float:
        return max(self.compute_s + self.exposed_s + self.fixed_s, self.plan_s, self.read_s)

    @property
    def limit(self) -> Limit:
        """What takes longest."""
        train_s = self.compute_s + self.exposed_s + self.fixed_s
        if max(self.plan_s, self.read_s) > train_s:
            return "plan" if self.plan_s > self.read_s else "reading"
        parts: dict[Limit, float] = {
            "compute": self.compute_s, "all-reduce": self.exposed_s, "fixed": self.fixed_s,
        }  # fmt: skip
        return max(parts, key=lambda name: parts[name])


def step_of(variant: str, phase: Phase, gpus: int, values: Values) -> Step | None:
    """A step on that many GPUs; None if there is not a row for each, which raybert refuses."""
    if phase.rows < gpus:
        return None
    rows = math.ceil(phase.rows / gpus)
    compute_s = rows * phase.flops_per_row(variant, values.fill) / flops_per_s(values)
    micro_batches = math.ceil(rows * phase.length / MICRO_BATCH_TOKENS)
    gradients = weights(variant) * values.gradient_bytes
    config = VARIANTS[variant].config
    # Tied word embeddings are the first layer's and the head's, so their gradient is complete last.
    words = config.vocab_size * config.hidden_size * values.gradient_bytes
    hidden_s = values.overlap * 2 / 3 * compute_s / micro_batches
    return Step(
        compute_s=compute_s,
        exposed_s=max(
            all_reduce_s(gradients, gpus, values) - hidden_s, all_reduce_s(words, gpus, values)
        ),
        fixed_s=config.num_hidden_layers * values.fixed_s,
        plan_s=phase.rows * values.plan_s_per_row,
        read_s=phase.rows * phase.bytes_per_row(values.fill) / values.read_bytes_per_s,
    )


def steps_of(recipe: Recipe, gpus: int, values: Values) -> list[Step] | None:
    """A step of each phase; None if a phase has fewer rows than there are GPUs."""
    steps = [step_of(recipe.variant, phase, gpus, values) for phase in recipe.phases]
    found = [step for step in steps if step is not None]
    return found if len(found) == len(steps) else None


def flops_of(recipe: Recipe, fill: float) -> float:
    """Of the whole run."""
    return sum(
        phase.steps * phase.rows * phase.flops_per_row(recipe.variant, fill)
        for phase in recipe.phases
    )


def training_s(recipe: Recipe, gpus: int, values: Values) -> float:
    """Without starts and failures; infinite if the batch is too small for so many GPUs."""
    steps = steps_of(recipe, gpus, values)
    if steps is None:
        return math.inf
    return sum(phase.steps * step.total_s for phase, step in zip(recipe.phases, steps, strict=True))


def ideal_s(recipe: Recipe, gpus: int, values: Values) -> float:
    """If GPUs did nothing but compute."""
    return flops_of(recipe, values.fill) / (flops_per_s(values) * gpus)


def failures_of(variant: str, gpus: int, values: Values, *, spot: bool) -> Failures:
    """How a run on that many GPUs fails, with the interval of checkpoints that loses least."""
    per_h = gpus / values.failure_gpu_h
    if spot:
        per_h += math.ceil(gpus / GPUS_PER_HOST) / values.spot_host_h
    mean_s = 3_600 / per_h
    size_bytes = checkpoint_bytes(variant)
    pause_s = size_bytes / values.copy_bytes_per_s
    upload_s = size_bytes / values.upload_bytes_per_s
    interval_s = min(LONGEST_INTERVAL_S, max(best_interval_s(mean_s, pause_s), upload_s))
    return Failures(
        mean_s=mean_s,
        interval_s=interval_s,
        pause_s=pause_s,
        upload_s=upload_s,
        restart_s=values.restart_s,
    )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and 90 % interval over draws of the inputs."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, draws: Sequence[float]) -> "Spread":
        low, median, high = np.quantile(draws, (0.05, 0.5, 0.95), method="closest_observation")
        return cls(low=float(low), median=float(median), high=float(high))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A recipe on a number of GPUs."""

    recipe: str
    gpus: int
    hours: Spread
    cost: Spread
    spot_hours: Spread
    spot_cost: Spread
    efficiency: float
    """Ideal time over the time without failures, with likely values."""
    goodput: float
    """By formula, with likely values."""
    spot_goodput: float
    interval_s: float
    """Between checkpoints, with likely values."""
    limit: Limit
    """What most of a step of the longest phase is, with likely values."""


def estimate(name: str, gpus: int, *, seed: int = 0, draws: int = 200) -> Estimate | None:
    """A recipe on a number of GPUs; None if its batch has too few rows for so many."""
    recipe, likely = RECIPES[name], Values()
    steps = steps_of(recipe, gpus, likely)
    if steps is None:
        return None
    rng = np.random.default_rng([seed, gpus])
    hours: dict[bool, list[float]] = {False: [], True: []}
    cost: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(draws):
        values = drawn(rng)
        work_s = training_s(recipe, gpus, values)
        for spot in (False, True):
            failures = failures_of(recipe.variant, gpus, values, spot=spot)
            elapsed_h = failures.simulate(work_s, rng, start_s=values.start_s) / 3_600
            hours[spot].append(elapsed_h)
            cost[spot].append(elapsed_h * gpus * (values.spot_price if spot else values.price))
    usual, on_spot = (
        failures_of(recipe.variant, gpus, likely, spot=spot) for spot in (False, True)
    )
    shares = [phase.steps * step.total_s for phase, step in zip(recipe.phases, steps, strict=True)]
    return Estimate(
        recipe=name,
        gpus=gpus,
        hours=Spread.of(hours[False]),
        cost=Spread.of(cost[False]),
        spot_hours=Spread.of(hours[True]),
        spot_cost=Spread.of(cost[True]),
        efficiency=ideal_s(recipe, gpus, likely) / training_s(recipe, gpus, likely),
        goodput=usual.goodput,
        spot_goodput=on_spot.goodput,
        interval_s=usual.interval_s,
        limit=steps[int(np.argmax(shares))].limit,
    )
