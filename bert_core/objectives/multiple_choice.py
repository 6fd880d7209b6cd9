"""Predicts which of several continuations is correct (Devlin et al. 2018, section 4.4)."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import LinearHead
from bert_core.objectives.base import Batch, Objective
from bert_core.objectives.graph_scores import MULTIPLE_CHOICE


class MultipleChoice(Objective):
    """Predicts which choice is correct; the rows of a question are consecutive.

    The batch's `choices` has the number of rows of each question.
    """

    name = "multiple_choice"
    needs_pooler = True
    label_key = "labels"
    graph_scores = MULTIPLE_CHOICE

    def __init__(self, config: EncoderConfig, dropout: float | None = None) -> None:
        super().__init__()
        self.head = LinearHead(config, 1, dropout)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "questions choices"]:
        """Return the scores of every question's choices, padded with -inf."""
        scores = self.every(encoded, word_embeddings)[:, 0].split(batch["choices"].tolist())
        return pad_sequence(scores, batch_first=True, padding_value=float("-inf"))

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch 1"]:
        assert encoded.pooled is not None
        return self.head(encoded.pooled)
