"""Runs many fine-tunings on Ray Tune, as many at a time as there is room for, each only once.

Each trial is a stage with its own output folder, which is all that a killed sweep needs to resume:
a folder with a manifest is finished, a folder with `stopped.json` is left as it is, and in any
other folder training resumes from the newest checkpoint. What Ray Tune writes for its own restarts
is never read.

`run_trials`, the watcher and the scheduler run in the driver, `train_trial` in a trial's process.
"""

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from ray import tune as ray_tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.stopper import Stopper

from bert_core import errors, files
from bert_core.manifest import is_complete
from bert_core.train.hardware import flush_denormals
from bert_core.train.loop import DivergedError
from pipelines.runtime import cluster
from pipelines.runtime.capacity import require_room
from pipelines.runtime.progress import Meter, meter
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.records import CHECKPOINTS
from pipelines.training.selection import Measurement
from pipelines.training.sweep import SweepConfig
from pipelines.training.worker import check_shared
from tracking.runs.mirror import read_copy
from tracking.runs.recorder import RunRecorder
from tracking.runs.spool import METRICS
from tracking.store.server import tracking_uri

MEASUREMENTS = "measurements.json"
STOPPED_FILE = "stopped.json"
# How long a process that takes the next trial waits for one that was stopped to close its run.
TUNE_SETTINGS = {"TUNE_FUNCTION_THREAD_TIMEOUT_S": "600"}
Train = Callable[[Any, Callable[[Measurement], None]], Any]
"""Trains one trial as a stage, given its config, and reports every measurement."""
State = Literal["finished", "stopped", "diverged"]
"""How a trial ended: by itself, by `asha`, or because its loss diverged."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial on the selection rows."""

    state: State
    cost: float | None
    """Cost of its best weights, mean over its seeds; None if a seed has no finite cost."""
    steps: int
    """The last measured step of its last seed."""


def run_trials(
    train: Train,
    trials: Sequence[LabelledTrainingConfig],
    search: SweepConfig,
    *,
    output: str,
    on_ray: bool,
    max_concurrent: int | None,
    title: str,
    sign: int,
) -> list[Outcome]:
    """Train all trials that have not ended, and return the outcome of every trial.

    Args:
        trials: configs with `num_workers` 0, absolute paths, and distinct outputs.
        output: the sweep's output, also absolute.
        on_ray: run as many at a time as there is room for, up to `max_concurrent`; otherwise one by
            one in this process.
        title: of the progress bar.
        sign: factor that turns a cost back into a score.
    Raises: the first RaybertError of a trial, which ends all of them.
    """
    left = {number: trial for number, trial in enumerate(trials) if state_of(trial.output) is None}
    with meter("trials", len(trials), "trials") as progress:
        watcher = Watcher(progress, len(trials) - len(left), title, sign)
        if not on_ray:
            for number, trial in left.items():
                train_trial(train, trial, partial(watcher.saw, number))
                watcher.ended(number)
        elif left:
            _run_on_tune(train, trials, left, search, output, max_concurrent, watcher)
    for trial in trials:
        _clear_up(trial)
    return [outcome_of(trial.output) for trial in trials]


def state_of(output: str) -> State | None:
    """Return how the trial with this output ended; None if it has not ended."""
    if is_complete(output):
        return "finished"
    stopped = files.join(output, STOPPED_FILE)
    return files.read_json(stopped)["state"] if files.exists(stopped) else None


def measurements_of(output: str) -> list[Measurement]:
    """Return all measurements of a trial on the selection rows, in order."""
    path = files.join(output, MEASUREMENTS)
    return [Measurement(**each) for each in files.read_json(path)] if files.exists(path) else []


