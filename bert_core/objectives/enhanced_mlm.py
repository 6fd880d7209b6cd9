"""Masked language modelling of DeBERTa, which learns of absolute positions last."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from bert_core.errors import ConfigError
from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig
from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.layers import EncoderLayer, initialise
from bert_core.model.layout import gather_tokens
from bert_core.model.size import training_flops
from bert_core.objectives.base import Batch
from bert_core.objectives.mlm import MaskedLanguageModeling


class EnhancedMaskedLanguageModeling(MaskedLanguageModeling):
    """Say which word stood at each chosen position, by the enhanced mask decoder.

    What comes out of the layer before the last, with a vector of its absolute position added, asks;
    the last layer answers, twice, each time from what came out before it. So the decoder has no
    weights of its own but those of positions. transformers has neither: its class scores what the
    last layer gives by itself.

    Source: He et al. 2020, section 3.2 and figure 2; what the first query is, that both steps are
    the last layer and what they look at: microsoft/DeBERTa, `EnhancedMaskDecoder`.
    """

    reads_layers = True
    beside: ClassVar[tuple[str, ...]] = ("positions",)

    def __init__(self, config: EncoderConfig) -> None:
        """Raises: ConfigError if the encoder adds positions already, or attends otherwise."""
        super().__init__(config)
        if not self.fits(config):
            raise ConfigError(
                "objectives: wanted for emd_mlm an encoder with disentangled attention that adds "
                f"no positions to its embeddings (deberta-…), got family {config.family}: "
                "give such a variant, or take mlm"
            )
        self.positions = nn.Embedding(config.max_length, config.hidden_size)
        initialise(self.positions, config)

    @staticmethod
    def fits(config: EncoderConfig) -> bool:
        """Whether the encoder attends as DeBERTa does, and does not add positions already."""
        disentangled = isinstance(config.attention, DisentangledAttentionConfig)
        return disentangled and not config.embeddings.absolute_positions

    def attach(self, encoder: Encoder) -> None:
        self._encoder = (encoder,)  # NOTE: in a tuple, or its weights would be the objective's too

    def places(self, batch: Batch) -> Int[Tensor, "0"]:
        """None: of what the last layer gives by itself nothing is read."""
        return batch["input_ids"].new_empty(0)

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """Of the last layer, once more and again."""
        config = replace(self._encoder[0].config, num_hidden_layers=1, convolution=None)
        return 2 * training_flops(config, lengths, outputs=self.counts(batch))

    def rows(self, encoded: Encoded, batch: Batch) -> Float[Tensor, "items hidden"]:
        """What the decoder gives at the chosen positions.

        Queries do not look at each other, so the first step too is finished there only.
        """
        hidden, places = encoded.layers[-2], batch["mlm_positions"]
        once = self._step(self._first_queries(encoded), encoded, places)
        again = hidden.flatten(0, -2).index_copy(0, places, once.to(hidden.dtype)).view_as(hidden)
        return self._step(again, encoded, places)

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "tokens vocab"]:
        again = self._step(self._step(self._first_queries(encoded), encoded), encoded)
        return self.head(again.flatten(0, -2), word_embeddings)

    def picked(self, every: Float[Tensor, "..."], batch: Batch) -> Float[Tensor, "..."]:
        return gather_tokens(every, batch["mlm_positions"])

    def _first_queries(self, encoded: Encoded) -> Float[Tensor, "*tokens hidden"]:
        return encoded.layers[-2] + self.positions(encoded.rows.positions())

    def _step(
        self,
        queries: Float[Tensor, "*tokens hidden"],
        encoded: Encoded,
        places: Int[Tensor, "items"] | None = None,
    ) -> Float[Tensor, "..."]:
        last = self._encoder[0].layers[-1]
        assert isinstance(last, EncoderLayer)
        return last.decoded(queries, encoded.layers[-2], encoded.rows, encoded.shared, places)
