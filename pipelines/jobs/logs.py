"""Copies a job's logs to its output, since the cluster's own logs are lost with the cluster."""

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bert_core import files
from bert_core.manifest import is_complete
from pipelines.runtime import cluster
from pipelines.runtime.description import STARTED
from pipelines.runtime.progress import say

LOGS = "logs"
OF_A_DRIVER = "job-driver-"
COPY_EVERY_S = 60.0
NODES_TIMEOUT_S = 20.0
MOST_BYTES = 64 << 20
"""Largest part of a log that is copied; of a longer log it is the end."""

Sizes = dict[str, int]
"""Log → its size in bytes when it was last copied."""


@contextmanager
def copied(log: Path, output: str) -> Iterator[None]:
    """Copy this job's logs to `output` every minute while the block runs, and once at its end.

    Args:
        log: the log of the driver, which is this process.
    """
    copies, ended = _Copies(log, output), threading.Event()

    def repeat() -> None:
        while not ended.wait(COPY_EVERY_S):
            copies.bring_up_to_date()

    thread = threading.Thread(target=repeat, name="copy-logs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.stdout.flush()
        copies.bring_up_to_date()


class _Copies:
    """Keeps copies, in the output, of the driver's log and of its workers' logs on all nodes."""

    def __init__(self, log: Path, output: str) -> None:
        self._log, self._output = log, output
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        attempt = log.stem.removeprefix(OF_A_DRIVER)
        self._folder = files.join(output, LOGS, f"{began}-{attempt}")
        self._sizes: dict[str, Sizes] = {}
        """By node; the driver's own without one."""
        self._failed = False

    def bring_up_to_date(self) -> None:
        """Copy what has changed. Never raises: a log that cannot be copied must not end a run."""
        try:
            started = files.join(self._output, STARTED)
            if not is_complete(self._output) and not files.exists(started):
                return  # the folder does not belong to this run yet
            self._sizes[""] = copy_changed(
                {"driver.log": self._log}, self._folder, self._sizes.get("", {})
            )
            if cluster.is_connected():
                self._copy_on_nodes()
        except Exception as error:
            if not self._failed:
                say(f"the logs are not copied to {self._folder}: {error}")
            self._failed = True

    def _copy_on_nodes(self) -> None:
        """Have every node copy the logs of its workers; a node that fails is asked again later."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task: Any = ray.remote(num_cpus=0, max_retries=0)(copy_of_this_node)
        job, node_of = ray.get_runtime_context().get_job_id(), {}
        for node in ray.nodes():
            if node["Alive"]:
                folder = files.join(self._folder, node["NodeManagerAddress"])
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                sizes = self._sizes.get(node["NodeID"], {})
                answer = task.options(scheduling_strategy=there).remote(job, folder, sizes)
                node_of[answer] = node["NodeID"]
        answered, late = ray.wait(list(node_of), num_returns=len(node_of), timeout=NODES_TIMEOUT_S)
        for answer in answered:
            with suppress(ray.exceptions.RayError):
                self._sizes[node_of[answer]] = ray.get(answer)
        for answer in late:
            ray.cancel(answer)


def copy_of_this_node(job: str, folder: str, sizes: Sizes) -> Sizes:
    """Copy the logs of a job's workers on this node, as a Ray task.

    Args:
        job: Ray's id of the job.
        sizes: size of each log when it was last copied.
    """
    here = Path(os.readlink("/proc/self/fd/1")).parent
    logs = {path.name: path for path in here.glob(f"worker-*-{job}-*")}
    return copy_changed(logs, folder, sizes)


def copy_changed(logs: Mapping[str, Path], folder: str, sizes: Sizes) -> Sizes:
    """Copy the logs whose sizes have changed; return all current sizes."""
    now = dict(sizes)
    for name, path in logs.items():
        if (size := path.stat().st_size) != sizes.get(name, 0):
            with path.open("rb") as file:
                file.seek(max(0, size - MOST_BYTES))
                data = file.read(MOST_BYTES)
            files.write_bytes(files.join(folder, name), data)
            now[name] = size
    return now
