"""Spread independent pieces of work over a cluster by Ray Data."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from bert_core import errors
from pipelines import cluster
from pipelines.stage import StageConfig

Item = TypeVar("Item")


def run_tasks(
    work: Callable[[Item], Any], items: Sequence[Item], config: StageConfig
) -> Iterator[tuple[int, Any]]:
    """Do `work` on every item, and yield (position, result) as each is finished, in any order.

    Ray Data schedules a task an item, at most `config.num_workers` at once; what is dear to build
    is built once a process where `work` caches it. With `num_workers` 0 items are worked on here,
    one after the other.

    Args:
        work: gives something that JSON can hold; what it writes is on storage all workers see.
    Raises: what `work` raises, if it is a RaybertError; the first one ends the whole.
    """
    if not items:
        return
    if config.num_workers == 0:
        for index, item in enumerate(items):
            yield index, json.loads(json.dumps(work(item)))
        return
    cluster.connect(address=config.address, num_cpus=config.cpus)
    import ray

    def task(row: dict[str, Any]) -> dict[str, Any]:
        # A user's mistake travels as data: Ray would wrap it in pages of its own frames.
        try:
            result, error = work(items[row["id"]]), None
        except errors.RaybertError as raised:
            result, error = None, {"kind": type(raised).__name__, "message": str(raised)}
        return {"id": row["id"], "answer": json.dumps({"result": result, "error": error})}

    pieces = ray.data.range(len(items), override_num_blocks=len(items))
    answers = pieces.map(
        task,
        num_cpus=config.threads_per_worker,
        compute=ray.data.TaskPoolStrategy(size=config.num_workers),
    )
    for row in answers.iter_rows():
        answer = json.loads(row["answer"])
        if answer["error"] is not None:
            raise getattr(errors, answer["error"]["kind"], errors.RaybertError)(
                answer["error"]["message"]
            )
        yield int(row["id"]), answer["result"]
