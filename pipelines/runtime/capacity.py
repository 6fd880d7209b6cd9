"""Checks the room for workers on the nodes of a cluster, which come and go."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from bert_core.errors import ResourceError
from pipelines.runtime import cluster
from pipelines.runtime.progress import counted, say

ROOM_POLL_S = 2.0
RECOUNTS = 20

Gpus = Literal["none", "if there are any", "one each"]


def require_room(
    workers: int, threads: int, *, gpus: Gpus = "if there are any", wait: bool = False
) -> bool:
    """Check that the cluster this process is connected to has room for all workers.

    Args:
        threads: CPUs per worker.
        gpus: whether each worker is to get a GPU.
        wait: wait until nodes have joined if room is lacking; Ray is asked to start them if it can.
    Returns: whether each worker gets a GPU.
    Raises: ResourceError if there are too few CPUs or GPUs. If GPUs are optional, a joined cluster
        with fewer GPUs than workers, but not none, is refused too: the work would otherwise go to
        its CPUs, unnoticed.
    """
    lacks, has_gpus = _lacking(workers, threads, gpus)
    if lacks is None:
        return has_gpus
    if not wait:
        raise ResourceError(f"{lacks}, add nodes, or wait for some with --wait")
    say(f"{lacks}, or add nodes; waiting for some")
    bundle: dict[str, float] = {"CPU": threads, **({"GPU": 1} if gpus == "one each" else {})}
    with _requested([bundle] * workers):
        while lacks is not None:
            time.sleep(ROOM_POLL_S)
            lacks, has_gpus = _lacking(workers, threads, gpus)
    return has_gpus


@contextmanager
def _requested(bundles: list[dict[str, float]]) -> Iterator[None]:
    """While the block runs, have Ray's autoscaler start the nodes that these bundles lack, if any.

    Uses a waiting placement group, as Ray Train does, because that demand ends with the job.
    `request_resources` would replace what another job has requested, and outlive both jobs.
    """
    from ray.util import placement_group, remove_placement_group

    group = placement_group(bundles)
    try:
        yield
    finally:
        remove_placement_group(group)


def _lacking(workers: int, threads: int, gpus: Gpus) -> tuple[str | None, bool]:
    """Return what the cluster lacks and what can be lowered (None if nothing is lacking), and
    whether there is a GPU for each worker."""
    import ray

    has = ray.cluster_resources()
    cpus, usable_gpus = has.get("CPU", 0), 0 if gpus == "none" else has.get("GPU", 0)
    lacks = None
    if cpus < workers * threads:
        lacks = (
            f"wanted {counted(workers * threads, 'CPU')} ({counted(workers, 'worker')} with "
            f"{counted(threads, 'thread')}), the cluster has {cpus:g}: lower num_workers or "
            "threads_per_worker"
        )
    elif gpus == "one each" and usable_gpus < workers:
        lacks = (
            f"wanted {counted(workers, 'GPU')}, one per worker, the cluster has {usable_gpus:g}: "
            "lower num_workers, or leave out require_gpus"
        )
    elif gpus != "none" and cluster.started() is None and 0 < usable_gpus < workers:
        lacks = (
            f"wanted {workers} GPUs, one per worker, the cluster has {usable_gpus:g}: lower "
            f"num_workers to {usable_gpus:g}"
        )
    return lacks, usable_gpus >= workers


def workers_that_fit(threads: int, *, one_gpu: bool) -> int:
    """Return how many workers of this size fit on the nodes that are alive, whether busy or
    idle."""
    import ray

    count = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            workers = has.get("CPU", 0) // threads
            count += int(min(workers, has.get("GPU", 0)) if one_gpu else workers)
    return count


def recount_nodes() -> None:
    """For elastic training, make Ray count the nodes now, and every second for a while.

    By itself Ray 2.60 does so every 20 s, and until then Ray Train waits for a lost node; the loss
    of a node may become known some time after the loss of its workers. Call it in the process of
    Ray Train's controller. If Ray has no such actor, or a different one, nothing is sped up.
    """
    import ray

    def count() -> None:
        with suppress(ValueError, TypeError, AttributeError, ray.exceptions.RayError):
            actor = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
            ray.get(actor.get_reserved_resources.remote("", recompute=True), timeout=5)

    def repeat() -> None:
        for _ in range(RECOUNTS):
            time.sleep(1)
            count()

    count()  # Ray Train's next decision depends on it
    threading.Thread(target=repeat, name="recount-nodes", daemon=True).start()


def drain(node_id: str, reason: str, seconds: float) -> Callable[[], bool]:
    """Tell Ray that a node will go: it gets no new work, and its workers get a notice.

    Args:
        seconds: time until the node goes.
    Returns: a function that says whether the node has left the cluster; it works even when this
        process is disconnected.
    Raises: ResourceError if Ray refuses.
    """
    import ray
    from ray.core.generated import autoscaler_pb2

    reasons: Any = autoscaler_pb2
    # NOTE: Ray has no public function for this; the hidden command `ray drain-node` does the same.
    raylet: Any = ray._raylet  # compiled, and no stub
    gcs = raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    ends_ms = int((time.time() + seconds) * 1000)
    accepted, why = gcs.drain_node(node_id, reasons.DRAIN_NODE_REASON_PREEMPTION, reason, ends_ms)
    if not accepted:
        raise ResourceError(f"wanted Ray to drain node {node_id}, it refuses: {why}")
    return lambda: not gcs.check_alive([ray.NodeID.from_hex(node_id)])[0]
