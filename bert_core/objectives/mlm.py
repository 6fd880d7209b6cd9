"""Masked language modelling (Devlin et al. 2018, section 3.1, task 1)."""

from jaxtyping import Float
from torch import Tensor

from bert_core.model.encoder import Encoded
from bert_core.model.heads import MaskedLanguageModelHead
from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Batch, Objective, Part
from bert_core.objectives.linear_cross_entropy import linear_cross_entropy


class MaskedLanguageModeling(Objective):
    """Say which word stood at each chosen position; the head runs on those positions only."""

    name = "mlm"
    needs_pooler = False
    label_key = "mlm_labels"
    position_key = "mlm_positions"

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head = MaskedLanguageModelHead(config)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items vocab"]:
        return self.head(encoded.hidden, word_embeddings)

    def forward(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Part:
        rows = self.head.transform(encoded.hidden)
        return linear_cross_entropy(rows, word_embeddings, self.head.bias, batch[self.label_key])
