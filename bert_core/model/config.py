"""The encoder's config, composed of one config per part."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from bert_core.checks import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    ShareBelowOne,
    check_fields,
)
from bert_core.errors import ConfigError

Activation = Literal["gelu", "gelu_new", "relu", "tanh"]
Family = Literal[
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "albert",
    "electra",
    "mpnet",
    "deberta",
    "deberta-v2",
    "modernbert",
]
NormPlacement = Literal["post", "pre"]
Pooling = Literal["mean", "cls"]
"""A row's vector is the mean of its tokens' vectors, or the first token's."""
AngleBase = Annotated[float, Range(above=1)]


@dataclass(frozen=True, kw_only=True)
class EmbeddingsConfig:
    """The embeddings that go into the first layer."""

    vocab_size: PositiveInt = 30522
    """Rows of the word embedding."""
    size: PositiveInt | None = None
    """Width of the embeddings; None is hidden_size (narrower in Lan et al. 2019, section 3.1).
    Embeddings of another width than the encoder's pass through a linear layer."""
    projected: bool = False
    """Whether that layer is there at equal widths, too (ALBERT)."""
    absolute_positions: bool = True
    """Whether to add a learned vector per position."""
    max_position_embeddings: PositiveInt = 512
    """Rows of the position embedding; without one, the longest supported sequence."""
    position_offset: int = 0
    """Row of the first position (in RoBERTa, the id of [PAD] + 1)."""
    type_vocab_size: NonNegativeInt = 2
    """Number of segments; 0 adds nothing, 1 adds the same vector to every token."""
    pad_token_id: int = 0
    """Id of [PAD]; its word embedding starts at zero and gets no gradient from look-ups."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.position_offset < self.max_position_embeddings:
            raise ConfigError(
                "position_offset: wanted at least 0 and below max_position_embeddings = "
                f"{self.max_position_embeddings}, got {self.position_offset}"
            )
        if not 0 <= self.pad_token_id < self.vocab_size:
            raise ConfigError(
                "pad_token_id: wanted an id of the vocabulary, at least 0 and below vocab_size = "
                f"{self.vocab_size}, got {self.pad_token_id}"
            )


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Multi-head attention (Vaswani et al. 2017, section 3.2)."""

    num_heads: PositiveInt = 12
    """Heads per layer; must divide hidden_size."""
    dropout: ShareBelowOne = 0.1
    """Dropout on attention probabilities; 0 allows fused attention in training."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class DisentangledAttentionConfig(AttentionConfig):
    """Content and relative position attend to each other (DeBERTa, He et al. 2020, section 3.1)."""

    max_relative_positions: PositiveInt = 512
    """Distances from this one on share an embedding."""
    position_buckets: NonNegativeInt = 0
    """Number of buckets of distances, each way: the nearer half hold one distance each, the others
    ever more (He et al. 2021, DeBERTa v2). 0 gives every distance its own embedding."""
    shared_projections: bool = False
    """Whether positions share the content's projections (v2) or have their own (v1)."""
    normalised: bool = False
    """Whether relative embeddings pass through a LayerNorm (v2)."""

    @property
    def span(self) -> int:
        """Return the number k of relative embeddings in each direction, of 2k in total."""
        return self.position_buckets or self.max_relative_positions


