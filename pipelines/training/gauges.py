"""Sets gauges of a training run for Prometheus, in Ray Train's controller.

The metrics agent of the controller's node exports them as `ray_raybert_train_…`. The agent forgets
gauges that are not set again within twice its export interval (10 s), so a thread sets them again:
a run that hangs, or seldom reports, shows its last report until its controller ends.
"""

import threading
import time

from ray.util.metrics import Gauge

from pipelines.training.records import Records
from tracking.runs import metric_names as names
from tracking.runs.goodput import Goodput

PREFIX = "raybert_train_"
OUTPUT, ACTIVITY = "output", "activity"
SET_EVERY_S = 1.0
"""How often the gauges are set again."""
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
        """Create the gauges.

        Args:
            output: the stage's output, by which runs are distinguished.
        """
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
        self._shown: dict[tuple[str, str], float] = {}
        threading.Thread(target=self._keep, name="gauges", daemon=True).start()

    def show(self, records: Records, goodput: Goodput, now_s: float) -> None:
        """Set the gauges from a report.

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
        shown = {(name, ""): x for name, x in numbers.items() if x is not None}
        shown |= {(SECONDS, activity): seconds for activity, seconds in goodput.seconds.items()}
        self._shown = self._shown | shown  # replaced, not changed: the thread reads it
        self._set()

    def _set(self) -> None:
        for (name, activity), number in self._shown.items():
            if activity:
                self._seconds.set(number, {**self._tags, ACTIVITY: activity})
            else:
                self._gauges[name].set(number, self._tags)

    def _keep(self) -> None:
        while True:
            time.sleep(SET_EVERY_S)
            self._set()
