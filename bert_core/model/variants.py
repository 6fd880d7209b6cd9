"""The encoders there are, by name. Data only: an encoder's config, its check, its size."""

from dataclasses import dataclass
from typing import Literal, get_args

from bert_core.errors import ConfigError

Activation = Literal["gelu", "gelu_new", "relu"]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape and regularisation of a BERT encoder; the names are Hugging Face's own.

    Defaults are BERT-base (Devlin et al. 2018, section 3, and google-research/bert's
    `bert_config.json`).
    """

    vocab_size: int = 30522
    """Rows of the word embedding."""
    hidden_size: int = 768
    """Width of the residual stream, D."""
    num_hidden_layers: int = 12
    """Blocks of attention and feed-forward, L."""
    num_attention_heads: int = 12
    """Heads a block; divides hidden_size."""
    intermediate_size: int = 3072
    """Width inside the feed-forward."""
    hidden_act: Activation = "gelu"
    """Activation; `gelu` is the exact one (erf), `gelu_new` its tanh approximation."""
    hidden_dropout_prob: float = 0.1
    """Dropout on embeddings and on what each sub-layer adds."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout on attention probabilities; 0 lets the CPU use its fused attention in training."""
    max_position_embeddings: int = 512
    """Longest sequence, in tokens with the special ones."""
    type_vocab_size: int = 2
    """Segments that `token_type_ids` may name."""
    layer_norm_eps: float = 1e-12
    """Added to the variance in every LayerNorm."""
    initializer_range: float = 0.02
    """Standard deviation of fresh weights."""
    pad_token_id: int = 0
    """Id of [PAD]; its word embedding starts at zero and is not trained by look-up."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
            "type_vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: wanted at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size = {self.hidden_size}: wanted a multiple of "
                f"num_attention_heads = {self.num_attention_heads}"
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: wanted at least 0 and below 1")
        for name in ("layer_norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: wanted above 0")
        if self.hidden_act not in get_args(Activation):
            raise ConfigError(
                f"hidden_act = {self.hidden_act!r}: wanted one of {', '.join(get_args(Activation))}"
            )
        if not 0 <= self.pad_token_id < self.vocab_size:
            raise ConfigError(
                f"pad_token_id = {self.pad_token_id}: wanted an id of the vocabulary, "
                f"at least 0 and below vocab_size = {self.vocab_size}"
            )


def _bert(*, layers: int, hidden: int, heads: int) -> EncoderConfig:
    return EncoderConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )


VARIANTS: dict[str, EncoderConfig] = {
    # Turc et al. 2019, "Well-Read Students Learn Better", table 1: heads of 64.
    "bert-tiny": _bert(layers=2, hidden=128, heads=2),
    "bert-mini": _bert(layers=4, hidden=256, heads=4),
    "bert-small": _bert(layers=4, hidden=512, heads=8),
    "bert-medium": _bert(layers=8, hidden=512, heads=8),
    # Devlin et al. 2018, section 3.
    "bert-base": _bert(layers=12, hidden=768, heads=12),
    "bert-large": _bert(layers=24, hidden=1024, heads=16),
}


def count_parameters(config: EncoderConfig, *, pooler: bool = True) -> int:
    """Number of weights of the encoder without objectives' heads, exact."""
    width = config.hidden_size
    linear = width * width + width
    norm = 2 * width
    rows = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    feed_forward = 2 * width * config.intermediate_size + config.intermediate_size + width
    layer = 4 * linear + norm + feed_forward + norm
    return rows * width + norm + config.num_hidden_layers * layer + (linear if pooler else 0)
