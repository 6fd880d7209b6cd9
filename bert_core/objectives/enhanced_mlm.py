"""DeBERTa's masked language modelling, which adds absolute positions only before the last step."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from bert_core.errors import ConfigError
from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig
from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.layers import EncoderLayer, initialise
from bert_core.model.size import training_flops
from bert_core.objectives.base import Batch
from bert_core.objectives.mlm import MaskedLanguageModeling


class EnhancedMaskedLanguageModeling(MaskedLanguageModeling):
    """Predict the original token at each chosen position with the enhanced mask decoder.

    The first queries are the outputs of the second-to-last layer plus absolute position embeddings.
    The last layer runs on the queries twice, each time attending to the outputs of the
    second-to-last layer. So the only weights of the decoder are its position embeddings.
    transformers has no such decoder: its class scores the last layer's outputs.

    Source: He et al. 2020, section 3.2 and figure 2; for the first queries, the last layer in both
        steps and what they attend to: microsoft/DeBERTa, `EnhancedMaskDecoder`.
    """

    reads_layers = True
    not_in_transformers: ClassVar[tuple[str, ...]] = ("positions",)

    def __init__(self, config: EncoderConfig) -> None:
        """Add the decoder's position embeddings.

        Raises: ConfigError if the encoder adds absolute positions or its attention is not
            disentangled.
        """
        super().__init__(config)
        if not self.fits(config):
            raise ConfigError(
                "objectives: wanted for emd_mlm an encoder with disentangled attention that adds "
                f"no positions to its embeddings (deberta-…), got family {config.family}: "
                "use such a variant, or the mlm objective"
            )
        self.positions = nn.Embedding(config.max_length, config.hidden_size)
        initialise(self.positions, config)

    @staticmethod
    def fits(config: EncoderConfig) -> bool:
        """Whether the encoder has disentangled attention and adds no absolute positions."""
        disentangled = isinstance(config.attention, DisentangledAttentionConfig)
        return disentangled and not config.embeddings.absolute_positions

    def attach(self, encoder: Encoder) -> None:
        self._encoder = (encoder,)  # NOTE: in a tuple, or its weights would be the objective's too

    def places(self, batch: Batch) -> Int[Tensor, "0"]:
        """Return no places: the last layer's own output is not used."""
        return batch["input_ids"].new_empty(0)

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """Return the FLOPs of two more passes through the last layer."""
        config = replace(self._encoder[0].config, num_hidden_layers=1, convolution=None)
        return 2 * training_flops(config, lengths, outputs=self.counts(batch))

    def rows(self, encoded: Encoded, batch: Batch) -> Float[Tensor, "items hidden"]:
        """Return the decoder's output at the chosen positions.

        Queries do not attend to each other, so the first step also runs at these positions only.
        """
        hidden, places = encoded.layers[-2], batch["mlm_positions"]
        once = self._step(self._first_queries(encoded), encoded, places)
        queries = hidden.flatten(0, -2).index_copy(0, places, once.to(hidden.dtype)).view_as(hidden)
        return self._step(queries, encoded, places)

    def every(
        self, encoded: Encoded, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "tokens vocab"]:
        decoded = self._step(self._step(self._first_queries(encoded), encoded), encoded)
        return self.head(decoded.flatten(0, -2), word_embeddings)

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
