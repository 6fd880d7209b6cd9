"""Ranks the passages of a query, trained on all of them together instead of one by one."""

from collections.abc import Callable
from math import log
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from bert_core.model.config import EncoderConfig
from bert_core.objectives import ListLoss
from bert_core.objectives.base import OWN_ROWS, Batch, LossPart, soft_cross_entropy
from bert_core.objectives.classification import Classification

MU = 10.0
"""Weight of NDCG-Loss2 beside LambdaRank's (Wang et al. 2018, section 6.1)."""


def list_net(
    scores: Float[Tensor, "passages"], relevance: Float[Tensor, "passages"]
) -> Float[Tensor, ""]:
    """Return the cross-entropy of the softmax of scores with that of relevances: ListNet for the
    first place (Cao et al. 2007, section 4.2)."""
    return -(relevance.softmax(0) * scores.log_softmax(0)).sum()


def lambda_loss(
    scores: Float[Tensor, "passages"], relevance: Float[Tensor, "passages"]
) -> Float[Tensor, ""]:
    """Return NDCG-Loss2++ (Wang et al. 2018, equation 16): over pairs of passages of which one is
    more relevant, the logistic loss of their scores, to base 2, weighted by what their order at
    these ranks is worth in NDCG. 0 if all are equally relevant."""
    order = scores.detach().argsort(descending=True, stable=True)
    scores, relevance = scores[order], relevance[order]
    ranks = torch.arange(1, len(scores) + 1, device=scores.device, dtype=scores.dtype)
    discounts = (ranks + 1).log2()
    gains = relevance.exp2() - 1
    best = (gains.sort(descending=True).values / discounts).sum()
    gains = gains / best.clamp(min=torch.finfo(scores.dtype).tiny)
    apart = (ranks[:, None] - ranks).abs()
    bound = (1 / (apart + 1.0).log2().clamp(min=1) - 1 / (apart + 2.0).log2()).abs()
    by_rank = (1 / discounts[:, None] - 1 / discounts).abs()
    weights = (MU * bound + by_rank) * (gains[:, None] - gains).abs()
    losses = weights * functional.softplus(scores - scores[:, None]) / log(2)
    return losses.masked_fill(relevance[:, None] <= relevance, 0.0).sum()


LOSSES: dict[ListLoss, Callable[[Tensor, Tensor], Tensor]] = {
    "listnet": list_net,
    "lambda": lambda_loss,
}


class Listwise(Classification):
    """Scores a query with a passage; the loss is of the passages of each query in the batch.

    The rows of a query may be computed anywhere. Its list counts where its first row is.
    """

    joint_labels: ClassVar[tuple[str, ...]] = ("labels", "queries")

    def __init__(self, config: EncoderConfig, loss: ListLoss) -> None:
        super().__init__(config, 1, problem_type="regression")
        self.list_loss, self.joint = loss, True

    def divisor(self, batch: Batch) -> float:
        """Return the number of queries: a row counts as its share of its query's rows."""
        return float(batch["query_shares"].double().sum())

    def part(self, logits: Float[Tensor, "rows 1"], batch: Batch) -> LossPart:
        loss, relevance = LOSSES[self.list_loss], batch["labels"]
        lists = self._lists(batch)
        losses = [loss(logits[rows, 0], relevance[rows, 0].to(logits.dtype)) for rows in lists]
        return self._summed(losses, logits, batch)

    def soft_part(
        self,
        logits: Float[Tensor, "rows 1"],
        teachers: Float[Tensor, "rows 1"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Compare the softmaxes over each query's passages."""
        losses = [
            soft_cross_entropy(logits[rows, 0], teachers[rows, 0], temperature).sum
            for rows in self._lists(batch)
        ]
        return self._summed(losses, logits, batch)

    def _lists(self, batch: Batch) -> list[Tensor]:
        """Return the rows of each query whose first row is this rank's."""
        queries = batch["queries"]
        order = queries.argsort(stable=True)
        sizes = queries[order].unique_consecutive(return_counts=True)[1]
        lists = list(order.split(sizes.tolist()))
        own = batch.get(OWN_ROWS)
        if own is None:
            return lists
        counted = set(own.tolist())
        firsts = torch.stack([rows[0] for rows in lists]).tolist()
        return [rows for rows, first in zip(lists, firsts, strict=True) if first in counted]

    def _summed(self, losses: list[Tensor], logits: Tensor, batch: Batch) -> LossPart:
        none = logits.sum() * 0.0  # a rank may have no list
        own = batch.get(OWN_ROWS)
        count = len(logits) if own is None else len(own)
        return LossPart(torch.stack([none, *losses]).sum(), count, None)
