"""The span boundary objective (Joshi et al. 2019, SpanBERT, section 3.2)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded
from bert_core.model.heads import SpanBoundaryHead
from bert_core.objectives.base import Batch
from bert_core.objectives.mlm import MaskedLanguageModeling


class SpanBoundary(MaskedLanguageModeling):
    """Predicts the original tokens of a span from the two tokens around the span only.

    Those two are not predicted themselves: adjacent spans are merged, as in SpanBERT's code, and a
    row starts and ends with a special token.
    """

    name = "span_boundary"
    graph_scores = None
    in_transformers = False
    head: SpanBoundaryHead

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.head = SpanBoundaryHead(config)

    def places(self, batch: Batch) -> Int[Tensor, "beside"]:
        """Return the places of the tokens left of every span, then of those right of it."""
        positions, lengths = batch["mlm_positions"], batch["mlm_span_lengths"]
        ends = lengths.cumsum(0)
        return torch.cat([positions[ends - lengths] - 1, positions[ends - 1] + 1])

    def rows(self, encoded: Encoded, batch: Batch) -> Float[Tensor, "items hidden"]:
        left, right = encoded.hidden.chunk(2)
        lengths = batch["mlm_span_lengths"]
        return self.head.inside(left, right, lengths, len(batch["mlm_positions"]))
