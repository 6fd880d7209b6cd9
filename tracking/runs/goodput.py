"""Measures where the time of a training run went, and what it cost, over all of its starts.

Every second from the first start on belongs to one activity, so the activities add up to the wall
time. A worker's clock measures how it spent the time between two points of the curves
(`bert_core.train.clock`). The code that records the points adds it up here, and keeps the sums in
`goodput.json` of the run's folder.

When a process is killed, what it has computed since its last report is unknown: that time, up to
the interval of reports, counts as restarting, or as stopped if the driver died too.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bert_core import files
from bert_core.errors import FormatError, RaybertError
from tracking.runs import metric_names as names

logger = logging.getLogger(__name__)

FILE = "goodput.json"
FORMAT_VERSION = 1
LONG_S = 1800.0
"""From here on a run is so long that where its time went is told."""
CLUSTER, DEFAULT = "cluster", "default"
"""Keys of prices: the whole cluster, or a node of a kind that has no price of its own."""
_BEGAN, _NUMBER, _STEPS = "began_s", "number", "steps"


def clock_metrics(
    began_s: float, number: int, steps: int, spent_s: Mapping[str, float]
) -> dict[str, float]:
    """Return the clock's metrics, which a point of the curves carries besides its own metrics.

    Args:
        began_s: when the clock began, in seconds since 1970.
        number: number of this clock's points so far, from 1.
        steps: optimizer steps since the last point.
        spent_s: seconds of each activity since then.
    """
    reading = {_BEGAN: began_s, _NUMBER: float(number), _STEPS: float(steps), **spent_s}
    return names.on_all(names.CLOCK, reading)


@dataclass(kw_only=True)
class Goodput:
    """The time of a run so far, by activity."""

    began_s: float
    """When the run was started first, in seconds since 1970."""
    until_s: float
    """Up to when its time is counted."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each of `metric_names.ACTIVITIES`."""
    steps: int = 0
    """Optimizer steps that were kept; each counts once."""
    recomputed_steps: int = 0
    """Steps that were done again after a checkpoint, since they were lost."""
    last_step: int = 0
    """The furthest step that was reported to the record."""
    most_steps: int | None = None
    """The value of `last_step` at which the run ends, if a number of steps says so."""
    most_s: float | None = None
    """The seconds of training after which it ends, if they say so."""
    prices_usd: dict[str, float] = field(default_factory=dict)
    """USD per hour of `CLUSTER`, or of a node by its kind."""
    nodes: dict[str, int] = field(default_factory=lambda: {CLUSTER: 1})
    """Nodes in use now, by the names of the prices."""
    node_seconds: dict[str, float] = field(default_factory=dict)
    """How long each of them was used, over all starts."""
    clocks: dict[str, int] = field(default_factory=dict)
    """The clocks of workers by when they began, in order, and how many points each has sent."""
    format_version: int = FORMAT_VERSION

    @property
    def wall_s(self) -> float:
        """Seconds from the first start until now."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the wall time that went into computing steps that were kept."""
        return self.seconds.get(names.COMPUTING, 0.0) / self.wall_s if self.wall_s else 0.0

    @property
    def is_worth_telling(self) -> bool:
        """Whether people would ask where the time went: the run was long, it was paid for, or time
        was lost."""
        lost = self.recomputed_steps or self.seconds.get(names.STOPPED)
        return bool(self.wall_s >= LONG_S or self.prices_usd or lost)

    @property
    def cost_usd(self) -> float | None:
        """The cost so far; None without prices. Nothing is paid for while a run is stopped."""
        prices, used = self.prices_usd, self.node_seconds
        if DEFAULT in prices:
            nodes = [kind for kind in used if kind != CLUSTER]
            return sum(used[kind] / 3600 * prices.get(kind, prices[DEFAULT]) for kind in nodes)
        return used.get(CLUSTER, 0.0) / 3600 * prices[CLUSTER] if prices else None

    @property
    def progress(self) -> float | None:
        """The share of the run that is done; None if it is unknown."""
        if self.most_s is not None:
            return min(1.0, self._training_s / self.most_s)
        return self.last_step / self.most_steps if self.most_steps else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the run is done, at the speed so far; None if that is unknown."""
        if self.most_s is not None:
            return max(0.0, self.most_s - self._training_s)
        if self.most_steps is None or not self.steps:
            return None
        return (self.most_steps - self.last_step) * self._training_s / self.steps

    @property
    def _training_s(self) -> float:
        """Seconds that an undisturbed run would have needed for its steps so far."""
        needed = (names.COMPUTING, names.WAITING_FOR_DATA, names.CHECKPOINTING, names.MEASURING)
        return sum(self.seconds.get(activity, 0.0) for activity in needed)

    def numbers(self) -> dict[str, float]:
        """Return the metrics of the run."""
        cost = self.cost_usd
        return {
            **{
                names.time_of(activity): self.seconds.get(activity, 0.0)
                for activity in names.ACTIVITIES
            },
            names.WALL_S: self.wall_s,
            names.GOODPUT: self.goodput,
            names.RECOMPUTED_STEPS: float(self.recomputed_steps),
            **({} if cost is None else {names.COST_USD: cost}),
        }

    def take(
        self, records: Sequence[tuple[int, dict[str, float]]]
    ) -> list[tuple[int, dict[str, float]]]:
        """Count the clock readings in these points.

        Returns: the points without the readings; the last point has the run's metrics so far.
        """
        points = []
        for step, point in records:
            reading = names.measured_on(names.CLOCK, point)
            if reading:
                self._count(step, reading)
            prefix = names.on(names.CLOCK, "")
            metrics = {name: x for name, x in point.items() if not name.startswith(prefix)}
            if metrics:
                points.append((step, metrics))
        if points:
            step, metrics = points[-1]
            points[-1] = step, metrics | self.numbers()
        return points

    def finish(self, now_s: float) -> None:
        """Count the time from the last report until now."""
        self._advance(names.FINISHING, now_s - self.until_s)

    def save(self, folder: Path) -> None:
        """Write the sums to the run's folder; a failure is only logged."""
        try:
            files.write_json(str(folder / FILE), asdict(self))
        except (OSError, RaybertError) as error:
            logger.warning(f"the goodput of the run could not be saved: {error}")

    def _count(self, step: int, reading: dict[str, float]) -> None:
        began_s, number = reading.pop(_BEGAN), round(reading.pop(_NUMBER))
        clock, steps = repr(began_s), round(reading.pop(_STEPS))
        if number <= self.clocks.get(clock, 0):
            return  # a run that resumes reports points again
        if not self.clocks and began_s < self.began_s:
            # This file was lost, and the checkpoint had the points of an earlier start.
            self.began_s = self.until_s = began_s
        is_first = clock == next(iter(self.clocks), clock)
        starting = names.STARTING if is_first else names.RESTARTING
        if clock not in self.clocks:
            self._advance(starting, began_s - self.until_s)
        self.clocks[clock] = number
        again = min(max(self.last_step - (step - steps), 0), steps)
        self.steps += steps - again
        self.recomputed_steps += again
        if steps:
            self.last_step = max(self.last_step, step)
            computing_s = reading.pop(names.COMPUTING, 0.0)
            self._advance(names.RECOMPUTING, computing_s * again / steps)
            self._advance(names.COMPUTING, computing_s * (steps - again) / steps)
        for activity, seconds in reading.items():
            self._advance(starting if activity == names.STARTING else activity, seconds)

    def _advance(self, activity: str, seconds: float) -> None:
        seconds = max(0.0, seconds)  # the clocks of two machines may differ
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds
        self.until_s += seconds
        if activity != names.STOPPED:
            for kind, count in self.nodes.items():
                used_s = self.node_seconds.get(kind, 0.0)
                self.node_seconds[kind] = used_s + count * seconds


