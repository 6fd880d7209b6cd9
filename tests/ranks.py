"""Work that several processes do together as ranks of one group, or as workers that share items.

NOTE: each rank is a process of its own that leaves at once when it is done: gloo's threads may
abort a process that ends as usual (pytorch#179291), and one that runs tests would end them all.
They are forked from a process that has imported torch and does nothing else.
"""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from pipelines.runtime.stage_config import StageConfig
    from pipelines.training.config import TrainingConfig
    from tracking.runs.goodput import Goodput

PRELOADED = ["tests.tiny", "ray", "pipelines.training.worker", "pipelines.answering.predictors"]
"""What ranks and workers import."""


def on_ranks(count: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work`, a function of a module, returns on each rank; `folder` keeps it.

    Tensors are returned in containers of Python.
    """
    context = _forked()
    ranks = [
        context.Process(target=_as_rank, args=(rank, count, work, folder), daemon=True)
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    assert [process.exitcode for process in ranks] == [0] * count
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


def _forked() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def fit_on_ranks(
    worker: Callable[..., None], config: "TrainingConfig", digest: str, spent: "Goodput"
) -> None:
    """What `driver` does on Ray, on ranks that are forked: no worker is lost or replaced."""
    from pipelines.training.records import record_all
    from tracking.runs.recorder import RunRecorder
    from tracking.store.server import tracking_uri

    assert isinstance(config.num_workers, int)
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_reports_of, worker, config, digest)
        reports = on_ranks(config.num_workers, work, Path(folder))
    uri = tracking_uri(config.tracking_uri)
    recorder = RunRecorder.open(config.local_folder, uri=uri, copy=config.record_copy)
    try:
        for records in reports[0]:
            record_all(recorder, spent.take(records))
    finally:
        recorder.close("RUNNING")


def _reports_of(worker: Callable[..., None], config: "TrainingConfig", digest: str) -> list[Any]:
    from bert_core.train.hardware import flush_denormals

    flush_denormals()  # as a worker on Ray does
    reports = []

    def report(records: Any, last: bool) -> str:
        reports.append(records)
        return "nothing"

    worker(config, digest, report)
    return reports


def run_on_processes(
    work: Callable[[Any], Any], items: Sequence[Any], config: "StageConfig", use_gpu: bool
) -> Iterator[tuple[int, Any]]:
    """What `distribute` does on Ray, on forked processes, which get the items in reverse order."""
    from ray import cloudpickle

    assert isinstance(config.num_workers, int)
    told = cloudpickle.dumps((work, items))
    with _forked().Pool(config.num_workers, _take, (told,)) as pool:
        yield from pool.imap_unordered(_do, reversed(range(len(items))))


_told: Any = None


def _take(told: bytes) -> None:
    global _told
    from ray import cloudpickle

    _told = cloudpickle.loads(told)


def _do(index: int) -> tuple[int, Any]:
    work, items = _told
    return index, json.loads(json.dumps(work(items[index])))


def _as_rank(rank: int, count: int, work: Callable[[], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=60),  # or a rank that failed would be waited for in vain
    )
    try:
        torch.save(work(), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
    os._exit(0)
