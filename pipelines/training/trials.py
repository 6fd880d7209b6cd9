"""Many fine-tunings on Ray Tune: as many at a time as there is room for, none a second time.

Each is a stage in a folder of its own, and that is all a sweep needs to go on after it was killed:
a folder with a manifest is done, one with `stopped.json` stays as it is, in any other training goes
on from its newest checkpoint. What Ray Tune writes for a restart of its own is never read.

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
import ray
from ray import tune as ray_tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.stopper import Stopper

from bert_core import errors, files
from bert_core.manifest import is_complete
from bert_core.train.hardware import flush_denormals
from bert_core.train.loop import DivergedError
from pipelines.runtime import cluster
from pipelines.runtime.progress import Meter, meter
from pipelines.runtime.stage import STARTED
from pipelines.training.config import LabelledTrainingConfig
from pipelines.training.driver import METRICS, check_cpus
from pipelines.training.records import CHECKPOINTS
from pipelines.training.selection import Measurement
from pipelines.training.sweep import SweepConfig
from pipelines.training.worker import check_shared
from tracking.runs import RunRecorder
from tracking.server import tracking_uri

MEASUREMENTS = "measurements.json"
STOPPED = "stopped.json"
Train = Callable[[Any, Callable[[Measurement], None]], Any]
"""Trains one trial, given its config, as a stage, and shows every measurement."""
State = Literal["finished", "stopped", "diverged"]
"""How a trial ended: by itself, by `asha`, or by a loss that was no number."""


@dataclass(frozen=True)
class Outcome:
    """What a trial came to on the rows that select."""

    state: State
    cost: float | None
    """Of its best weights, mean over its seeds; None where there was no number."""
    steps: int
    """The last that was measured, of its last seed."""


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
    """Train all that have not ended, and give what each came to.

    Args:
        trials: with `num_workers` 0, paths from the root, and outputs apart from each other.
        output: of the sweep, from the root too.
        on_ray: as many at a time as there is room for, up to `max_concurrent`; else one by one in
            this process.
        title: of the progress.
        sign: what makes a score of a cost.
    Raises: the first RaybertError of a trial, which ends them all.
    """
    left = {number: trial for number, trial in enumerate(trials) if state_of(trial) is None}
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
    return [outcome_of(trial) for trial in trials]


def state_of(trial: LabelledTrainingConfig) -> State | None:
    """How the trial ended, None while it has not."""
    if is_complete(trial.output):
        return "finished"
    stopped = files.join(trial.output, STOPPED)
    return files.read_json(stopped)["state"] if files.exists(stopped) else None


def measurements_of(trial: LabelledTrainingConfig) -> list[Measurement]:
    """All measurements on the rows that select, in their order."""
    path = files.join(trial.output, MEASUREMENTS)
    return [Measurement(**each) for each in files.read_json(path)] if files.exists(path) else []


def outcome_of(trial: LabelledTrainingConfig) -> Outcome:
    """What a trial that has ended came to."""
    state, found = state_of(trial), measurements_of(trial)
    assert state is not None
    costs = {seed: [m.cost for m in found if m.seed == seed] for seed in {m.seed for m in found}}
    best = [min((c for c in each if np.isfinite(c)), default=np.nan) for each in costs.values()]
    cost = float(np.mean(best)) if best and np.isfinite(best).all() else None
    return Outcome(state, cost, found[-1].step if found else 0)


def train_trial(
    train: Train, trial: LabelledTrainingConfig, tell: Callable[[Measurement], None]
) -> None:
    """Train one trial from where it was, in this process, and keep what it is measured to be.

    A loss that is no number ends the trial, not the sweep.
    """
    if files.exists(files.join(trial.output, STARTED)) and not trial.local_folder.exists():
        files.remove(trial.output)  # its record lies on another machine

    def keep(measurement: Measurement) -> None:
        # After a kill it may have been measured without a checkpoint, and be so again.
        found = {(each.seed, each.step): each for each in measurements_of(trial)}
        found[measurement.seed, measurement.step] = measurement
        path = files.join(trial.output, MEASUREMENTS)
        files.write_json(path, [asdict(each) for each in found.values()])
        tell(measurement)

    try:
        train(trial, keep)
    except DivergedError as error:
        _stop(trial, "diverged", str(error))
    files.remove(files.join(trial.output, CHECKPOINTS))  # of every trial they would fill a disk


def _stop(trial: LabelledTrainingConfig, state: State, why: str) -> None:
    files.write_json(files.join(trial.output, STOPPED), {"state": state, "why": why})


def _clear_up(trial: LabelledTrainingConfig) -> None:
    """Do what the process of a trial could not, where it was ended from outside."""
    files.remove(files.join(trial.output, CHECKPOINTS))
    state = state_of(trial)
    # One that diverged has said so; a process that does not end does not hold up the sweep.
    if state != "diverged" and (trial.local_folder / METRICS).exists():
        with suppress(errors.ResourceError):
            recorder = RunRecorder.open(trial.local_folder, uri=tracking_uri(trial.tracking_uri))
            recorder.close("FINISHED" if state == "finished" else "KILLED")


def _run_on_tune(
    train: Train,
    trials: Sequence[LabelledTrainingConfig],
    left: Mapping[int, LabelledTrainingConfig],
    search: SweepConfig,
    output: str,
    max_concurrent: int | None,
    watcher: "Watcher",
) -> None:
    shared = trials[0]  # trials differ in what is searched only
    check_cpus(ray.cluster_resources(), 1, shared.threads_per_worker)
    use_gpu = cluster.has_gpus(1)
    storage = files.join(output, "ray")
    files.remove(storage)  # of a run that was killed
    tuner = ray_tune.Tuner(
        ray_tune.with_resources(
            partial(_on_tune, train, dict(left), output, os.getcwd()),
            {"cpu": shared.threads_per_worker, **({"gpu": 1} if use_gpu else {})},
        ),
        param_space={"trial": ray_tune.grid_search(list(left))},
        tune_config=ray_tune.TuneConfig(
            scheduler=Halving(trials, search, watcher) if search.method == "asha" else None,
            max_concurrent_trials=max_concurrent,
        ),
        run_config=ray_tune.RunConfig(
            name=uuid.uuid4().hex[:8],
            storage_path=storage,
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
    """Entry point of a trial of Ray Tune: what the user can mend is reported, and not raised,
    since what is raised is tried again, as a lost worker's trial is to be.
    """
    if Path(home).is_dir():
        os.chdir(home)  # Ray Tune gives every trial a folder of its own
    flush_denormals()
    number, error = parameters["trial"], None

    def tell(measurement: Measurement) -> None:
        # A trial that has come to its end is not to be ended.
        if measurement.share < 1:
            ray_tune.report({"trial": number, **asdict(measurement), "error": None})

    try:
        check_shared(sweep)
        train_trial(train, trials[number], tell)
    except errors.RaybertError as found:
        error = [type(found).__name__, str(found)]
    ray_tune.report({"trial": number, "share": 1.0, "cost": None, "error": error})


class Watcher(Stopper):
    """Shows how far a sweep is, and ends it at the first error that a user can mend."""

    def __init__(self, progress: Meter, ended: int, title: str, sign: int) -> None:
        """`ended` trials came to their end before."""
        self._progress, self._ended, self._title, self._sign = progress, ended, title, sign
        self._shares: dict[int, float] = {}
        self._best: float | None = None
        self.error: errors.RaybertError | None = None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial is to end."""
        if result["error"] is not None:
            kind, message = result["error"]
            self.error = getattr(errors, kind, errors.RaybertError)(message)
            return True
        self._show(result["trial"], result["share"], result["cost"])
        return False

    def stop_all(self) -> bool:
        """Whether all are."""
        return self.error is not None

    def saw(self, number: int, measurement: Measurement) -> None:
        """Trial `number` was measured."""
        self._show(number, measurement.share, measurement.cost)

    def ended(self, number: int) -> None:
        """Trial `number` came to its end."""
        self._show(number, 1.0, None)

    def _show(self, number: int, share: float, cost: float | None) -> None:
        self._shares[number] = share
        if cost is not None and (self._best is None or cost < self._best):
            self._best = cost
        note = "" if self._best is None else f"{self._title} {self._sign * self._best:.4g}"
        self._progress.set(self._ended + sum(self._shares.values()), note)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray Tune writes it down for a restart of its own