@dataclass(frozen=True, kw_only=True)
class RotaryAttentionConfig(AttentionConfig):
    """Rotary positions (Su et al. 2021), with local attention in most layers (ModernBERT, Warner et
    al. 2024, section 2.1.2)."""

    window: Annotated[int, Range(least=2)] = 128
    """Attention window of a local layer, in tokens: half of it each way, plus the token itself."""
    global_every: PositiveInt = 3
    """Every n-th layer, from the first on, attends to whole rows."""
    theta: AngleBase = 160_000.0
    """Base of the rotation angles in global layers; a higher base rotates more slowly."""
    local_theta: AngleBase = 10_000.0
    """Base of the rotation angles in local layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window % 2:
            raise ConfigError(f"window: wanted an even number, got {self.window}")

    def reach(self, layer: int) -> int | None:
        """Return how many tokens in each direction a layer attends to; None for whole rows."""
        return self.window // 2 if layer % self.global_every else None


@dataclass(frozen=True, kw_only=True)
class BiasedAttentionConfig(AttentionConfig):
    """A learned number per head and distance is added to the scores (Raffel et al. 2019, section
    2.1); all layers share it (MPNet, Song et al. 2020)."""

    num_buckets: Annotated[int, Range(least=4)] = 32
    """Number of buckets of distances, half of them for each direction; a multiple of 4."""
    max_distance: PositiveInt = 128
    """Distances from about this one on share the last bucket of their direction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_buckets % 4:
            raise ConfigError(f"num_buckets: wanted a multiple of 4, got {self.num_buckets}")
        if self.max_distance <= self.num_buckets // 4:
            raise ConfigError(
                f"max_distance: wanted more than num_buckets / 4 = {self.num_buckets // 4}, the "
                f"distances with a bucket of their own, got {self.max_distance}"
            )


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig:
    """Two linear layers with an activation between (Vaswani et al. 2017, section 3.3)."""

    intermediate_size: PositiveInt = 3072
    """Width between the two linear layers."""
    activation: Activation = "gelu"
    """`gelu` is exact (erf), `gelu_new` its tanh approximation."""
    gated: bool = False
    """Whether the activation is multiplied by a second linear projection (GeGLU, Shazeer 2020)."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class ConvolutionConfig:
    """A convolution parallel to the first layer (DeBERTa v2's xlarge models)."""

    kernel_size: PositiveInt = 3
    """Tokens that each output sees; odd."""
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kernel_size % 2 == 0:
            raise ConfigError(f"kernel_size: wanted an odd number, got {self.kernel_size}")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """How task heads are built on the encoder."""

    pooling: Pooling = "cls"
    """Whether the pooler reads the first token, or the mean of all tokens."""
    pooler_activation: Activation = "tanh"
    """Activation after the pooler's linear layer."""
    pooler_dropout: ShareBelowOne | None = 0.0
    """Dropout before the pooler's linear layer; None takes classifier_dropout (RoBERTa)."""
    transform_activation: Activation | None = None
    """Activation of the linear layer before vocabulary scores; None takes the feed-forward's."""
    classifier_dropout: ShareBelowOne | None = None
    """Dropout before a classifier; None takes hidden_dropout_prob."""
    span_dropout: ShareBelowOne = 0.0
    """Dropout before the scores of span starts and ends."""
    transform: bool = False
    """Whether a linear layer, an activation and a LayerNorm come before every head, as they do in
    the masked-word head; this is then the pooler's linear layer too (ModernBERT)."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder. The defaults are BERT-base (Devlin et al. 2018, section 3, and
    google-research/bert's `bert_config.json`)."""

    family: Family = "bert"
    """Hugging Face's `model_type`; decides the names of weights in files, and nothing that is
    computed."""
    hidden_size: PositiveInt = 768
    """Width of the residual stream, D."""
    num_hidden_layers: PositiveInt = 12
    """Number of layers (attention and feed-forward), L."""
    shared_layers: bool = False
    """Whether all layers share their weights (ALBERT, Lan et al. 2019, section 3.1)."""
    hidden_dropout_prob: ShareBelowOne = 0.1
    """Dropout on embeddings and on the output of each sub-layer."""
    layer_norm_eps: PositiveFloat = 1e-12
    """Added to the variance in every LayerNorm."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of initial weights."""
    initializer_cutoff: PositiveFloat | None = None
    """Initial weights are truncated at this many standard deviations; None does not truncate."""
    norm_placement: NormPlacement = "post"
    """`post` normalises the sum of a sub-layer's input and output (Vaswani et al. 2017); `pre`
    normalises its input, and the output of the last layer (Xiong et al. 2020)."""
    biases: bool = True
    """Whether linear layers and LayerNorms have biases; the output layers of heads always do."""
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    feed_forward: FeedForwardConfig = field(default_factory=FeedForwardConfig)
    convolution: ConvolutionConfig | None = None
    head: HeadConfig = field(default_factory=HeadConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden_size % self.attention.num_heads:
            raise ConfigError(
                "hidden_size: wanted a multiple of num_attention_heads = "
                f"{self.attention.num_heads}, got {self.hidden_size}"
            )
        if self.family == "mpnet" and self.embeddings.pad_token_id != 1:
            raise ConfigError(
                "pad_token_id: wanted 1 for the family mpnet, whose class in transformers counts "
                f"positions by that id, got {self.embeddings.pad_token_id}: use a tokenizer that "
                "gives it to padding (`raybert vocab --kind bpe` makes one), or another family"
            )
        if isinstance(self.attention, RotaryAttentionConfig) and self.head_size % 2:
            raise ConfigError(
                "hidden_size: wanted an even width for each of num_attention_heads = "
                f"{self.attention.num_heads}, since rotary positions rotate values in pairs, got "
                f"{self.hidden_size}"
            )

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the word embedding."""
        return self.embeddings.vocab_size

    @property
    def embedding_size(self) -> int:
        """Return the width of the word embedding."""
        return self.embeddings.size or self.hidden_size

    @property
    def head_size(self) -> int:
        """Return the width of an attention head."""
        return self.hidden_size // self.attention.num_heads

    @property
    def classifier_dropout(self) -> float:
        """Return the probability of dropout before a classifier."""
        dropout = self.head.classifier_dropout
        return self.hidden_dropout_prob if dropout is None else dropout

    @property
    def max_length(self) -> int:
        """Return the length of the longest sequence in tokens, special tokens included."""
        return self.embeddings.max_position_embeddings - self.embeddings.position_offset

    def adapted(
        self,
        *,
        vocab_size: int | None = None,
        pad_token_id: int | None = None,
        hidden_dropout_prob: float | None = None,
        attention_dropout: float | None = None,
        rope_theta: float | None = None,
        sizes_of: "EncoderConfig | None" = None,
    ) -> "EncoderConfig":
        """Return this config for another vocabulary, with other dropout, another base of the
        rotation angles in global layers, or with the depth and width of another encoder
        (`sizes_of`); None keeps the current value.

        Raises: ConfigError if `rope_theta` is given to an encoder without rotary positions.
        """
        if rope_theta is not None and not isinstance(self.attention, RotaryAttentionConfig):
            raise ConfigError(
                f"rope_theta: wanted none for the family {self.family}, which has no rotary "
                f"positions, got {rope_theta:g}: leave it out, or use a modernbert variant"
            )
        embeddings = {"vocab_size": vocab_size, "pad_token_id": pad_token_id}
        if self.embeddings.position_offset and pad_token_id is not None:
            embeddings["position_offset"] = pad_token_id + 1
        like = sizes_of or self
        heads, inner = like.attention.num_heads, like.feed_forward.intermediate_size
        return replace(
            self,
            hidden_size=like.hidden_size,
            num_hidden_layers=like.num_hidden_layers,
            embeddings=_replaced(self.embeddings, embeddings),
            attention=_replaced(
                self.attention,
                {"dropout": attention_dropout, "num_heads": heads, "theta": rope_theta},
            ),
            feed_forward=replace(self.feed_forward, intermediate_size=inner),
            **_without_none({"hidden_dropout_prob": hidden_dropout_prob}),
        )


def _without_none(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _replaced(config: Any, changes: dict[str, Any]) -> Any:
    return replace(config, **_without_none(changes))