def outcome_of(output: str) -> Outcome:
    """Return the outcome of a trial that has ended."""
    state, measurements = state_of(output), measurements_of(output)
    assert state is not None
    costs = {
        seed: [m.cost for m in measurements if m.seed == seed]
        for seed in {m.seed for m in measurements}
    }
    best = [min((c for c in each if np.isfinite(c)), default=np.nan) for each in costs.values()]
    cost = float(np.mean(best)) if best and np.isfinite(best).all() else None
    return Outcome(state, cost, measurements[-1].step if measurements else 0)


def train_trial(
    train: Train, trial: LabelledTrainingConfig, report: Callable[[Measurement], None]
) -> None:
    """Train or resume one trial in this process, and save its measurements.

    A loss that diverges ends the trial, not the sweep.
    """

    def keep(measurement: Measurement) -> None:
        # If a kill came after a measurement but before its checkpoint, the step is measured again.
        by_step = {(past.seed, past.step): past for past in measurements_of(trial.output)}
        by_step[measurement.seed, measurement.step] = measurement
        path = files.join(trial.output, MEASUREMENTS)
        files.write_json(path, [asdict(past) for past in by_step.values()])
        report(measurement)

    try:
        train(trial, keep)
    except DivergedError as error:
        _stop(trial.output, "diverged", str(error))
    files.remove(files.join(trial.output, CHECKPOINTS))  # those of all trials would fill a disk


def _stop(output: str, state: State, why: str) -> None:
    files.write_json(files.join(output, STOPPED_FILE), {"state": state, "why": why})


def _clear_up(trial: LabelledTrainingConfig) -> None:
    """Clean up what a trial's process could not, if it was ended from outside."""
    files.remove(files.join(trial.output, CHECKPOINTS))
    state = state_of(trial.output)
    # A diverged trial has closed its run; a process that does not end must not block the sweep.
    if state != "diverged" and _is_recorded(trial):
        with suppress(errors.ResourceError):
            recorder = RunRecorder.open(
                trial.local_folder,
                uri=tracking_uri(trial.tracking_uri),
                copy=trial.record_copy,
            )
            recorder.close("FINISHED" if state == "finished" else "KILLED")


def _is_recorded(trial: LabelledTrainingConfig) -> bool:
    if trial.record_copy is None:
        return (trial.local_folder / METRICS).exists()
    return read_copy(trial.record_copy) is not None  # perhaps written by another machine


def _run_on_tune(
    train: Train,
    trials: Sequence[LabelledTrainingConfig],
    left: Mapping[int, LabelledTrainingConfig],
    search: SweepConfig,
    output: str,
    max_concurrent: int | None,
    watcher: "Watcher",
) -> None:
    shared = trials[0]  # trials differ only in the searched fields
    use_gpu = require_room(1, shared.threads_per_worker, gpus=shared.gpus, wait=shared.wait)
    storage = files.join(output, "ray")
    files.remove(storage)  # from a run that was killed
    filesystem, storage_path = files.filesystem_of(storage)
    tuner = ray_tune.Tuner(
        ray_tune.with_resources(
            partial(_on_tune, train, dict(left), output, os.getcwd()),
            {"cpu": shared.threads_per_worker, **({"gpu": 1} if use_gpu else {})},
        ),
        param_space={"trial": ray_tune.grid_search(list(left))},
        tune_config=ray_tune.TuneConfig(
            scheduler=Halving(trials, search, watcher) if search.method == "asha" else None,
            max_concurrent_trials=max_concurrent,
            reuse_actors=True,  # otherwise each trial imports torch again
        ),
        run_config=ray_tune.RunConfig(
            name=uuid.uuid4().hex[:8],
            storage_path=storage_path,
            storage_filesystem=filesystem,
            stop=watcher,
            failure_config=ray_tune.FailureConfig(max_failures=shared.max_failures),
            verbose=0,
        ),
    )
    results = tuner.fit()
    if watcher.error is not None:
        raise watcher.error
    if results.errors:
        raise results.errors[0]
    files.remove(storage)


