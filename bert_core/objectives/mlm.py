"""Masked language modelling (Devlin et al. 2018, section 3.1, task 1)."""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import MaskedLanguageModelHead
from bert_core.objectives.base import Batch, JointPart, LossPart, Objective
from bert_core.objectives.graph_scores import MASKED_WORDS, GraphScores
from bert_core.objectives.linear_cross_entropy import linear_cross_entropy


class MaskedLanguageModeling(Objective):
    """Predicts the original token at each chosen position; the head runs on those positions
    only."""

    name = "mlm"
    needs_pooler = False
    reads_words = True
    label_key = "mlm_labels"
    position_key: ClassVar[str | None] = "mlm_positions"
    graph_scores: GraphScores | None = MASKED_WORDS

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head = MaskedLanguageModelHead(config)

    @property
    def item_weights(self) -> int:
        maps = [part.weight for part in self.head.modules() if isinstance(part, nn.Linear)]
        decoder = self.head.bias.numel() * self.head.transform.dense.out_features
        return decoder + sum(weight.numel() for weight in maps)

    def rows(self, encoded: Encoded, batch: Batch) -> Float[Tensor, "items hidden"]:
        """Return the head's input for every chosen position."""
        return encoded.hidden

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items vocab"]:
        return self.head(self.rows(encoded, batch), word_embeddings)

    def forward(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> LossPart | JointPart:
        rows = self.head.transform(self.rows(encoded, batch))
        return linear_cross_entropy(rows, word_embeddings, self.head.bias, batch[self.label_key])