def begin(
    folder: Path,
    now_s: float,
    *,
    prices_usd: Mapping[str, float],
    most_steps: int | None = None,
    most_s: float | None = None,
) -> Goodput:
    """Return the time of a run that starts now, or resumes: the time since its last record counts
    as stopped."""
    goodput = read_or_new(folder, now_s)
    goodput._advance(names.STOPPED, now_s - goodput.until_s)
    goodput.prices_usd, goodput.nodes = dict(prices_usd), {CLUSTER: 1}
    goodput.most_steps, goodput.most_s = most_steps, most_s
    return goodput


def read_or_new(folder: Path, now_s: float) -> Goodput:
    """Return the recorded time of a folder's run, or that of a run that begins now if none can be
    read."""
    try:
        goodput = read(str(folder))
    except (OSError, RaybertError) as error:
        logger.warning(f"the time of earlier starts does not count: {error}")
        goodput = None
    return goodput or Goodput(began_s=now_s, until_s=now_s)


def read(folder: str) -> Goodput | None:
    """Return the time of the run that is recorded in a folder, or at a URI; None if nothing is
    recorded.

    Raises: FormatError if the file is damaged, or newer code wrote it; ResourceError.
    """
    path = files.join(folder, FILE)
    try:
        fields = json.loads(files.read_bytes(path))
        version = fields["format_version"]
        if version > FORMAT_VERSION:
            raise FormatError(
                f"{path}: wanted format_version {FORMAT_VERSION} or older, got {version}: update "
                "raybert"
            )
        return Goodput(**fields)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path}: wanted the JSON that raybert writes there, got something else ({error}): "
            "remove the file"
        ) from error


def in_words(goodput: Goodput) -> str:
    """Return a sentence for the user: `goodput 87 %: 1.8 h of 2.1 h …`."""
    in_steps = duration(goodput.seconds.get(names.COMPUTING, 0.0))
    cost = "" if goodput.cost_usd is None else f"; it cost {goodput.cost_usd:,.2f} USD"
    return (
        f"goodput {goodput.goodput:.0%}: {in_steps} of {duration(goodput.wall_s)} went into steps "
        f"that were kept{cost}"
    )


def duration(seconds: float) -> str:
    """Return seconds as text: `42 s`, `17 min`, `3.4 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"
