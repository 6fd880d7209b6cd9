"""The driver side of stages that train: starts the workers, shows progress, keeps the record.

What a worker does is in `ray_worker` and `worker`; the mathematics is in `bert_core.train`.
"""

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bert_core import files
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import RaybertError
from bert_core.manifest import BUNDLE, Output
from bert_core.tasks.digests import Digests
from bert_core.train.config import LoopConfig
from pipelines.runtime import cluster
from pipelines.runtime.capacity import require_room
from pipelines.runtime.outputs import bundle_outputs, recipe
from pipelines.runtime.progress import meter, say
from pipelines.runtime.result import SPREAD, Counts, Result, spread
from pipelines.runtime.stage_config import with_absolute_paths
from pipelines.training.config import TrainingConfig
from pipelines.training.records import (
    CHECKPOINTS,
    DIVERGED,
    STOPPING_FILE,
    NewRecords,
    Notice,
    Records,
    Report,
    record_all,
    with_readings,
)
from tracking.runs import goodput
from tracking.runs import metric_names as names
from tracking.runs.curves import steps_done
from tracking.runs.metric_names import ELAPSED_S, LOSS, TOKENS_PER_S
from tracking.runs.mirror import fetch_newer
from tracking.runs.recorder import RunRecorder
from tracking.runs.spool import METRICS, await_release
from tracking.runs.system_metrics import SystemMetrics
from tracking.store.server import tracking_uri

if TYPE_CHECKING:
    from bert_core.objectives.base import ObjectiveModel
    from bert_core.tasks.base import Task
    from bert_core.train.checkpoint import Checkpoint

CHECKPOINT_TIMEOUT_S = 20.0
"""How long a run that is to end waits for a last checkpoint, out of the minute that a job has."""

Worker = Callable[[Any, str, Report], None]
"""Trains as one rank: takes the stage's config, its digest, and where to report."""


def fit(
    worker: Worker,
    config: TrainingConfig,
    digest: str,
    loop: LoopConfig,
    title: str,
    steps_per_seed: int | None = None,
    watch: Callable[[Records], None] | None = None,
) -> None:
    """Run `worker` on every rank until it returns, through lost workers and restarts.

    The Ray Train controller, or this process if `num_workers` is 0, records the reports in the run
    of `config.local_folder`.

    Args:
        steps_per_seed: optimizer steps of each seed, if `loop` counts the records of several.
        watch: called with each report after it is recorded; needs `num_workers` 0.
    """
    assert watch is None or config.num_workers == 0
    # Ray Train gives every worker its own folder.
    config = with_absolute_paths(config)
    spent = goodput.begin(
        config.local_folder,
        time.time(),
        prices_usd=config.prices_usd,
        most_steps=loop.max_steps if loop.max_hours is None else None,
        most_s=None if loop.max_hours is None else 3600 * loop.max_hours,
    )
    spent.save(config.local_folder)
    with _progress(config.local_folder, loop, title, steps_per_seed):
        if config.num_workers == 0:
            recorder = RunRecorder.open(
                config.local_folder,
                uri=tracking_uri(config.tracking_uri),
                copy=config.record_copy,
            )
            spent.nodes |= {goodput.DEFAULT: 1}
            metrics = SystemMetrics()

            def report(records: Records, last: bool) -> Notice:
                records = spent.take(records)
                spent.save(config.local_folder)
                record_all(recorder, with_readings(records, [metrics.read()]))
                if watch is not None:
                    watch(records)
                return "nothing"  # this process gets no notice of preemption

            try:
                worker(config, digest, report)
            finally:
                recorder.close("RUNNING")
        else:
            _fit_on_ray(worker, config, digest, spent)


