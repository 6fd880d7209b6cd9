"""The objectives a pretraining run may name; a task names its own in `tasks`."""

from collections.abc import Callable

from bert_core.model.variants import EncoderConfig
from bert_core.objectives.base import Objective
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.nsp import NextSentencePrediction
from bert_core.objectives.sop import SentenceOrderPrediction

PRETRAINING: dict[str, Callable[[EncoderConfig], Objective]] = {
    "mlm": MaskedLanguageModeling,
    "nsp": NextSentencePrediction,
    "sop": SentenceOrderPrediction,
}
