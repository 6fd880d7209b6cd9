"""Text embeddings, trained so that texts that belong together have similar vectors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from bert_core.model.encoder import Encoded
from bert_core.objectives import VectorLoss
from bert_core.objectives.base import (
    Batch,
    LossPart,
    Objective,
    cross_entropy,
    soft_cross_entropy,
)
from bert_core.objectives.graph_scores import VECTORS


@dataclass(frozen=True)
class Compared:
    """The vectors of R rows, scaled to length 1: each row's own text, and the C texts that the rows
    are compared with, row after row."""

    own: Float[Tensor, "rows width"]
    others: Float[Tensor, "compared width"]
    own_at: Int[Tensor, "rows"]
    """Place of each row's own text among all texts of the batch."""
    others_at: Int[Tensor, "compared"]
    """Place of each compared text among all texts of the batch."""
    row_of: Int[Tensor, "compared"]
    """The row of each compared text."""


@dataclass(frozen=True)
class Contrastive:
    """Softmax over cosines divided by `temperature`, among the compared texts of all rows of the
    group; the target is the row's first compared text. Also known as in-batch negatives, InfoNCE,
    or sentence-transformers' MultipleNegativesRankingLoss.

    Source: van den Oord et al. 2018, section 2.3; negatives from other rows as in Henderson et al.
        2017, section 4.4.
    """

    temperature: float
    chooses: ClassVar[bool] = True

    def count(self, batch: Batch) -> int:
        return len(batch["choices"])

    def scores(
        self, texts: Compared, batch: Batch
    ) -> tuple[Float[Tensor, "rows compared"], Int[Tensor, "rows"]]:
        """Return each row's scores of all compared texts, and the index of its relevant text."""
        with torch.autocast(texts.own.device.type, enabled=False):  # bf16 has only three digits
            scores = texts.own @ texts.others.mT / self.temperature  # (R, C)
        sizes = batch["choices"].sub(1)
        targets = sizes.cumsum(0) - sizes
        return scores.masked_fill(self._ruled_out(texts, batch, targets), float("-inf")), targets

    def _ruled_out(
        self, texts: Compared, batch: Batch, targets: Int[Tensor, "rows"]
    ) -> Bool[Tensor, "rows compared"]:
        """Return which texts are left out of a row's softmax: those of other groups, copies of
        the row's own text, and copies of any text that is relevant to the same own text in its
        group."""
        group = _counted(batch["groups"])  # (R,)
        anchor, compared = batch["texts"][texts.own_at], batch["texts"][texts.others_at]
        alike = (anchor[:, None] == anchor) & (group[:, None] == group)  # (R, R)
        is_right = compared[targets][:, None] == compared  # (R, C)
        right_too = (alike.float() @ is_right.float() > 0) | (anchor[:, None] == compared)
        right_too[torch.arange(len(targets), device=targets.device), targets] = False
        return right_too | (group[:, None] != group[texts.row_of])

    def part(self, scores: Float[Tensor, "rows compared"], targets: Tensor) -> LossPart:
        return cross_entropy(scores, targets)

    def soft_part(
        self,
        scores: Float[Tensor, "rows compared"],
        teachers: Float[Tensor, "rows compared"],
        temperature: float,
    ) -> LossPart:
        return soft_cross_entropy(scores, teachers, temperature)


@dataclass(frozen=True)
class Cosine:
    """The squared error of each pair's cosine (Reimers and Gurevych 2019, section 3)."""

    temperature: float
    """Not read."""
    chooses: ClassVar[bool] = False

    def count(self, batch: Batch) -> int:
        return len(batch["similarities"]) - len(batch["choices"])

    def scores(
        self, texts: Compared, batch: Batch
    ) -> tuple[Float[Tensor, "compared"], Float[Tensor, "compared"]]:
        """Return the cosine of each pair, and its target similarity."""
        cosines = (texts.own.index_select(0, texts.row_of) * texts.others).sum(-1)
        return cosines, batch["similarities"][texts.others_at]

    def part(self, scores: Float[Tensor, "compared"], targets: Tensor) -> LossPart:
        return LossPart((scores - targets).square().sum(), len(scores), None)

    def soft_part(
        self,
        scores: Float[Tensor, "compared"],
        teachers: Float[Tensor, "compared"],
        temperature: float,
    ) -> LossPart:
        return self.part(scores, teachers)


