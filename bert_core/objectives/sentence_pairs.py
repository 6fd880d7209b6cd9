"""Pretraining on two segments: whether the second follows the first, and their order."""

from jaxtyping import Float
from torch import Tensor

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import LinearHead
from bert_core.objectives.base import Batch, Objective
from bert_core.objectives.graph_scores import NEXT_SENTENCE, GraphScores


class NextSentencePrediction(Objective):
    """Predicts whether the second segment follows the first; 0 = is next (Devlin et al. 2018,
    section 3.1, task 2)."""

    name = "nsp"
    needs_pooler = True
    label_key = "next_sentence_label"
    graph_scores: GraphScores | None = NEXT_SENTENCE

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.head = LinearHead(config, 2, dropout=0.0)

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "batch 2"]:
        assert encoded.pooled is not None
        return self.head(encoded.pooled)


class SentenceOrderPrediction(NextSentencePrediction):
    """Predicts whether two segments are in order or swapped; 0 = in order (Lan et al. 2019, section
    3.1)."""

    name = "sop"
    graph_scores = None
    label_key = "sentence_order_label"

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.head = LinearHead(config, 2)
