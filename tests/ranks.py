"""Work that several processes do together as ranks of one group.

NOTE: each rank is a process of its own that leaves at once when it is done: gloo's threads may
abort a process that ends as usual (pytorch#179291), and one that runs tests would end them all.
They are forked from a process that has imported torch and does nothing else.
"""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist


def on_ranks(count: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work`, a function of a module, returns on each rank; `folder` keeps it.

    Tensors are returned in containers of Python.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bert_core.train.loop", "tests.tiny"])  # what ranks import
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
