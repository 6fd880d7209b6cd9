"""Sentence-order prediction (Lan et al. 2019, section 3.1)."""

from bert_core.model.config import EncoderConfig
from bert_core.model.heads import LinearHead
from bert_core.objectives.nsp import NextSentencePrediction


class SentenceOrderPrediction(NextSentencePrediction):
    """Predict whether two segments are in order or swapped; 0 = in order."""

    name = "sop"
    label_key = "sentence_order_label"

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.head = LinearHead(config, 2)
