"""Runs a model on many ranks: a copy on each (DistributedDataParallel), or a shard on each
(FSDP2)."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bert_core.objectives.base import ObjectiveModel


def rank_of_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without torch.distributed."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` has sharded the module."""
    return isinstance(module, _if_imported("torch.distributed.fsdp", "FSDPModule"))


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor is a single rank's part of a sharded tensor."""
    return isinstance(tensor, _if_imported("torch.distributed.tensor", "DTensor"))


def _if_imported(module: str, name: str) -> Any:
    """Return a class of torch's if its module was imported, else an empty tuple, for `isinstance`.

    Importing the module takes most of a second, and if it was not imported, nothing is sharded.
    """
    return getattr(sys.modules.get(module), name, ())


def shard(model: ObjectiveModel) -> None:
    """Shard every weight over ranks, and with it gradients and optimizer state.

    Weights are gathered layer by layer in the first forward pass of a step and kept until the last
    backward pass has summed the gradients: ranks may differ in their number of micro-batches, and
    network traffic is no higher than with copies. Every rank must start with the same weights.
    """
    from torch.distributed.fsdp import fully_shard

    for encoder in model.encoders:
        if len(encoder.layers) > 1:  # a shared layer is used repeatedly
            for layer in encoder.layers.children():
                fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)


def replicated(model: ObjectiveModel) -> nn.Module:
    """Return the module that trains `model` on all ranks: `model` itself on a single rank or if
    sharded."""
    if rank_of_world()[1] == 1 or is_sharded(model):
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)  # views, not copies


@contextmanager
def sum_gradients(model: Any, now: bool) -> Iterator[None]:
    """Sum gradients over ranks in the backward pass inside if `now`, else leave it to a later
    one."""
    if is_sharded(model):
        model.set_requires_gradient_sync(now)
        model.set_reshard_after_backward(now)
    if isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
    else:
        yield


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all weights on every rank, so that ranks can run forward passes independently.
    Collective."""
    parts: list[Any] = [part for part in model.modules() if is_sharded(part)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def own_part(tensor: Any) -> Tensor:
    """Return this rank's rows of a tensor that may be sharded; shards are always along rows."""
    return tensor.to_local() if is_part(tensor) else tensor


def like_part(whole: Tensor, part: Any) -> Tensor:
    """Return `whole`, sharded like `part`, which has the same global shape; every rank passes the
    whole."""
    if not is_part(part):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        whole.to(part.device), part.device_mesh, part.placements, src_data_rank=None
    )


def norms(tensors: Sequence[Tensor], sharded: bool) -> list[Tensor]:
    """Return the L2 norm of each tensor. If `sharded`, the tensors are this rank's parts of whole
    tensors, and the call is collective."""
    local = list(torch._foreach_norm(list(tensors)))
    if not sharded:
        return local
    squares = torch.stack(local).square()
    dist.all_reduce(squares)
    return list(squares.sqrt().unbind())


def each_on_one_rank(
    work: Callable[[Tensor], Tensor], matrices: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return `work` of every matrix, each done by a single rank and sent to the others. Collective.

    Every rank passes matrices of the same shapes; a result has its matrix's shape, and `dtype`.
    """
    rank, world_size = rank_of_world()
    if world_size == 1:
        return [work(matrix) for matrix in matrices]
    shares = _shares([matrix.numel() * min(matrix.shape) for matrix in matrices], world_size)
    sizes = [sum(matrices[place].numel() for place in share) for share in shares]
    parts = torch.zeros(world_size, max(sizes), dtype=dtype, device=matrices[0].device)
    own_part = parts[rank].clone()
    if shares[rank]:
        done = [work(matrices[place]).flatten() for place in shares[rank]]
        torch.cat(done, out=own_part[: sizes[rank]])
    # As bytes, since not every backend sends every dtype.
    dist.all_gather(list(parts.view(torch.uint8)), own_part.view(torch.uint8))
    results = list(matrices)
    for share, part in zip(shares, parts, strict=True):
        start = 0
        for place in share:
            matrix = matrices[place]
            results[place] = part[start : start + matrix.numel()].view(matrix.shape)
            start += matrix.numel()
    return results


def _shares(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """Return the indices that each rank works on: the most expensive are assigned first, each to
    the rank with the least to do."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        rank = loads.index(min(loads))
        shares[rank].append(place)
        loads[rank] += costs[place]
    return shares


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of all ranks' `values`, on every rank; `values` itself for a single rank.
    Collective."""
    if rank_of_world()[1] == 1:
        return values
    summed = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(summed)
    return summed.cpu()


def rows_of_all_ranks(values: Tensor) -> Tensor:
    """Return the rows of all ranks' `values`, rank after rank, on every rank; ranks may have
    different numbers of rows, at least one. Collective."""
    _, world_size = rank_of_world()
    if world_size == 1:
        return values
    count = torch.tensor([len(values)], device=values.device)
    counts = [torch.empty_like(count) for _ in range(world_size)]
    dist.all_gather(counts, count)
    sizes = [int(each) for each in counts]
    own = values.new_zeros(max(sizes), *values.shape[1:])
    own[: len(values)] = values
    parts = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def joined_over_ranks(values: list[Any]) -> list[Any]:
    """Return the lists of all ranks, concatenated, on every rank. Collective."""
    _, world_size = rank_of_world()
    if world_size == 1:
        return values
    lists: list[Any] = [None] * world_size
    dist.all_gather_object(lists, values)
    return [value for of_rank in lists for value in of_rank]


def from_rank_0(value: float) -> float:
    """Return rank 0's value, on every rank. Collective."""
    term = 0.0 if rank_of_world()[0] else value
    return float(sum_over_ranks(torch.tensor([term], dtype=torch.float64)))
