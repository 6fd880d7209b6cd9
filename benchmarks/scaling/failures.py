"""What failures cost: the share of the time that trains, by formula and by simulation.

Failures come at random (a Poisson process). Each costs a restart, and the work since the last
checkpoint that was written whole: checkpoints are copied, which stops training for `pause_s`, and
uploaded in the background, so that one counts only `upload_s` later.
"""

import math
from dataclasses import dataclass

import numpy as np

HOPELESS = 0.02
"""Below this share of useful time a run is given up rather than simulated."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a run fails, and what is done about it; all in seconds."""

    mean_s: float
    """Between two failures of any host."""
    interval_s: float
    """Of training between two checkpoints."""
    pause_s: float
    upload_s: float
    restart_s: float

    @property
    def first_order(self) -> float:
        """Goodput where failures are rare: each loses half an interval, and a restart."""
        lost_s = self.interval_s / 2 + self.restart_s + self.upload_s
        return 1 - lost_s / self.mean_s - self.pause_s / self.interval_s

    @property
    def goodput(self) -> float:
        """The share of the time that trains, over a long run, exactly.

        Between two failures, the number of intervals that a checkpoint keeps is the sum over *k* of
        the probability that nothing fails until the checkpoint after the *k*th is whole (compare
        Daly 2006, equation 20). A failure during a restart begins another.
        """
        segment_s = self.interval_s + self.pause_s
        delay_s = self.restart_s + self.upload_s
        with np.errstate(over="ignore"):
            kept = np.exp(-delay_s / self.mean_s) / np.expm1(segment_s / self.mean_s)
        return float(self.interval_s / self.mean_s * kept)

    def simulate(self, work_s: float, rng: np.random.Generator, *, start_s: float = 0.0) -> float:
        """Seconds until `work_s` of training is done; infinite if hardly any time trains.

        Args:
            start_s: the first start, where a restart takes `restart_s`.
        """
        if self.goodput < HOPELESS and work_s > self.interval_s:
            return math.inf
        segment_s = self.interval_s + self.pause_s
        done_s, elapsed_s, begin_s = 0.0, 0.0, start_s
        while True:
            left_s = work_s - done_s
            wanted_s = begin_s + left_s + self.pause_s * math.floor(left_s / self.interval_s)
            failure_s = rng.exponential(self.mean_s)
            if failure_s >= wanted_s:
                return elapsed_s + wanted_s
            kept = math.floor(max(0.0, failure_s - begin_s - self.upload_s) / segment_s)
            done_s += kept * self.interval_s
            elapsed_s += failure_s
            begin_s = self.restart_s


def best_interval_s(mean_s: float, pause_s: float) -> float:
    """The interval between checkpoints that loses least, to first order (Young 1974)."""
    return math.sqrt(2 * pause_s * mean_s)


def simulated_goodput(
    failures: Failures, rng: np.random.Generator, *, runs: int = 50, failures_per_run: int = 1_000
) -> tuple[float, float]:
    """Goodput of long simulated runs that begin as after a failure, and its standard error."""
    work_s = failures_per_run * failures.mean_s * failures.goodput
    elapsed = np.array(
        [failures.simulate(work_s, rng, start_s=failures.restart_s) for _ in range(runs)]
    )
    mean_s = elapsed.mean()
    standard_error = elapsed.std(ddof=1) / math.sqrt(runs)
    return float(work_s / mean_s), float(work_s / mean_s**2 * standard_error)
