"""The objectives that a pretraining run can name; tasks define their own in `tasks`."""

from bert_core.objectives.base import Objective
from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.permuted_mlm import PermutedMaskedLanguageModeling
from bert_core.objectives.rtd import ReplacedTokenDetection
from bert_core.objectives.sentence_pairs import NextSentencePrediction, SentenceOrderPrediction
from bert_core.objectives.span_boundary import SpanBoundary

PRETRAINING: dict[str, type[Objective]] = {
    "mlm": MaskedLanguageModeling,
    "nsp": NextSentencePrediction,
    "sop": SentenceOrderPrediction,
    "permuted_mlm": PermutedMaskedLanguageModeling,
    "emd_mlm": EnhancedMaskedLanguageModeling,
    "rtd": ReplacedTokenDetection,
    "span_boundary": SpanBoundary,
}
