"""Distributes independent pieces of work over a cluster with Ray Data."""

import gc
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

from bert_core import errors
from pipelines.runtime import cluster
from pipelines.runtime.capacity import require_room, workers_that_fit
from pipelines.runtime.progress import counted, say
from pipelines.runtime.stage_config import StageConfig

Item = TypeVar("Item")
IN_FLIGHT = 3  # items per actor, including the one it works on
GONE_AFTER_S = 45.0
"""How long the cluster may lack room for a lost worker, with no item finished, before the others
get its items. A host that only restarts is back sooner."""
ROOM_POLL_S = 1.0


def run_tasks(
    work: Callable[[Item], Any],
    items: Sequence[Item],
    config: StageConfig,
    *,
    use_gpu: bool = False,
) -> Generator[tuple[int, Any], None, None]:
    """Do `work` on every item, and yield (position, result) as each finishes, in any order.

    Items are handed to workers in order, so one may wait for the result of an earlier one.

    Ray Data hands the items to `config.num_workers` actors. Anything expensive is built once per
    actor if `work` caches it. A lost actor is replaced and its items are done again; if its host is
    gone and no other has room, they go to as many actors as there is room for. With `num_workers`
    0, items are done in this process, one after another.

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
    else:
        yield from _run_on_ray(work, items, config, use_gpu)


def _run_on_ray(
    work: Callable[[Item], Any], items: Sequence[Item], config: StageConfig, use_gpu: bool
) -> Iterator[tuple[int, Any]]:
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
    gets_gpus = require_room(
        least_workers,
        config.threads_per_worker,
        gpus=config.gpus if use_gpu else "none",
        wait=config.wait,
    )
    _silence_pool_warning()
    left = dict.fromkeys(range(len(items)))
    while left:
        watch = _Watch(config.threads_per_worker, gets_gpus)
        watch.start()
        try:
            for index, answer in _answers(work, items, list(left), least_workers, config, watch):
                watch.last = time.monotonic()
                if answer["error"] is not None:
                    raise getattr(errors, answer["error"]["kind"], errors.RaybertError)(
                        answer["error"]["message"]
                    )
                del left[index]
                yield index, answer["result"]
            return
        except ray.exceptions.RayError:
            if not watch.has_ended_all:
                raise
            least_workers = 1
        finally:
            watch.end()


def _answers(
    work: Callable[[Item], Any],
    items: Sequence[Item],
    indices: Sequence[int],
    least_workers: int,
    config: StageConfig,
    watch: "_Watch",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a pool of actors' answers for the items with these indices, in any order."""
    import ray

    # NOTE: not `range`: reading it is a separate operator, which half the CPUs are reserved for.
    numbers = [{"id": index} for index in indices]
    source = ray.data.from_items(numbers, override_num_blocks=len(numbers))
    with warnings.catch_warnings():
        # NOTE: by default Ray Data lets an actor reorder its items and gives it no name; these
        # arguments change that, and Ray 2.64 will drop them.
        warnings.simplefilter("ignore", DeprecationWarning)
        answers = source.map(
            _Answering,  # type: ignore[arg-type]  # a class is right, Ray's stub only has functions
            fn_constructor_args=(work, items),
            num_cpus=config.threads_per_worker,
            num_gpus=1 if watch.gets_gpus else None,
            allow_out_of_order_execution=False,
            ray_remote_args_fn=watch.name_next,
            # An actor has its next item ready: with tasks a CPU idles 0.2 s after each.
            compute=ray.data.ActorPoolStrategy(
                min_size=min(least_workers, len(numbers)),
                max_size=min(config.most_workers, len(numbers)),
                max_tasks_in_flight_per_actor=IN_FLIGHT,
            ),
        )
    # NOTE: not `iter_rows`, which holds each row back until the next one arrives.
    for batch in answers.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy"):
        for index, text in zip(batch["id"], batch["answer"], strict=True):
            yield int(index), json.loads(text)


class _Watch(threading.Thread):
    """Ends the actors of a pool that can no longer continue.

    Ray restarts a lost actor where there is room for it. Until then it keeps the actor's items,
    which other items may be waiting for.
    """

    def __init__(self, threads: int, gets_gpus: bool) -> None:
        super().__init__(name="pool-watch", daemon=True)
        self.gets_gpus = gets_gpus
        self.last = time.monotonic()
        """When an item was finished."""
        self.has_ended_all = False
        self._threads = threads
        self._names: list[str] = []
        self._over = threading.Event()

    def name_next(self) -> dict[str, str]:
        """Return the arguments of the next actor, and remember its name."""
        self._names.append(uuid4().hex)
        return {"name": self._names[-1]}

    def end(self) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        most_room, lacking_since = 0, time.monotonic()
        while not self._over.wait(ROOM_POLL_S):
            room = workers_that_fit(self._threads, one_gpu=self.gets_gpus)
            most_room = max(most_room, room)
            needed = min(len(self._names), most_room)
            now = time.monotonic()
            if room >= needed:
                lacking_since = now
            elif now - max(lacking_since, self.last) > GONE_AFTER_S:
                say(
                    f"the cluster has lost nodes, and has room for {room} of "
                    f"{counted(needed, 'worker')}: the remaining work is distributed again"
                )
                self._end_all()
                return

    def _end_all(self) -> None:
        import ray

        self.has_ended_all = True
        for name in self._names:
            with suppress(ValueError):  # it has ended already
                ray.kill(ray.get_actor(name))


@cache
def _silence_pool_warning() -> None:
    """Make Ray's core print its warning about pools like Ray Data's now, while stderr is discarded.

    The warning says that the arguments of a restartable actor could be lost, but those of Ray
    Data's pools are kept while they run. Ray prints it only once per process.
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
    """The actor that does the work: returns the result for the item at a row's index, or the user's
    error.

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