class Halving(ASHAScheduler):
    """Asynchronous successive halving that knows what came to an end before this start, and whose
    word outlives this process.
    """

    def __init__(
        self, trials: Sequence[LabelledTrainingConfig], search: SweepConfig, watcher: Watcher
    ) -> None:
        every = trials[0].selection.every_epochs
        grace = max(1, round(search.grace_epochs / every))
        super().__init__(
            time_attr="number",  # of a measurement
            metric="cost",
            mode="min",
            grace_period=grace,
            max_t=max(grace, *(round(trial.epochs / every) for trial in trials)),
            reduction_factor=search.reduction_factor,
            stop_last_trials=False,
        )
        self._configs, self._watcher = trials, watcher
        for number, trial in enumerate(trials):
            if state_of(trial) is not None:
                past: Any = SimpleNamespace(trial_id=f"before-{number}")
                self.on_trial_add(None, past)  # type: ignore[arg-type]
                for measurement in measurements_of(trial):
                    super().on_trial_result(None, past, asdict(measurement))  # type: ignore[arg-type]

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        action = super().on_trial_result(tune_controller, trial, result)
        if action == self.STOP:
            at = f"after step {result['step']}, by asha"
            _stop(self._configs[result["trial"]], "stopped", at)
            self._watcher.ended(result["trial"])
        return action
