"""One label a sequence (Devlin et al. 2018, section 4.1)."""

from jaxtyping import Float
from torch import Tensor

from bert_core.model.encoder import Encoded
from bert_core.model.heads import LinearHead
from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Batch, Objective


class Classification(Objective):
    """Say which of `num_labels` a sequence has; `dropout` None takes the encoder's own."""

    name = "classification"
    needs_pooler = True
    label_key = "labels"

    def __init__(
        self, config: EncoderConfig, num_labels: int, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.head = LinearHead(config, num_labels, dropout)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch labels"]:
        assert encoded.pooled is not None
        return self.head(encoded.pooled)
