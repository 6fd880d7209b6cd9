"""Text embeddings, trained so that texts that belong together have similar vectors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bert_core.model.encoder import Encoded
from bert_core.objectives import VectorLoss
from bert_core.objectives.base import Batch, LossPart, Objective, widened
from bert_core.objectives.graph_scores import VECTORS
from bert_core.objectives.vector_losses import LOSSES, expanded


class Embedding(Objective):
    """Represents a text as the mean of its tokens' vectors. There is no head, so any encoder can be
    used.

    A row is a text followed by the texts that it is compared with, one sequence each:

        text, text_pair                `contrastive`  other rows' texts are wrong
        text, text_pair, negatives     `contrastive`  so are the negatives, of all rows
        text, text_pair, score         `cosine`       the cosine should be the score
        text, text_pair, negatives,    `kl`           cosines are compared with a teacher's scores,
          scores                       `margin_mse`   as lists, or by their differences

    Rows of one global batch are each other's negatives, whatever the number of workers and the
    micro-batch size.
    """

    name = "embedding"
    needs_pooler = False
    in_transformers = False
    label_key = "similarities"
    position_key = "vector_starts"
    joint_labels = ("texts",)
    graph_scores = VECTORS

    def __init__(
        self,
        loss: VectorLoss = "contrastive",
        temperature: float = 0.05,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Choose the loss.

        Args:
            dimensions: shorter lengths; the loss of vectors that are cut to each is added
                (Kusupati et al. 2022, equation 1, with equal weights).
        """
        super().__init__()
        self.loss, self.dimensions = LOSSES[loss](temperature, True), tuple(dimensions)
        self.chooses, self.joint = self.loss.chooses, self.loss.joint

    def places(self, batch: Batch) -> Int[Tensor, "tokens"]:
        """Return the places of all tokens of the runs, run after run."""
        starts, ends = batch["vector_starts"], batch["vector_ends"]
        return expanded(starts, ends - starts)[1]

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
        return self._over_lengths(logits, partial(self.loss.part, batch=batch))

    def soft_part(
        self,
        logits: Float[Tensor, "items hidden"],
        teachers: Float[Tensor, "items width"],
        batch: Batch,
        temperature: float,
    ) -> LossPart:
        """Compare cosines instead of vectors, since a teacher's vectors may be wider. The teacher's
        are never cut."""
        soft_part = partial(
            self.loss.soft_part, teachers=teachers, batch=batch, temperature=temperature
        )
        return self._over_lengths(logits, soft_part)

    def _over_lengths(
        self, vectors: Float[Tensor, "items hidden"], loss: Callable[[Tensor], LossPart]
    ) -> LossPart:
        """Return the sum of the losses of the vectors, whole and cut; the correct items are those
        of whole vectors."""
        whole = loss(vectors)
        cut = [loss(vectors[:, :length]).sum for length in self.dimensions]
        return replace(whole, sum=torch.stack([whole.sum, *cut]).sum())


def _means(hidden: Float[Tensor, "tokens hidden"], batch: Batch) -> Float[Tensor, "items hidden"]:
    """Return the mean of each run; `hidden` has the tokens of all runs, run after run."""
    wide = widened(hidden)
    lengths = batch["vector_ends"] - batch["vector_starts"]
    return torch.segment_reduce(wide, "mean", lengths=lengths)