def _fit_on_ray(
    worker: Worker, config: TrainingConfig, digest: str, spent: goodput.Goodput
) -> None:
    cluster.set_defaults(cluster.NO_SPARE_WORKERS)
    cluster.connect(
        address=config.address,
        num_cpus=config.cpus,
        allow_open_cluster=config.allow_open_cluster,
    )
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

    from pipelines.training.controller import RecordingCallback, Trainer
    from pipelines.training.ray_worker import on_ray

    use_gpu = require_room(
        config.least_workers, config.threads_per_worker, gpus=config.gpus, wait=config.wait
    )
    storage = files.join(config.output, "ray")
    filesystem, storage_path = files.filesystem_of(storage)
    callback = RecordingCallback(
        config.output,
        config.local_folder,
        tracking_uri(config.tracking_uri),
        config.record_copy,
        spent,
    )
    # By reference: it may hold all rows, and Ray Train passes its config several times.
    shared = ray.put(worker)
    trainer = Trainer(
        on_ray,
        train_loop_config={"worker": shared, "config": config, "digest": digest},
        scaling_config=ScalingConfig(  # type: ignore[call-arg]  # the stub is outdated
            num_workers=config.num_workers,  # type: ignore[arg-type]
            elastic_resize_monitor_interval_s=config.resize_every_s,
            use_gpu=use_gpu,
            resources_per_worker={
                "CPU": config.threads_per_worker,
                **({"GPU": 1} if use_gpu else {}),
            },
        ),
        run_config=RunConfig(  # type: ignore[call-arg]  # the stub is outdated
            # Ray Train resumes a run of the same name; ours resumes from its own checkpoints.
            name=uuid.uuid4().hex[:8],
            storage_path=storage_path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=config.max_failures),
            callbacks=[callback],  # type: ignore[list-item]
            worker_runtime_env={"env_vars": cluster.worker_environment()},
        ),
    )
    trainer.before_exit = partial(write_last_checkpoint, config.output)
    diverged = files.join(config.output, DIVERGED)
    for left in (diverged, files.join(config.output, STOPPING_FILE)):  # by an earlier run
        files.remove(left)
    try:
        trainer.fit()
    except TrainingFailedError as error:
        raise cluster.users_mistake(error) or error from error
    if config.record_copy is not None:  # the controller may have run on another host
        await_release(config.local_folder)
        fetch_newer(config.local_folder, config.record_copy)
    files.remove(storage)
    if files.exists(diverged):
        from bert_core.train.loop import DivergedError

        raise DivergedError(files.read_bytes(diverged).decode())


def write_last_checkpoint(output: str) -> None:
    """Have the workers write a checkpoint with their next report, after any that they are already
    writing. Wait for it for a while, and say so if it could not be written. Never raises for errors
    of storage."""
    stopping = files.join(output, STOPPING_FILE)
    deadline_s = time.monotonic() + CHECKPOINT_TIMEOUT_S
    why = ""
    try:
        files.write_bytes(stopping, b"")
        while not why and files.exists(stopping):
            time.sleep(0.2)
            if time.monotonic() > deadline_s:
                why = f"it took longer than {CHECKPOINT_TIMEOUT_S:g} s"
        files.remove(stopping)
    except (OSError, RaybertError) as error:
        why = str(error)
    if why:
        say(f"the last checkpoint could not be written: {why}")


@dataclass(frozen=True, kw_only=True)
class TrainingCounts(Counts):
    """Counts of a stage that trains."""

    steps: int
    tokens_per_s: float
    spent: Mapping[str, float] = field(default_factory=dict, metadata=SPREAD)
    """Where the time went."""

    @property
    def steps_per_seed(self) -> int | None:
        """Return the steps of each seed; None if the run has one seed."""
        return None


@dataclass(frozen=True, kw_only=True)
class BeforeAndAfter(TrainingCounts):
    """Counts of a stage that measures the model on held-out rows before and after."""

    before: Mapping[str, float] = field(metadata=spread(names.before("{}")))
    after: Mapping[str, float] = field(metadata=spread(names.after("{}")))


T = TypeVar("T", bound=TrainingCounts)


