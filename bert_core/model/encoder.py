"""Ids in, one vector a token out. What is made of the vectors is for `heads.py` and objectives."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from bert_core.model.layers import Embeddings, EncoderLayer, Pooler, initialise
from bert_core.model.variants import EncoderConfig


@dataclass(frozen=True)
class Encoded:
    """What an encoder makes of a batch."""

    hidden: Float[Tensor, "batch seq hidden"]
    """One vector a token; those of padding mean nothing."""
    pooled: Float[Tensor, "batch hidden"] | None
    """One vector a sequence, None where the encoder has no pooler."""


class Encoder(nn.Module):
    """The encoder of BERT (Devlin et al. 2018); with `pooler` the layer that next-sentence uses."""

    def __init__(self, config: EncoderConfig, *, pooler: bool = True) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.pooler = Pooler(config) if pooler else None
        initialise(self, config.initializer_range)

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        token_type_ids: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch seq"] | None = None,
    ) -> Encoded:
        """Encode.

        Args:
            input_ids: at most `max_position_embeddings` a row.
            token_type_ids: the segment of each token.
            attention_mask: 1 = attend; None where all are 1, which is faster. A row needs a 1.
        """
        hidden = self.embeddings(input_ids, token_type_ids)
        bias = None if attention_mask is None else self._bias(attention_mask, hidden)
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return Encoded(hidden, None if self.pooler is None else self.pooler(hidden))

    @staticmethod
    def _bias(mask: Tensor, hidden: Tensor) -> Tensor:
        # A boolean mask would be turned into this one again in every layer.
        bias = hidden.new_zeros(mask.shape).masked_fill_(mask == 0, float("-inf"))
        return bias[:, None, None, :]  # (B, 1, 1, S)
