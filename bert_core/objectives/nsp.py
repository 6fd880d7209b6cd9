"""Next-sentence prediction (Devlin et al. 2018, section 3.1, task 2)."""

from jaxtyping import Float
from torch import Tensor

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import LinearHead
from bert_core.objectives.base import Batch, Objective


class NextSentencePrediction(Objective):
    """Predict whether the second segment follows the first; 0 = is next."""

    name = "nsp"
    needs_pooler = True
    label_key = "next_sentence_label"

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head = LinearHead(config, 2, dropout=0.0)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch 2"]:
        assert encoded.pooled is not None
        return self.head(encoded.pooled)
