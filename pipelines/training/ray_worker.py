"""The entry point of a training worker on Ray Train; `worker` does its work."""

from contextlib import suppress
from typing import Any

import ray
from ray import train as ray_train

from bert_core import files
from bert_core.train.hardware import flush_denormals
from bert_core.train.loop import DivergedError
from bert_core.train.parallel import from_rank_0
from pipelines.training.records import (
    DIVERGED,
    STOPPING_FILE,
    Notice,
    Records,
    StoppedError,
)
from pipelines.training.worker import check_storage
from tracking.runs.system_metrics import SystemMetrics


def on_ray(arguments: dict[str, Any]) -> None:
    """Run as the entry point of a Ray Train worker; reports go through `ray.train.report`."""

    flush_denormals()  # only here, not when the work is done in the user's own process
    noticed: set[str] = set()

    # One worker per node reads them; rank 0's report is recorded, with the readings of all.
    metrics = SystemMetrics() if ray_train.get_context().get_local_rank() == 0 else None

    def report(records: Records, last: bool) -> Notice:
        system = metrics.read() if metrics else {}
        ray_train.report({"records": records, "last": last, "system": system})
        notice = ray_train.get_preemption_info()
        new = set(notice.preempted_node_ids if notice else ()) - noticed
        noticed.update(new)
        # Collective: every rank has to call it.
        if from_rank_0(float(rank == 0 and files.exists(stop))):
            return "stop"
        return "checkpoint" if new else "nothing"

    config, rank = arguments["config"], ray_train.get_context().get_world_rank()
    worker = ray.get(arguments["worker"])
    stop = files.join(config.output, STOPPING_FILE)
    check_storage(config.output, rank)
    try:
        with suppress(StoppedError):
            worker(config, arguments["digest"], report)
    except DivergedError as error:  # if raised, training would be retried and diverge again
        if rank == 0:
            files.write_bytes(files.join(config.output, DIVERGED), str(error).encode())
    if rank == 0:
        files.remove(stop)
