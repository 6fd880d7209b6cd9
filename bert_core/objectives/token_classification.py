"""One label a token (Devlin et al. 2018, section 5.3)."""

from jaxtyping import Float
from torch import Tensor

from bert_core.model.encoder import Encoded
from bert_core.model.heads import TokenHead
from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Batch, Objective


class TokenClassification(Objective):
    """Say which of `num_labels` each token at `token_positions` has."""

    name = "token_classification"
    needs_pooler = False
    label_key = "token_labels"
    position_key = "token_positions"

    def __init__(
        self, config: EncoderConfig, num_labels: int, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.head = TokenHead(config, num_labels, dropout)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items labels"]:
        return self.head(encoded.hidden)
