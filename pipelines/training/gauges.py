"""What Prometheus sees of a training run: gauges of Ray Train's controller.

The metrics agent of its node exports them as `ray_raybert_train_…`.
"""

from ray.util.metrics import Gauge

from pipelines.training.records import Records
from tracking import metric_names as names
from tracking.goodput import Goodput

PREFIX = "raybert_train_"
OUTPUT, ACTIVITY = "output", "activity"
POINT = {
    name: names.MEANINGS[name]
    for name in (
        names.LOSS,
        names.GRAD_NORM,
        names.LEARNING_RATE,
        names.TOKENS_PER_S,
        names.MFU,
        names.PADDING_SHARE,
        names.DATA_WAIT_SHARE,
        names.MEMORY_GB,
        names.WORKERS,
    )
}
"""Numbers of a point of the curves, which are shown as they are."""
STEP, REPORTED = "step", "reported_timestamp_seconds"
PROGRESS, LEFT_S, SECONDS = "progress", "left_seconds", "seconds"
SUMS = {
    STEP: "Optimizer steps that are done",
    REPORTED: "When the workers last reported, in seconds since 1970",
    PROGRESS: "Share of the run that is done",
    LEFT_S: "Seconds until it is done, at the speed so far",
    **{
        name: names.MEANINGS[name]
        for name in (names.GOODPUT, names.RECOMPUTED_STEPS, names.COST_USD)
    },
}


class Gauges:
    """The newest point of a run's curves, and where its time went."""

    def __init__(self, output: str) -> None:
        """`output` is the stage's, by which runs are distinguished."""
        self._tags = {OUTPUT: output}
        self._gauges = {
            name: Gauge(PREFIX + name, description=f"{text}.", tag_keys=(OUTPUT,))
            for name, text in (POINT | SUMS).items()
        }
        self._seconds = Gauge(
            PREFIX + SECONDS,
            description="Seconds of the wall time of the run, by activity.",
            tag_keys=(OUTPUT, ACTIVITY),
        )

    def show(self, records: Records, goodput: Goodput, now_s: float) -> None:
        """Show a report.

        Args:
            records: the points in it.
            now_s: seconds since 1970.
        """
        numbers: dict[str, float | None] = {REPORTED: now_s}
        for step, point in records:
            numbers |= {STEP: step} | {name: point[name] for name in POINT if name in point}
        numbers |= {
            PROGRESS: goodput.progress,
            LEFT_S: goodput.left_s,
            names.GOODPUT: goodput.goodput,
            names.RECOMPUTED_STEPS: goodput.recomputed_steps,
            names.COST_USD: goodput.cost_usd,
        }
        for name, number in numbers.items():
            if number is not None:
                self._gauges[name].set(number, self._tags)
        for activity, seconds in goodput.seconds.items():
            self._seconds.set(seconds, {**self._tags, ACTIVITY: activity})
