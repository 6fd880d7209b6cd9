"""Spread independent pieces of work over a cluster by Ray Data."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

    pieces = ray.data.range(len(items), override_num_blocks=len(items))
    answers = pieces.map(
        partial(_answer, work, items),
        num_cpus=config.threads_per_worker,
        compute=ray.data.TaskPoolStrategy(size=min(config.num_workers, len(items))),
    )
    for row in answers.iter_rows():
        answer = json.loads(row["answer"])
        if answer["error"] is not None:
            raise getattr(errors, answer["error"]["kind"], errors.RaybertError)(
                answer["error"]["message"]
            )
        yield int(row["id"]), answer["result"]


def _answer(work: Callable[[Item], Any], items: Sequence[Item], row: dict[str, Any]) -> dict:
    """One task: the result of the item that `row` numbers, or the user's mistake, as data.

    Ray would wrap an exception in pages of its own frames.
    """
    try:
        answer = {"result": work(items[row["id"]]), "error": None}
    except errors.RaybertError as error:
        answer = {"result": None, "error": {"kind": type(error).__name__, "message": str(error)}}
    return {"id": row["id"], "answer": json.dumps(answer)}