def finished(
    config: TrainingConfig, stage: str, outputs: dict[str, Output], counts: T
) -> Result[T]:
    """Build the result of a stage that has trained, with where its time went and plots of its
    curves."""
    from tracking.runs.plots import plot_curves, plot_time

    spent = _spent(config)
    spent.save(config.local_folder)
    if spent.is_worth_telling:
        say(f"{stage}: {goodput.in_words(spent)}")
    folder = config.local_folder / "plots"
    plots = plot_curves(config.local_folder / METRICS, folder, counts.steps_per_seed)
    plots.append(plot_time(spent, folder / "time.png"))
    artifacts = [*plots, config.local_folder / goodput.FILE]
    counts = replace(counts, spent=spent.numbers())
    return Result(outputs=outputs, counts=counts, artifacts=artifacts)


def _spent(config: TrainingConfig) -> goodput.Goodput:
    """Return where the time of the run went until now."""
    spent = goodput.read_or_new(config.local_folder, time.time())
    spent.finish(time.time())
    return spent


@contextmanager
def _progress(
    folder: Path, loop: LoopConfig, title: str, steps_per_seed: int | None
) -> Iterator[None]:
    """While the block runs, follow the record of a run, whichever process writes it, and show its
    progress."""
    ended = threading.Event()

    def follow() -> None:
        new, done, note, over = NewRecords(folder), 0.0, "starting", False
        total, unit, scale = _measure(loop)
        if steps_per_seed is not None:
            total = steps_done(total, steps_per_seed)
        with meter(title, total, unit) as progress:
            while not over:
                over = ended.wait(0.5)
                if records := new.read():
                    step, numbers = list(records.items())[-1]
                    note = " ".join(
                        f"{name} {numbers[name]:,.{digits}f}"
                        for name, digits in ((LOSS, 3), (TOKENS_PER_S, 0))
                        if name in numbers
                    )
                    if steps_per_seed is not None:
                        done = steps_done(step, steps_per_seed)
                    elif scale is None:
                        done = step
                    else:
                        done = numbers.get(ELAPSED_S, 0.0) / scale
                        note = f"step {step:,} {note}"
                progress.set(done, note)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _measure(loop: LoopConfig) -> tuple[int, str, float | None]:
    """Return the length of a run for its progress bar: amount, unit, and seconds per unit if it is
    a unit of time."""
    if loop.max_hours is None:
        return loop.max_steps, "steps", None
    seconds = loop.max_hours * 3600
    if seconds < 600:
        return max(1, round(seconds)), "seconds", 1.0
    return round(seconds / 60), "minutes", 60.0


def write_bundle(
    config: TrainingConfig,
    digest: str,
    model: "ObjectiveModel",
    tokenizer: Tokenizer,
    *,
    metrics: dict[str, float],
    lineage: dict[str, Any],
    trained_rows: Digests,
    task: "Task | None" = None,
    examples: Sequence[Any] = (),
    checkpoint: "Checkpoint | None" = None,
    finish: "Callable[[ObjectiveModel], None] | None" = None,
    base: str = "",
) -> dict[str, Output]:
    """Write a checkpoint's weights as `output/bundle`; return its files.

    Args:
        model: a model of the right shape; its weights are replaced.
        lineage: what it was made from; the stage's config and digest are added.
        checkpoint: None takes the newest.
        finish: changes the model once it has these weights.
        base: reference of the model that an adapter changes.
    """
    from bert_core.bundle.format import About
    from bert_core.bundle.writing import save_bundle
    from bert_core.train.checkpoint import latest_checkpoint, load_weights

    checkpoint = checkpoint or latest_checkpoint(files.join(config.output, CHECKPOINTS))
    assert checkpoint is not None  # the last step wrote one
    load_weights(checkpoint, model, run_digest=digest)
    if finish is not None:
        finish(model)
    local = config.local_folder / BUNDLE
    shutil.rmtree(local, ignore_errors=True)  # left by a run that was killed after writing it
    save_bundle(
        local,
        model,
        tokenizer,
        About(
            task=task,
            metrics=metrics,
            lineage=lineage | recipe(config, digest),
            trained_rows=trained_rows,
            spent=_spent(config).numbers(),
            examples=examples,
        ),
        base=base,
    )
    return bundle_outputs(config)
