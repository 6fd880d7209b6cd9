"""Distributes independent pieces of work over a cluster with Ray Data."""

import gc
import json
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Any, TypeVar

from bert_core import errors
from pipelines.runtime import cluster
from pipelines.runtime.stage import StageConfig

Item = TypeVar("Item")
IN_FLIGHT = 3  # items per actor, including the one it works on


def run_tasks(
    work: Callable[[Item], Any],
    items: Sequence[Item],
    config: StageConfig,
    *,
    use_gpu: bool = False,
) -> Generator[tuple[int, Any], None, None]:
    """Do `work` on every item, and yield (position, result) as each finishes, in any order.

    Items are handed to workers in order, so one may wait for the result of an earlier one.

    Ray Data hands the items to `config.num_workers` actors; what is expensive to build is built
    once per actor if `work` caches it. A lost actor is replaced and its items are done again.
    With `num_workers` 0 items are done in this process, one after the other.

    Args:
        work: returns something JSON can hold; writes only to storage that all workers see.
        use_gpu: whether each worker gets a GPU, if the cluster has enough of them.
    Raises: what `work` raises, if it is a RaybertError; the first one ends everything.
    """
    if not items:
        return
    if config.num_workers == 0:
        for index, item in enumerate(items):
            yield index, json.loads(json.dumps(work(item)))
        return
    cluster.connect(
        address=config.address,
        num_cpus=config.cpus,
        allow_open_cluster=config.allow_open_cluster,
    )
    import ray

    if ray.util.client.ray.is_connected():
        raise errors.ConfigError(
            "address: wanted host:6379 or auto, since Ray Data does not run through ray://: run it "
            "on a machine of the cluster, or submit it with `raybert submit`"
        )
    least_workers = min(config.least_workers, len(items))
    gets_gpus = cluster.require_room(
        least_workers,
        config.threads_per_worker,
        gpus=config.gpus if use_gpu else "none",
        wait=config.wait,
    )
    _silence_pool_warning()
    # NOTE: not `range`: reading it is a separate operator, which half the CPUs are reserved for.
    numbers = [{"id": index} for index in range(len(items))]
    source = ray.data.from_items(numbers, override_num_blocks=len(items))
    with warnings.catch_warnings():
        # NOTE: Ray Data lets an actor reorder its items unless this argument forbids it, which Ray
        # 2.64 will drop.
        warnings.simplefilter("ignore", DeprecationWarning)
        answers = source.map(
            _Answering,  # type: ignore[arg-type]  # a class is right, Ray's stub only has functions
            fn_constructor_args=(work, items),
            num_cpus=config.threads_per_worker,
            num_gpus=1 if gets_gpus else None,
            allow_out_of_order_execution=False,
            # An actor has its next item ready: with tasks a CPU idles 0.2 s after each.
            compute=ray.data.ActorPoolStrategy(
                min_size=least_workers,
                max_size=min(config.most_workers, len(items)),
                max_tasks_in_flight_per_actor=IN_FLIGHT,
            ),
        )
    # NOTE: not `iter_rows`, which holds each row back until the next one arrives.
    for batch in answers.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy"):
        for number, text in zip(batch["id"], batch["answer"], strict=True):
            answer = json.loads(text)
            if answer["error"] is not None:
                raise getattr(errors, answer["error"]["kind"], errors.RaybertError)(
                    answer["error"]["message"]
                )
            yield int(number), answer["result"]


@cache
def _silence_pool_warning() -> None:
    """Make Ray's core give its warning about pools like Ray Data's now, where nobody sees it.

    It warns that the arguments of a restartable actor could be lost; those of Ray Data's pools are
    kept while they run. It warns once per process.
    """
    import ray

    # No machine has this resource, so no process is started.
    actor: Any = ray.remote(num_cpus=0, resources={"none": 1}, max_restarts=1)(_Warned)
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        ray.kill(actor.remote(ray.put(None)))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


class _Warned:
    def __init__(self, argument: Any) -> None: ...


class _Answering:
    """An actor's work: the result for the item that a row gives the index of, or the user's error.

    The error is returned as data: Ray would wrap an exception in pages of its own stack frames.
    """

    def __init__(self, work: Callable[[Item], Any], items: Sequence[Item]) -> None:
        self._work, self._items = work, items
        # Stops the garbage collector from scanning Ray's imports over and over: reading docstrings
        # took 12 s of CPU instead of 20.
        gc.freeze()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = {"result": self._work(self._items[row["id"]]), "error": None}
        except errors.RaybertError as error:
            answer = {
                "result": None,
                "error": {"kind": type(error).__name__, "message": str(error)},
            }
        return {"id": row["id"], "answer": json.dumps(answer)}
