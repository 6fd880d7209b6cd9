"""Losses of all examples of a global batch together, in memory that does not grow with the batch.

The vectors of every micro-batch are computed without a graph, the loss and its slopes from the
vectors of all ranks, and then each micro-batch again, which passes the slopes on to the weights
(Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, section
3.2). The result depends on neither the number of ranks nor the micro-batch size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch import distributed as dist

from bert_core.objectives.base import OWN_ROWS, Batch, JointPart, LossPart
from bert_core.train.parallel import rows_of_all_ranks

Parts = Mapping[str, LossPart | JointPart]


@dataclass(frozen=True)
class JointLoss:
    """One part of the loss over a global batch, as this rank computes it."""

    part: LossPart
    """The share of this rank's examples; the ranks' sums add up to the loss."""
    slopes: list[Float[Tensor, "items width"]]
    """The gradient of the whole loss with respect to this rank's vectors, for each of its
    micro-batches. Empty if gradients are off."""


def joint_parts(parts: Parts) -> dict[str, JointPart]:
    """Return those of a model's parts that need the vectors of other micro-batches."""
    return {name: part for name, part in parts.items() if isinstance(part, JointPart)}


def local_parts(parts: Parts) -> dict[str, LossPart]:
    """Return those of a model's parts that are complete."""
    return {name: part for name, part in parts.items() if isinstance(part, LossPart)}


def joint_losses(parts: Sequence[Mapping[str, JointPart]]) -> dict[str, JointLoss]:
    """Return the joint losses of a global batch, by name, with their slopes. Collective.

    Args:
        parts: those of each of this rank's micro-batches, at least one.
    """
    return {name: _with_slopes([each[name] for each in parts]) for name in parts[0]}


@torch.no_grad()
def whole_losses(parts: Sequence[Mapping[str, JointPart]]) -> dict[str, LossPart]:
    """Return the joint losses of a batch, by name, of which this rank has all micro-batches."""
    losses = {}
    for name in parts[0] if parts else ():
        own = _Examples.of([each[name] for each in parts])
        losses[name] = own.loss(*own.ordered(own.row_of.argsort(stable=True)))
    return losses


@dataclass(frozen=True)
class _Examples:
    """This rank's examples of a global batch, micro-batch after micro-batch."""

    parts: Sequence[JointPart]
    vectors: list[Float[Tensor, "items width"]]
    row_of: Int[Tensor, "items"]
    """The place in the global batch of each vector's example."""
    labels: dict[str, Tensor]

    @classmethod
    def of(cls, parts: Sequence[JointPart]) -> "_Examples":
        sets = zip(*(part.vectors for part in parts), strict=True)
        return cls(
            parts,
            [torch.cat(vectors).detach() for vectors in sets],
            torch.cat([part.rows.repeat_interleave(part.choices) for part in parts]),
            {name: torch.cat([part.labels[name] for part in parts]) for name in parts[0].labels},
        )

    def of_all_ranks(self) -> "_Examples":
        """Return the examples of all ranks, rank after rank. Collective."""
        return _Examples(
            self.parts,
            [rows_of_all_ranks(vectors) for vectors in self.vectors],
            rows_of_all_ranks(self.row_of),
            {name: rows_of_all_ranks(labels) for name, labels in self.labels.items()},
        )

    def ordered(self, order: Int[Tensor, "items"]) -> tuple[list[Tensor], Batch]:
        """Return the vectors and the batch of their labels, in this order, which is that of the
        global batch: the examples of any rank and micro-batch are where they belong."""
        labels = {name: labels[order] for name, labels in self.labels.items()}
        return [vectors[order] for vectors in self.vectors], {
            **labels,
            "choices": self.row_of.bincount(),
        }

    def loss(self, vectors: Sequence[Tensor], batch: Batch) -> LossPart:
        return self.parts[0].loss(*vectors, batch)


def _with_slopes(parts: Sequence[JointPart]) -> JointLoss:
    own = _Examples.of(parts)
    every = own.of_all_ranks()
    order = every.row_of.argsort(stable=True)
    (trained, *teachers), batch = every.ordered(order)
    batch[OWN_ROWS] = torch.cat([part.rows for part in parts]).sort().values
    leaf = trained.requires_grad_()
    with torch.enable_grad():
        part = every.loss([leaf, *teachers], batch)
        (slopes,) = torch.autograd.grad(part.sum, leaf)
    # NOTE: the gradient of a sum is an expanded number, past which gloo would write (torch 2.13).
    slopes = slopes.contiguous()
    if dist.is_initialized():
        dist.all_reduce(slopes)
    # An example's vectors are in the same order everywhere.
    places = torch.isin(every.row_of[order], batch[OWN_ROWS]).nonzero()[:, 0]
    in_order = torch.empty_like(own.vectors[0])
    in_order[own.row_of.argsort(stable=True)] = slopes[places]
    sizes = [len(part.vectors[0]) for part in parts]
    detached = LossPart(part.sum.detach(), part.count, part.correct)
    return JointLoss(detached, list(in_order.split(sizes)))
