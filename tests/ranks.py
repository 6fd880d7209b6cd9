"""Work that two processes do together as ranks of one group: this process and another."""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist


def on_two_ranks(work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work`, a function of a module, returns on each rank; `folder` is empty."""
    other = multiprocessing.get_context("spawn").Process(target=_other, args=(work, folder))
    other.start()
    mine = _as_rank(0, work, folder)
    other.join(timeout=60)
    assert other.exitcode == 0
    return [mine, torch.load(folder / "1.pt", weights_only=True)]


def _other(work: Callable[[], Any], folder: Path) -> None:
    torch.set_num_threads(1)
    torch.save(_as_rank(1, work, folder), folder / "1.pt")
    os._exit(0)  # NOTE: gloo's threads may abort a process that ends as usual (pytorch#179291)


def _as_rank(rank: int, work: Callable[[], Any], folder: Path) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    try:
        return work()
    finally:
        dist.destroy_process_group()
