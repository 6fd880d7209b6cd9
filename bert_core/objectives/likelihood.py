"""Measures how likely a model finds known words behind masks, with the masked-word head."""

from jaxtyping import Float, Int
from torch import Tensor

from bert_core.model.encoder import Encoded
from bert_core.objectives.base import Batch
from bert_core.objectives.enhanced_mlm import EnhancedMaskedLanguageModeling
from bert_core.objectives.graph_scores import LIKELIHOOD
from bert_core.objectives.mlm import MaskedLanguageModeling


class MaskedWordLikelihood(MaskedLanguageModeling):
    """Computes the log probability of the label at each chosen position.

    It uses the weights and names of the masked-word head, and never trains them. It returns a
    single number per position, not one per entry of the vocabulary. Since it scores only the
    labels, windows have labels even if rows have none.
    """

    graph_scores = LIKELIHOOD

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items"]:
        scores = super().logits(encoded, batch, word_embeddings)
        return _log_shares(scores, batch[self.label_key])

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "tokens vocab"]:
        return super().logits(encoded, {}, word_embeddings)


class EnhancedMaskedWordLikelihood(MaskedWordLikelihood, EnhancedMaskedLanguageModeling):
    """Computes the same as `MaskedWordLikelihood`, with DeBERTa's enhanced mask decoder."""

    every = EnhancedMaskedLanguageModeling.every


def _log_shares(
    scores: Float[Tensor, "items vocab"], labels: Int[Tensor, "items"]
) -> Float[Tensor, "items"]:
    return scores.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