LOSSES: dict[VectorLoss, type[Contrastive] | type[Cosine]] = {
    "contrastive": Contrastive,
    "cosine": Cosine,
}
"""A loss says how many items a batch has, what their scores and targets are, and what they cost."""


class Embedding(Objective):
    """Represents a text as the mean of its tokens' vectors. There is no head, so any encoder can be
    used.

    A row is a text followed by the texts that it is compared with, one sequence each:

        text, text_pair                `contrastive`  other rows' texts are wrong
        text, text_pair, negatives     `contrastive`  so are the negatives, of all rows
        text, text_pair, score         `cosine`       the cosine should be the score

    The batch defines the groups whose rows are each other's negatives; they do not depend on the
    number of workers or the micro-batch size.
    """

    name = "embedding"
    needs_pooler = False
    in_transformers = False
    label_key = "similarities"
    position_key = "vector_starts"
    graph_scores = VECTORS

    def __init__(self, loss: VectorLoss = "contrastive", temperature: float = 0.05) -> None:
        super().__init__()
        self.loss = LOSSES[loss](temperature)
        self.chooses = self.loss.chooses

    def places(self, batch: Batch) -> Int[Tensor, "tokens"]:
        """Return the places of all tokens of the runs, run after run."""
        starts, ends = batch["vector_starts"], batch["vector_ends"]
        lengths = ends - starts
        before = lengths.cumsum(0) - lengths
        shifts = (starts - before).repeat_interleave(lengths)
        return shifts + torch.arange(len(shifts), device=shifts.device)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items hidden"]:
        """Return one vector per run of tokens from `vector_starts` up to, not including,
        `vector_ends`."""
        return _means(encoded.hidden, batch)

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "tokens hidden"]:
        return encoded.hidden

    def counts(self, batch: Batch) -> int:
        return self.loss.count(batch)

    def part(self, logits: Float[Tensor, "items hidden"], batch: Batch) -> LossPart:
        return self.loss.part(*self.loss.scores(_compared(logits, batch), batch))

    def soft_part(
        self,
        logits: Float[Tensor, "items hidden"],
        teachers: Float[Tensor, "items width"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Compare cosines instead of vectors, since a teacher's vectors may be wider."""
        student, teacher = (
            self.loss.scores(_compared(vectors, batch), batch)[0] for vectors in (logits, teachers)
        )
        return self.loss.soft_part(student, teacher, temperature)


def _compared(vectors: Float[Tensor, "items width"], batch: Batch) -> Compared:
    """Split the batch's vectors into rows' own and those that they are compared with."""
    unit = functional.normalize(vectors, dim=-1)
    sizes = batch["choices"]
    own_at = sizes.cumsum(0) - sizes
    row_of = _counted(sizes)
    is_compared = torch.arange(len(row_of), device=sizes.device) != own_at[row_of]
    others_at = is_compared.nonzero()[:, 0]
    own, others = unit.index_select(0, own_at), unit.index_select(0, others_at)
    return Compared(own, others, own_at, others_at, row_of[others_at])


def _means(hidden: Float[Tensor, "tokens hidden"], batch: Batch) -> Float[Tensor, "items hidden"]:
    """Return the mean of each run; `hidden` has the tokens of all runs, run after run."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    lengths = batch["vector_ends"] - batch["vector_starts"]
    return torch.segment_reduce(wide, "mean", lengths=lengths)


def _counted(sizes: Int[Tensor, "groups"]) -> Int[Tensor, "members"]:
    """Return the group of each member."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
