"""Text embeddings, trained so that texts that belong together have similar vectors."""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from bert_core.model.encoder import Encoded
from bert_core.objectives.base import Batch, LossPart, Objective, cross_entropy

Loss = Literal["contrastive", "cosine"]


class Embedding(Objective):
    """A vector is the mean of a run of tokens. There is no head, so any encoder can be used.

    A row is a text followed by the texts that it is compared with, one sequence each. `cosine`: the
    squared error of each cosine (Reimers and Gurevych 2019, section 3). `contrastive`: softmax over
    cosines divided by `temperature`, over the compared texts of all rows of the group; the row's
    first compared text is right (van den Oord et al. 2018, section 2.3; negatives from other rows
    as in Henderson et al. 2017, section 4.4). The batch defines the groups, which do not depend on
    the number of workers or the micro-batch size.
    """

    name = "embedding"
    needs_pooler = False
    in_transformers = False
    label_key = "similarities"
    position_key = "vector_starts"
    graph_outputs = ("last_hidden_state",)

    def __init__(self, loss: Loss = "contrastive", temperature: float = 0.05) -> None:
        super().__init__()
        self.loss, self.temperature = loss, temperature
        self.chooses = loss == "contrastive"

    def places(self, batch: Batch) -> Int[Tensor, "tokens"]:
        """All tokens of the runs, run after run."""
        starts, ends = batch["vector_starts"], batch["vector_ends"]
        lengths = ends - starts
        before = lengths.cumsum(0) - lengths
        shifts = (starts - before).repeat_interleave(lengths)
        return shifts + torch.arange(len(shifts), device=shifts.device)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items hidden"]:
        """One vector per run of tokens from `vector_starts` up to, not including, `vector_ends`."""
        return _means(encoded.hidden, batch)

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "tokens hidden"]:
        return encoded.hidden

    def picked(self, every: Float[Tensor, "..."], batch: Batch) -> Float[Tensor, "items hidden"]:
        # Each run in place: many times as fast as gathering the tokens of all first.
        tokens = every.flatten(0, -2).numpy()
        runs = zip(batch["vector_starts"].tolist(), batch["vector_ends"].tolist(), strict=True)
        return torch.from_numpy(np.stack([tokens[start:end].mean(0) for start, end in runs]))

    def counts(self, batch: Batch) -> int:
        rows = len(batch["choices"])
        return rows if self.loss == "contrastive" else len(batch["similarities"]) - rows

    def part(self, logits: Float[Tensor, "items hidden"], batch: Batch) -> LossPart:
        scores, targets = self._scored(logits, batch)
        if self.loss == "contrastive":
            return cross_entropy(scores, targets)
        return LossPart((scores - targets).square().sum(), len(scores), None)

    def soft_part(
        self,
        logits: Float[Tensor, "items hidden"],
        teachers: Float[Tensor, "items width"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Compares cosines instead of vectors, since a teacher's vectors may be wider."""
        student, teacher = (self._scored(vectors, batch)[0] for vectors in (logits, teachers))
        if self.loss == "contrastive":
            return super().soft_part(student, teacher, batch, temperature)
        return LossPart((student - teacher).square().sum(), len(student), None)

    def _scored(
        self, logits: Float[Tensor, "items width"], batch: Batch
    ) -> tuple[Float[Tensor, "..."], Tensor]:
        """Scores and their targets: the cosine of each pair and its similarity, or a row's scores
        for all compared texts and the index of its right one."""
        vectors = functional.normalize(logits, dim=-1)
        sizes = batch["choices"]
        firsts = sizes.cumsum(0) - sizes
        row_of = _counted(sizes)
        is_compared = torch.arange(len(row_of), device=sizes.device) != firsts[row_of]
        of_compared = is_compared.nonzero()[:, 0]
        anchors, compared = vectors.index_select(0, firsts), vectors.index_select(0, of_compared)
        row_of = row_of[of_compared]
        if self.loss == "cosine":
            cosines = (anchors.index_select(0, row_of) * compared).sum(-1)
            return cosines, batch["similarities"][of_compared]
        with torch.autocast(vectors.device.type, enabled=False):  # bf16 has three digits
            scores = anchors @ compared.mT / self.temperature  # (rows, compared)
        targets = sizes.sub(1).cumsum(0) - sizes.sub(1)
        ruled_out = self._ruled_out(batch, firsts, of_compared, row_of, targets)
        return scores.masked_fill(ruled_out, float("-inf")), targets

    def _ruled_out(
        self,
        batch: Batch,
        firsts: Int[Tensor, "rows"],
        of_compared: Int[Tensor, "compared"],
        row_of: Int[Tensor, "compared"],
        targets: Int[Tensor, "rows"],
    ) -> Bool[Tensor, "rows compared"]:
        """Texts left out of a row's softmax: those of other groups, copies of the row's own text,
        and copies of any text that its group marks as right for it."""
        group = _counted(batch["groups"])
        anchor, compared = batch["texts"][firsts], batch["texts"][of_compared]
        alike = (anchor[:, None] == anchor) & (group[:, None] == group)  # (rows, rows)
        is_right = compared[targets][:, None] == compared  # (rows, compared)
        right_too = (alike.float() @ is_right.float() > 0) | (anchor[:, None] == compared)
        right_too[torch.arange(len(targets), device=targets.device), targets] = False
        return right_too | (group[:, None] != group[row_of])


def _means(hidden: Float[Tensor, "tokens hidden"], batch: Batch) -> Float[Tensor, "items hidden"]:
    """The mean of each run; `hidden` has the tokens of all runs, run after run."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    lengths = batch["vector_ends"] - batch["vector_starts"]
    return torch.segment_reduce(wide, "mean", lengths=lengths)


def _counted(sizes: Int[Tensor, "groups"]) -> Int[Tensor, "members"]:
    """The group of each member."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
