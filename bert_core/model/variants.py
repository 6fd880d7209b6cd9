"""All encoders, by name. Contains only data."""

from dataclasses import dataclass
from typing import Any

from bert_core.checks import TokenizerKind
from bert_core.model.config import (
    AttentionConfig,
    BiasedAttentionConfig,
    ConvolutionConfig,
    DisentangledAttentionConfig,
    EmbeddingsConfig,
    EncoderConfig,
    FeedForwardConfig,
    HeadConfig,
    RotaryAttentionConfig,
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An encoder described in a paper."""

    config: EncoderConfig
    tokenizer: TokenizerKind = "wordpiece"
    """Kind of vocabulary, a value of `raybert vocab --kind`."""
    paper: str
    """The paper that describes it."""
    published: str
    """Number of parameters as given by the paper or its repository, rounded and with their own way
    of counting heads. `+ words`: without the word embeddings."""


def _sizes(hidden: int, layers: int, heads: int, inner: int | None = None) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "attention": AttentionConfig(num_heads=heads),
        "feed_forward": FeedForwardConfig(intermediate_size=inner or 4 * hidden),
    }


def _bert(hidden: int, layers: int, heads: int, inner: int | None = None, **more: Any) -> Variant:
    vocabulary = EmbeddingsConfig(vocab_size=more.pop("vocab_size", 30522))
    sizes = _sizes(hidden, layers, heads, inner)
    return Variant(config=EncoderConfig(**sizes, embeddings=vocabulary), **more)


def _roberta(
    hidden: int, layers: int, heads: int, published: str, *, multilingual: bool = False
) -> Variant:
    """Return a RoBERTa: positions start after the id of [PAD], there are no segments, and a
    classifier has its own linear layer. XLM-RoBERTa differs only in its vocabulary."""
    config = EncoderConfig(
        family="xlm-roberta" if multilingual else "roberta",
        layer_norm_eps=1e-5,
        embeddings=EmbeddingsConfig(
            vocab_size=250002 if multilingual else 50265,
            max_position_embeddings=514,
            position_offset=2,
            type_vocab_size=1,
            pad_token_id=1,
        ),
        head=HeadConfig(pooler_dropout=None, transform_activation="gelu"),
        **_sizes(hidden, layers, heads),
    )
    return Variant(
        config=config,
        tokenizer="unigram" if multilingual else "bpe",
        paper="Conneau et al. 2019, section 3" if multilingual else "Liu et al. 2019",
        published=published,
    )


def _electra(
    hidden: int, layers: int, heads: int, published: str, *, embeddings: int | None = None
) -> Variant:
    """Return an ELECTRA discriminator: BERT except for the width of its embeddings and its
    classifier, which has its own linear layer."""
    config = EncoderConfig(
        family="electra",
        embeddings=EmbeddingsConfig(size=embeddings),
        head=HeadConfig(pooler_activation="gelu", pooler_dropout=None, transform_activation="gelu"),
        **_sizes(hidden, layers, heads),
    )
    return Variant(config=config, paper="Clark et al. 2020, table 6", published=published)


def _albert(hidden: int, layers: int, heads: int, published: str) -> Variant:
    """Return an ALBERT, version 2, without dropout. Layers share their weights; embeddings are
    narrow."""
    config = EncoderConfig(
        family="albert",
        hidden_size=hidden,
        num_hidden_layers=layers,
        shared_layers=True,
        hidden_dropout_prob=0.0,
        embeddings=EmbeddingsConfig(vocab_size=30000, size=128, projected=True),
        attention=AttentionConfig(num_heads=heads, dropout=0.0),
        feed_forward=FeedForwardConfig(intermediate_size=4 * hidden, activation="gelu_new"),
        head=HeadConfig(classifier_dropout=0.1),
    )
    paper = "Lan et al. 2019, table 1"
    return Variant(config=config, tokenizer="unigram", paper=paper, published=published)


def _deberta(
    hidden: int,
    layers: int,
    heads: int,
    *,
    version: int,
    published: str,
    convolution: bool = False,
    paper: str | None = None,
) -> Variant:
    """Return a DeBERTa, with relative positions only; versions 2 and 3 share projections and bucket
    distances."""
    first = version == 1
    attention = DisentangledAttentionConfig(
        num_heads=heads,
        position_buckets=0 if first else 256,
        shared_projections=not first,
        normalised=not first,
    )
    config = EncoderConfig(
        family="deberta" if first else "deberta-v2",
        layer_norm_eps=1e-7,
        embeddings=EmbeddingsConfig(
            vocab_size=50265 if first else 128100, absolute_positions=False, type_vocab_size=0
        ),
        convolution=ConvolutionConfig() if convolution else None,
        head=HeadConfig(pooler_activation="gelu"),
        **_sizes(hidden, layers, heads) | {"attention": attention},
    )
    described = "He et al. 2021, DeBERTaV3" if version == 3 else "He et al. 2020"
    return Variant(
        config=config,
        tokenizer="bpe" if first else "unigram",
        paper=paper or described,
        published=published,
    )


def _modernbert(hidden: int, layers: int, heads: int, inner: int, published: str) -> Variant:
    """Return a ModernBERT: rotary positions, local and global layers, pre-norm, GeGLU, no
    biases."""
    config = EncoderConfig(
        family="modernbert",
        hidden_size=hidden,
        num_hidden_layers=layers,
        hidden_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        initializer_cutoff=2.0,
        norm_placement="pre",
        biases=False,
        embeddings=EmbeddingsConfig(
            vocab_size=50368,
            absolute_positions=False,
            max_position_embeddings=8192,
            type_vocab_size=0,
            pad_token_id=50283,
        ),
        attention=RotaryAttentionConfig(num_heads=heads, dropout=0.0),
        feed_forward=FeedForwardConfig(intermediate_size=inner, gated=True),
        head=HeadConfig(
            pooling="mean", pooler_activation="gelu", classifier_dropout=0.0, transform=True
        ),
    )
    return Variant(
        config=config, tokenizer="bpe", paper="Warner et al. 2024, table 4", published=published
    )


_TURC = "Turc et al. 2019, table 1"
_DEVLIN = "Devlin et al. 2018, section 3"
_JIAO = "Jiao et al. 2019, table 1"
_CASED = 28996
_OURS = "ours, in the sizes of bert-tiny"

VARIANTS: dict[str, Variant] = {
    "bert-tiny": _bert(128, 2, 2, paper=_TURC, published="4.4 M"),
    "bert-mini": _bert(256, 4, 4, paper=_TURC, published="11.3 M"),
    "bert-small": _bert(512, 4, 8, paper=_TURC, published="29.1 M"),
    "bert-medium": _bert(512, 8, 8, paper=_TURC, published="41.7 M"),
    "bert-base": _bert(768, 12, 12, paper=_DEVLIN, published="110 M"),
    "bert-base-cased": _bert(768, 12, 12, vocab_size=_CASED, paper=_DEVLIN, published="110 M"),
    "bert-large": _bert(1024, 24, 16, paper=_DEVLIN, published="340 M"),
    "bert-large-cased": _bert(1024, 24, 16, vocab_size=_CASED, paper=_DEVLIN, published="340 M"),
    "spanbert-base": _bert(
        768, 12, 12, vocab_size=_CASED, paper="Joshi et al. 2019", published="as BERT"
    ),
    "spanbert-large": _bert(
        1024, 24, 16, vocab_size=_CASED, paper="Joshi et al. 2019", published="as BERT"
    ),
    "scibert": _bert(
        768, 12, 12, vocab_size=31090, paper="Beltagy et al. 2019", published="as BERT"
    ),
    "biobert": _bert(768, 12, 12, vocab_size=_CASED, paper="Lee et al. 2019", published="as BERT"),
    "tinybert-4": _bert(312, 4, 12, 1200, paper=_JIAO, published="14.5 M"),
    "tinybert-6": _bert(768, 6, 12, paper=_JIAO, published="67.0 M"),
    "roberta-base": _roberta(768, 12, 12, published="125 M"),
    "roberta-large": _roberta(1024, 24, 16, published="355 M"),
    "xlm-roberta-base": _roberta(768, 12, 12, published="270 M", multilingual=True),
    "xlm-roberta-large": _roberta(1024, 24, 16, published="550 M", multilingual=True),
    # NOTE: its padding has the id 1, so a vocabulary of ours for it is one of `--kind bpe`.
    "mpnet-base": Variant(
        config=EncoderConfig(
            family="mpnet",
            layer_norm_eps=1e-5,
            embeddings=EmbeddingsConfig(
                vocab_size=30527,
                max_position_embeddings=514,
                position_offset=2,
                type_vocab_size=0,
                pad_token_id=1,
            ),
            head=HeadConfig(pooler_dropout=None, transform_activation="gelu"),
            **_sizes(768, 12, 12) | {"attention": BiasedAttentionConfig()},
        ),
        paper="Song et al. 2020, section 4.1",
        published="110 M",
    ),
    "electra-small": _electra(256, 12, 4, published="14 M", embeddings=128),
    "electra-base": _electra(768, 12, 12, published="110 M"),
    "electra-large": _electra(1024, 24, 16, published="335 M"),
    "distilbert": Variant(
        config=EncoderConfig(
            family="distilbert",
            embeddings=EmbeddingsConfig(type_vocab_size=0),
            head=HeadConfig(pooler_activation="relu", classifier_dropout=0.2, span_dropout=0.1),
            **_sizes(768, 6, 12),
        ),
        paper="Sanh et al. 2019, table 3",
        published="66 M",
    ),
    "albert-base": _albert(768, 12, 12, published="12 M"),
    "albert-large": _albert(1024, 24, 16, published="18 M"),
    "albert-xlarge": _albert(2048, 24, 16, published="60 M"),
    "albert-xxlarge": _albert(4096, 12, 64, published="235 M"),
    "deberta-tiny": _deberta(128, 2, 2, version=1, paper=_OURS, published="none"),
    "deberta-base": _deberta(768, 12, 12, version=1, published="100 M + words"),
    "deberta-large": _deberta(1024, 24, 16, version=1, published="350 M + words"),
    "deberta-v2-xlarge": _deberta(
        1536, 24, 24, version=2, convolution=True, published="710 M + words"
    ),
    "deberta-v2-xxlarge": _deberta(
        1536, 48, 24, version=2, convolution=True, published="1320 M + words"
    ),
    "deberta-v3-tiny": _deberta(128, 2, 2, version=3, paper=_OURS, published="none"),
    "deberta-v3-xsmall": _deberta(384, 12, 6, version=3, published="22 M + words"),
    "deberta-v3-small": _deberta(768, 6, 12, version=3, published="44 M + words"),
    "deberta-v3-base": _deberta(768, 12, 12, version=3, published="86 M + words"),
    "deberta-v3-large": _deberta(1024, 24, 16, version=3, published="304 M + words"),
    "modernbert-base": _modernbert(768, 22, 12, 1152, published="149 M"),
    "modernbert-large": _modernbert(1024, 28, 16, 2624, published="395 M"),
}
