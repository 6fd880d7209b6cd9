"""A model on many ranks: a copy on each (DistributedDataParallel), or a part (FSDP2)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from bert_core.objectives.base import ObjectiveModel


def rank_of_world() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) where there is but one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shard(model: ObjectiveModel) -> None:
    """Leave each rank its part of every weight, and so of gradients and optimizer state.

    Weights are gathered layer by layer in the first forward pass of a step and stay until the last
    backward pass has summed the gradients: ranks need not have as many micro-batches, and no more
    crosses the network than with copies. Every rank has the same weights before.
    """
    for encoder in model.encoders:
        if len(encoder.layers) > 1:  # a shared one is used in every place
            for layer in encoder.layers.children():
                fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)


def replicated(model: ObjectiveModel) -> nn.Module:
    """What trains `model` on all ranks: itself where it is alone or sharded."""
    if rank_of_world()[1] == 1 or isinstance(model, FSDPModule):
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True)  # and not a copy beside


@contextmanager
def sum_gradients(model: nn.Module, now: bool) -> Iterator[None]:
    """Let gradients of the backward pass inside cross the network, or wait for a later one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        model.set_reshard_after_backward(now)
    if isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
    else:
        yield


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Whole weights on every rank, so that each may run forward passes by itself. Collective."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that may be sharded: rows, as all shards lie along them."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_part(whole: Tensor, part: Tensor) -> Tensor:
    """`whole` cut as `part` is, whose shape it has in all; every rank has the whole."""
    if not isinstance(part, DTensor):
        return whole
    return distribute_tensor(
        whole.to(part.device), part.device_mesh, part.placements, src_data_rank=None
    )


def norms(tensors: Sequence[Tensor], sharded: bool) -> list[Tensor]:
    """L2 norm of each tensor; as a whole, where they are this rank's parts. Collective then."""
    own = list(torch._foreach_norm(list(tensors)))
    if not sharded:
        return own
    squares = torch.stack(own).square()
    dist.all_reduce(squares)
    return list(squares.sqrt().unbind())


def sum_over_ranks(values: Tensor) -> Tensor:
    """`values` of all ranks added, on every rank. Collective; the same `values` for one rank."""
    if rank_of_world()[1] == 1:
        return values
    summed = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(summed)
    return summed.cpu()


def joined_over_ranks(values: list[Any]) -> list[Any]:
    """The lists of all ranks one after the other, on every rank. Collective."""
    _, world_size = rank_of_world()
    if world_size == 1:
        return values
    lists: list[Any] = [None] * world_size
    dist.all_gather_object(lists, values)
    return [value for each in lists for value in each]


def from_rank_0(value: float) -> float:
    """Rank 0's value, on every rank. Collective."""
    own = 0.0 if rank_of_world()[0] else value
    return float(sum_over_ranks(torch.tensor([own], dtype=torch.float64)))
