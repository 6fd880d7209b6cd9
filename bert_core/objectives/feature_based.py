"""One label per token, from a frozen encoder (Devlin et al. 2018, section 5.3)."""

import torch
from jaxtyping import Float
from torch import Tensor

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import RecurrentHead
from bert_core.model.layout import gather_tokens
from bert_core.objectives.base import Batch
from bert_core.objectives.token_classification import TokenLabels

LAYERS = 4
"""Number of last layers to read, or all if there are fewer: the best choice in the paper's table 7.
"""


class FeatureBasedTokenClassification(TokenLabels):
    """Token labels from a recurrent head; only the head is trained."""

    name = "feature_based_token_classification"
    reads_layers = True
    trains_encoder = False
    in_transformers = False
    graph_outputs = ()  # the LSTM reads each row to its own length

    def __init__(self, config: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self._layers = min(LAYERS, config.num_hidden_layers)
        self.head = RecurrentHead(config, self._layers * config.hidden_size, num_labels)

    def places(self, batch: Batch) -> None:
        """All tokens, since the head reads each token's context."""

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items labels"]:
        vectors = torch.cat(encoded.layers[-self._layers :], dim=-1)
        return gather_tokens(self.head(vectors, encoded.rows), batch[self.position_key])
