"""Replaced-token detection, with its generator (Clark et al. 2020; He et al. 2021)."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from bert_core.errors import ConfigError
from bert_core.model.config import EncoderConfig
from bert_core.model.encoder import Encoded, Encoder
from bert_core.model.heads import DetectionHead
from bert_core.model.sharing import share_embeddings, share_words
from bert_core.objectives.base import Batch, LossPart, Objective, ObjectiveModel, widened
from bert_core.objectives.linear_cross_entropy import linear_sample
from bert_core.objectives.mlm import MaskedLanguageModeling

BASE_WIDTH = 768


def generator_of(config: EncoderConfig) -> EncoderConfig:
    """Return the generator's config: for ELECTRA, as deep as the encoder and a quarter as wide, a
    third at the width of its base model; for other families, as wide and half as deep.

    Raises: ConfigError if the encoder has too few layers.
    Source: Clark et al. 2020, table 6, where width is that of vectors and of the feed-forward
        layers, and the number of heads; He et al. 2021 (DeBERTaV3), section 3.1.
    """
    if config.family != "electra":
        if config.num_hidden_layers < 2:
            raise ConfigError(
                "objectives: wanted for rtd an encoder of at least 2 layers, as its generator has "
                f"half of them, got {config.num_hidden_layers}: use another variant, or mlm"
            )
        return replace(config, num_hidden_layers=config.num_hidden_layers // 2)
    divisor = 3 if config.hidden_size == BASE_WIDTH else 4
    heads = max(1, config.attention.num_heads // divisor)
    return replace(
        config,
        hidden_size=max(1, config.hidden_size // divisor // heads) * heads,
        attention=replace(config.attention, num_heads=heads),
        feed_forward=replace(
            config.feed_forward,
            intermediate_size=max(1, config.feed_forward.intermediate_size // divisor),
        ),
        embeddings=replace(config.embeddings, size=config.embedding_size),
    )


class ReplacedTokenDetection(Objective):
    """Predicts for each token whether a generator replaced it.

    The generator (`generator_of`) is a smaller encoder, trained on masked words. Its samples, drawn
    from its softmax, replace the masked tokens in the encoder's input; no gradient flows back
    through them. ELECTRA shares its embeddings with the generator; in other families, the encoder's
    word embeddings are the generator's plus a difference that only the encoder learns. A sample
    that equals the original token counts as not replaced.

    Source: Clark et al. 2020, section 3; He et al. 2021 (DeBERTaV3), sections 3.1 (λ = 50) and 3.3.
        There the generator is updated before the encoder reads its embeddings; here both are
        updated in one step.
    """

    name = "rtd"
    needs_pooler = False
    label_key = "mlm_labels"  # compared with the generator's guesses
    weight = 50.0
    not_in_transformers = ("generator",)

    def __init__(self, config: EncoderConfig) -> None:
        """Build the generator and the head. Raises: ConfigError, like `generator_of`."""
        super().__init__()
        self.in_transformers = config.family == "electra"
        smaller = generator_of(config)
        self.generator = ObjectiveModel(smaller, [MaskedLanguageModeling(smaller)])
        self.head = DetectionHead(config)

    @property
    def item_weights(self) -> int:
        return self.head.dense.weight.numel() + self.head.linear.weight.numel()

    def attach(self, encoder: Encoder) -> None:
        share = share_embeddings if encoder.config.family == "electra" else share_words
        share(encoder, self.generator.encoder)

    def submodels(self) -> Mapping[str, ObjectiveModel]:
        return {"generator": self.generator}

    def shown(self, batch: Batch) -> tuple[Batch, dict[str, LossPart]]:
        """Return the batch with the generator's samples at the masked positions and `replaced`
        (*tokens), True where a sample is not the original token; and the generator's loss."""
        ids, places, labels = batch["input_ids"], batch["mlm_positions"], batch["mlm_labels"]
        encoded = self.generator.encode(batch, places)
        words = self.generator.word_embeddings
        masked_words = self.generator.objectives["mlm"]
        assert isinstance(masked_words, MaskedLanguageModeling)
        part = masked_words(encoded, batch, words)
        with (
            torch.no_grad()
        ):  # NOTE: after the loss, since autocast caches casts made under no_grad
            rows = masked_words.head.transform(encoded.hidden)
            guesses = linear_sample(rows, words, masked_words.head.bias, batch["mlm_draws"])
        unchanged = torch.zeros_like(ids, dtype=torch.bool)
        shown = {
            "input_ids": ids.flatten().index_copy(0, places, guesses).view_as(ids),
            "replaced": unchanged.flatten().index_copy(0, places, guesses != labels).view_as(ids),
        }
        return batch | shown, {masked_words.name: part}

    def places(self, batch: Batch) -> Int[Tensor, "real"] | None:
        """Return the places of all real tokens."""
        mask = batch.get("attention_mask")
        return None if mask is None else mask.flatten().nonzero()[:, 0]

    def counts(self, batch: Batch) -> int:
        mask = batch.get("attention_mask")
        return batch["input_ids"].numel() if mask is None else int(mask.sum())

    def logits(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> Float[Tensor, "items 1"]:
        """Return a score per real token; above 0 means replaced."""
        return self.head(encoded.hidden).flatten(0, -2)

    def forward(
        self, encoded: Encoded, batch: Batch, word_embeddings: Float[Tensor, "vocab embedding"]
    ) -> LossPart:
        """Return the binary cross-entropy, in fp32 or wider."""
        logits = self.logits(encoded, batch, word_embeddings)[:, 0]
        places = self.places(batch)
        replaced = batch["replaced"].flatten()
        replaced = replaced if places is None else replaced[places]
        wide = widened(logits)
        total = functional.binary_cross_entropy_with_logits(
            wide, replaced.to(wide.dtype), reduction="sum"
        )
        return LossPart(total, len(replaced), ((wide > 0) == replaced).sum())