def _on_tune(
    train: Train,
    trials: Mapping[int, LabelledTrainingConfig],
    sweep: str,
    home: str,
    parameters: Mapping[str, Any],
) -> None:
    """Run one trial, as the entry point of Ray Tune.

    Errors that the user can fix are reported, not raised, because Ray Tune retries a trial that
    raises, as it should when a worker is lost.
    """
    if Path(home).is_dir():
        os.chdir(home)  # Ray Tune gives every trial its own folder
    cluster.set_defaults(TUNE_SETTINGS)
    flush_denormals()
    number, error = parameters["trial"], None

    def report(measurement: Measurement) -> None:
        # A trial that has reached its end must not be stopped.
        if measurement.share < 1:
            ray_tune.report({"trial": number, **asdict(measurement), "error": None})

    try:
        check_shared(sweep)
        train_trial(train, trials[number], report)
    except errors.RaybertError as raised:
        error = [type(raised).__name__, str(raised)]
    ray_tune.report({"trial": number, "share": 1.0, "cost": None, "error": error})


class Watcher(Stopper):
    """Shows the progress of a sweep, and ends it at the first error that the user can fix."""

    def __init__(self, progress: Meter, ended: int, title: str, sign: int) -> None:
        """Start without measurements.

        Args:
            progress: the meter to update.
            ended: number of trials that ended before this start.
            title: name of the score that is shown.
            sign: factor that turns a cost back into a score.
        """
        self._progress, self._ended, self._title, self._sign = progress, ended, title, sign
        self._shares: dict[int, float] = {}
        self._best: float | None = None
        self.error: errors.RaybertError | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether to end the trial."""
        if result["error"] is not None:
            kind, message = result["error"]
            self.error = getattr(errors, kind, errors.RaybertError)(message)
            return True
        self._show(result["trial"], result["share"], result["cost"])
        return False

    def stop_all(self) -> bool:
        """Whether to end all trials."""
        return self.error is not None

    def saw(self, number: int, measurement: Measurement) -> None:
        """Show a measurement of trial `number`."""
        self._show(number, measurement.share, measurement.cost)

    def ended(self, number: int) -> None:
        """Show that trial `number` has ended."""
        self._show(number, 1.0, None)

    def _show(self, number: int, share: float, cost: float | None) -> None:
        self._shares[number] = share
        if cost is not None and (self._best is None or cost < self._best):
            self._best = cost
        note = "" if self._best is None else f"{self._title} {self._sign * self._best:.4g}"
        self._progress.set(self._ended + sum(self._shares.values()), note)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray Tune saves it for its own restarts


class Halving(ASHAScheduler):
    """Asynchronous successive halving that also counts the trials that ended before this start, and
    whose decisions outlast this process."""

    def __init__(
        self, trials: Sequence[LabelledTrainingConfig], search: SweepConfig, watcher: Watcher
    ) -> None:
        every = trials[0].selection.every_epochs
        grace = max(1, round(search.grace_epochs / every))
        super().__init__(
            time_attr="number",  # the number of a measurement
            metric="cost",
            mode="min",
            grace_period=grace,
            max_t=max(grace, *(round(trial.epochs / every) for trial in trials)),
            reduction_factor=search.reduction_factor,
            stop_last_trials=False,
        )
        self._configs, self._watcher = trials, watcher
        for number, trial in enumerate(trials):
            if state_of(trial.output) is not None:
                past: Any = SimpleNamespace(trial_id=f"before-{number}")
                self.on_trial_add(None, past)  # type: ignore[arg-type]
                for measurement in measurements_of(trial.output):
                    super().on_trial_result(None, past, asdict(measurement))  # type: ignore[arg-type]

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        action = super().on_trial_result(tune_controller, trial, result)
        if action == self.STOP:
            at = f"after step {result['step']}, by asha"
            _stop(self._configs[result["trial"]].output, "stopped", at)
            self._watcher.ended(result["trial"])
        return action
