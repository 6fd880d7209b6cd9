"""Hugging Face's names of tensors and config entries, per family. Data only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bert_core.errors import ConfigError
from bert_core.model.config import (
    AttentionConfig,
    BiasedAttentionConfig,
    DisentangledAttentionConfig,
    EmbeddingsConfig,
    EncoderConfig,
    Family,
    FeedForwardConfig,
    HeadConfig,
)
from bert_core.model.variants import VARIANTS
from bert_core.typed import as_type

Names = Mapping[str, str]
"""Our names → Hugging Face's: of modules (endings such as `.weight` and `.bias` are kept) or of
whole tensors. `{n}` stands for the layer's number."""

# The model's objectives → the suffix of its transformers class.
ARCHITECTURES: dict[frozenset[str], str] = {
    frozenset(): "Model",
    frozenset({"mlm"}): "ForMaskedLM",
    frozenset({"nsp"}): "ForNextSentencePrediction",
    frozenset({"mlm", "nsp"}): "ForPreTraining",
    frozenset({"mlm", "sop"}): "ForPreTraining",
    frozenset({"rtd"}): "ForPreTraining",
    frozenset({"classification"}): "ForSequenceClassification",
    frozenset({"token_classification"}): "ForTokenClassification",
    frozenset({"span"}): "ForQuestionAnswering",
    frozenset({"multiple_choice"}): "ForMultipleChoice",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a family's files are laid out."""

    title: str
    """Prefix of its class names."""
    prefix: str
    """Prefix of the encoder's tensor names, absent in files of a bare encoder."""
    encoder: Names
    """Modules of the encoder, without either side's prefix."""
    split: tuple[str, str, str] | None
    """Names of query, key and value, without the prefix; None if they are one tensor."""
    by_head: bool = False
    """Whether that one tensor is ordered head by head."""
    heads: Mapping[str, Names]
    """Suffix of a class → modules of its heads, and its pooler if it has one."""
    tied: Names
    """Duplicate tensors that a file may hold → the tensor that each must equal."""
    keys: Names
    """Our dotted field name → entry of `config.json`."""
    defaults: EncoderConfig
    """Values of entries that `config.json` lacks."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Required values of entries of `config.json`, whatever the head."""
    required_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Suffix of a class → required values of entries that only it reads. Entries that a class does
    not read, or that only its training reads, are in neither table."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """Types of entries that `read` looks at and `keys` does not name."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Values of those that `config.json` lacks, where they differ from `required`."""
    read: Callable[[dict[str, Any]], dict[str, Any]] = lambda entries: entries
    """Converts entries to those that `keys` names; added entries whose name starts with `_` are
    never written."""
    filled: Names = field(default_factory=dict)
    """Entries that are always written → the entry whose value they take where our field is None."""
    token_ids: Names = field(default_factory=dict)
    """Entries of `config.json` that hold a special token's id → the token, `cls` or `sep`."""
    aliases: Names = field(default_factory=dict)
    """Alternative names of modules in files → the usual Hugging Face name."""


def _bert(title: str, prefix: str, heads: Mapping[str, Names], **more: Any) -> Layout:
    """Return a layout with BERT's names; RoBERTa and ELECTRA share them all, MPNet and DeBERTa most
    of them."""
    layer = "encoder.layer.{n}."
    parts = {
        "embeddings.word_embeddings": "embeddings.word_embeddings",
        "embeddings.position_embeddings": "embeddings.position_embeddings",
        "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.{n}.attention.output": f"{layer}attention.output.dense",
        "layers.{n}.attention_norm": f"{layer}attention.output.LayerNorm",
        "layers.{n}.feed_forward.up": f"{layer}intermediate.dense",
        "layers.{n}.feed_forward.down": f"{layer}output.dense",
        "layers.{n}.feed_forward_norm": f"{layer}output.LayerNorm",
    }
    attention = f"{layer}attention.self."
    defaults: dict[str, Any] = {
        "split": (f"{attention}query", f"{attention}key", f"{attention}value"),
        "keys": _BERT_KEYS,
    }
    encoder = parts | dict(more.pop("encoder", {}))
    return Layout(title=title, prefix=prefix, heads=heads, encoder=encoder, **defaults | more)


_BERT_KEYS = {
    "embeddings.vocab_size": "vocab_size",
    "embeddings.max_position_embeddings": "max_position_embeddings",
    "embeddings.type_vocab_size": "type_vocab_size",
    "embeddings.pad_token_id": "pad_token_id",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "attention.num_heads": "num_attention_heads",
    "attention.dropout": "attention_probs_dropout_prob",
    "feed_forward.intermediate_size": "intermediate_size",
    "feed_forward.activation": "hidden_act",
    "hidden_dropout_prob": "hidden_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
    "initializer_range": "initializer_range",
    "head.classifier_dropout": "classifier_dropout",
}
_CLASSIFIER = {"objectives.classification.head.linear": "classifier"}
_TOKENS = {"objectives.token_classification.head.linear": "classifier"}
_CHOICES = {"objectives.multiple_choice.head.linear": "classifier"}
_SPAN = {"objectives.span.head.linear": "qa_outputs"}
_BERT_MLM = {
    "objectives.mlm.head.transform.dense": "cls.predictions.transform.dense",
    "objectives.mlm.head.transform.norm": "cls.predictions.transform.LayerNorm",
    "objectives.mlm.head.bias": "cls.predictions.bias",
}


def _tied(decoder: str, words: str, bias: str | None) -> dict[str, str]:
    names = {f"{decoder}.weight": f"{words}.embeddings.word_embeddings.weight"}
    return names | ({f"{decoder}.bias": bias} if bias else {})


def _bert_heads() -> dict[str, Names]:
    pooler = {"encoder.pooler.dense": "bert.pooler.dense"}
    nsp = {"objectives.nsp.head.linear": "cls.seq_relationship"}
    return {
        "Model": pooler,
        "ForMaskedLM": _BERT_MLM,
        "ForPreTraining": pooler | _BERT_MLM | nsp,
        "ForNextSentencePrediction": pooler | nsp,
        "ForSequenceClassification": pooler | _CLASSIFIER,
        "ForMultipleChoice": pooler | _CHOICES,
        "ForTokenClassification": _TOKENS,
        "ForQuestionAnswering": _SPAN,
    }


def _roberta_heads(prefix: str = "roberta.") -> dict[str, Names]:
    pooler = {"encoder.pooler.dense": f"{prefix}pooler.dense"}
    return {
        "Model": pooler,
        "ForMaskedLM": {
            "objectives.mlm.head.transform.dense": "lm_head.dense",
            "objectives.mlm.head.transform.norm": "lm_head.layer_norm",
            "objectives.mlm.head.bias": "lm_head.bias",
        },
        "ForSequenceClassification": {
            "encoder.pooler.dense": "classifier.dense",
            "objectives.classification.head.linear": "classifier.out_proj",
        },
        "ForMultipleChoice": pooler | _CHOICES,
        "ForTokenClassification": _TOKENS,
        "ForQuestionAnswering": _SPAN,
    }


def _electra_heads() -> dict[str, Names]:
    return {
        "Model": {},
        "ForMaskedLM": {
            "objectives.mlm.head.transform.dense": "generator_predictions.dense",
            "objectives.mlm.head.transform.norm": "generator_predictions.LayerNorm",
            "objectives.mlm.head.bias": "generator_lm_head.bias",
        },
        "ForPreTraining": {
            "objectives.rtd.head.dense": "discriminator_predictions.dense",
            "objectives.rtd.head.linear": "discriminator_predictions.dense_prediction",
        },
        "ForSequenceClassification": _roberta_heads()["ForSequenceClassification"],
        "ForMultipleChoice": {"encoder.pooler.dense": "sequence_summary.summary"} | _CHOICES,
        "ForTokenClassification": _TOKENS,
        "ForQuestionAnswering": _SPAN,
    }


def _distilbert_heads() -> dict[str, Names]:
    pooler = {"encoder.pooler.dense": "pre_classifier"}
    return {
        "Model": {},
        "ForMaskedLM": {
            "objectives.mlm.head.transform.dense": "vocab_transform",
            "objectives.mlm.head.transform.norm": "vocab_layer_norm",
            "objectives.mlm.head.bias": "vocab_projector.bias",
        },
        "ForSequenceClassification": pooler | _CLASSIFIER,
        "ForMultipleChoice": pooler | _CHOICES,
        "ForTokenClassification": _TOKENS,
        "ForQuestionAnswering": _SPAN,
    }


def _albert_heads() -> dict[str, Names]:
    pooler = {"encoder.pooler.dense": "albert.pooler"}
    mlm = {
        "objectives.mlm.head.transform.dense": "predictions.dense",
        "objectives.mlm.head.transform.norm": "predictions.LayerNorm",
        "objectives.mlm.head.bias": "predictions.bias",
    }
    return {
        "Model": pooler,
        "ForMaskedLM": mlm,
        "ForPreTraining": pooler
        | mlm
        | {"objectives.sop.head.linear": "sop_classifier.classifier"},
        "ForSequenceClassification": pooler | _CLASSIFIER,
        "ForMultipleChoice": pooler | _CHOICES,
        "ForTokenClassification": _TOKENS,
        "ForQuestionAnswering": _SPAN,
    }


def _deberta_heads(version: int) -> dict[str, Names]:
    pooler = {"encoder.pooler.dense": "pooler.dense"}
    heads: dict[str, Names] = {
        "Model": {},
        "ForMaskedLM": _BERT_MLM,
        "ForSequenceClassification": pooler | _CLASSIFIER,
        "ForTokenClassification": _TOKENS,
        "ForQuestionAnswering": _SPAN,
    }
    return heads if version == 1 else heads | {"ForMultipleChoice": pooler | _CHOICES}


def _modernbert_heads() -> dict[str, Names]:
    def transformed(part: str) -> dict[str, str]:
        return {f"{part}.dense": "head.dense", f"{part}.norm": "head.norm"}

    pooler = transformed("encoder.pooler")
    return {
        "Model": {},
        "ForMaskedLM": transformed("objectives.mlm.head.transform")
        | {"objectives.mlm.head.bias": "decoder.bias"},
        "ForSequenceClassification": pooler | _CLASSIFIER,
        "ForMultipleChoice": pooler | _CHOICES,
        "ForTokenClassification": transformed("objectives.token_classification.head.transform")
        | _TOKENS,
        "ForQuestionAnswering": transformed("objectives.span.head.transform")
        | {"objectives.span.head.linear": "classifier"},
    }


def _modernbert_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Convert the entries of transformers 5, which list the type of every layer and have a table of
    RoPE parameters per type."""
    entries = dict(entries)
    kinds = entries.pop("layer_types", None)
    if kinds:
        whole = [index for index, kind in enumerate(kinds) if kind == _KINDS[True]]
        between = whole[1] if len(whole) > 1 else len(kinds)
        every = entries.setdefault("global_attn_every_n_layers", between)
        if every < 1 or kinds != [_KINDS[index % every == 0] for index in range(len(kinds))]:
            raise ConfigError(
                f"layer_types = {kinds}: wanted {_KINDS[True]} first and at equal intervals, "
                f"{_KINDS[False]} elsewhere"
            )
    scaling = entries.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ConfigError(f"rope_scaling = {scaling}: wanted none")
    parameters: Any = dict[str, Any] | None
    tables = as_type(parameters, entries.get("rope_parameters"), _FILE, key="rope_parameters") or {}
    for kind, name in ((_KINDS[True], "global_rope_theta"), (_KINDS[False], "local_rope_theta")):
        key = f"rope_parameters.{kind}"
        angles = as_type(parameters, tables.get(kind), _FILE, key=key) or {}
        if angles.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_type = {angles['rope_type']!r}: wanted 'default'")
        if "rope_theta" in angles:
            entries[name] = angles["rope_theta"]
    return entries


_KINDS = {True: "full_attention", False: "sliding_attention"}
_FILE = "config.json"


def _roberta_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Add the position offset: positions start after the id of [PAD]."""
    return entries | {"_position_offset": entries.get("pad_token_id", 1) + 1}


def _mpnet_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Add the position offset: positions start after id 1, whatever the id of [PAD]."""
    return entries | {"_position_offset": 2}


def _electra_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Add default sizes, and remove the embeddings' width if it equals the encoder's."""
    entries = {"embedding_size": 128, "hidden_size": 256} | entries
    if entries["embedding_size"] == entries["hidden_size"]:
        del entries["embedding_size"]
    return entries


def _deberta_entries(entries: dict[str, Any]) -> dict[str, Any]:
    """Resolve entries of -1, which stand for another entry's value, or for no value."""
    entries = dict(entries)
    if entries.get("max_relative_positions", -1) < 1:
        entries["max_relative_positions"] = entries.get("max_position_embeddings", 512)
    entries["position_buckets"] = max(0, entries.get("position_buckets", -1))
    if entries.get("conv_kernel_size", 0) > 0:
        entries.setdefault("conv_act", "tanh")
        if (groups := entries.get("conv_groups", 1)) != 1:
            raise ConfigError(f"conv_groups = {groups!r}: wanted 1, as in the published DebertaV2")
    else:
        entries = {key: value for key, value in entries.items() if not key.startswith("conv_")}
    return entries


_DEBERTA_KEYS = _BERT_KEYS | {
    "embeddings.absolute_positions": "position_biased_input",
    "attention.max_relative_positions": "max_relative_positions",
    "head.classifier_dropout": "cls_dropout",
    "head.pooler_dropout": "pooler_dropout",
    "head.pooler_activation": "pooler_hidden_act",
}
_DEBERTA_REQUIRED = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "talking_head": False,
}
_DEBERTA_ABSENT = {"relative_attention": False, "pos_att_type": []}
_DEBERTA_ALIASES = {
    "lm_predictions.lm_head.dense": "cls.predictions.transform.dense",
    "lm_predictions.lm_head.LayerNorm": "cls.predictions.transform.LayerNorm",
    "lm_predictions.lm_head.bias": "cls.predictions.bias",
}

_MODERNBERT_HEAD = {"classifier_activation": "gelu", "classifier_bias": False}

# ModernBERT-base, except for pooling.
_MODERNBERT = VARIANTS["modernbert-base"].config
_MODERNBERT = replace(_MODERNBERT, head=replace(_MODERNBERT.head, pooling="cls"))
_ENDS = {"bos_token_id": "cls", "eos_token_id": "sep"}
_LAYER = "encoder.layer.{n}."
_MPNET = f"{_LAYER}attention.attn."
_ALBERT = "encoder.albert_layer_groups.0.albert_layers.0."


def _roberta(family: Family, title: str, vocab_size: int) -> Layout:
    """Return RoBERTa's layout under the class names (`title`) of one of its families."""
    return _bert(
        title,
        "roberta.",
        _roberta_heads(),
        tied=_tied("lm_head.decoder", "roberta", "lm_head.bias"),
        token_ids=_ENDS,
        keys=_BERT_KEYS | {"embeddings.position_offset": "_position_offset"},
        read=_roberta_entries,
        defaults=EncoderConfig(
            family=family,
            embeddings=EmbeddingsConfig(vocab_size=vocab_size, position_offset=2, pad_token_id=1),
            head=HeadConfig(pooler_dropout=None, transform_activation="gelu"),
        ),
    )


LAYOUTS: dict[str, Layout] = {
    "bert": _bert(
        "Bert",
        "bert.",
        _bert_heads(),
        tied=_tied("cls.predictions.decoder", "bert", "cls.predictions.bias"),
        defaults=EncoderConfig(),
    ),
    "roberta": _roberta("roberta", "Roberta", vocab_size=50265),
    "xlm-roberta": _roberta("xlm-roberta", "XLMRoberta", vocab_size=30522),
    "mpnet": _bert(
        "MPNet",
        "mpnet.",
        _roberta_heads("mpnet."),
        encoder={
            "shared.embeddings": "encoder.relative_attention_bias",
            "layers.{n}.attention.output": f"{_MPNET}o",
            "layers.{n}.attention_norm": f"{_LAYER}attention.LayerNorm",
        },
        split=(f"{_MPNET}q", f"{_MPNET}k", f"{_MPNET}v"),
        tied=_tied("lm_head.decoder", "mpnet", "lm_head.bias"),
        token_ids=_ENDS,
        keys={
            path: key
            for path, key in _BERT_KEYS.items()
            if path not in ("embeddings.type_vocab_size", "head.classifier_dropout")
        }
        | {"embeddings.position_offset": "_position_offset"},
        read=_mpnet_entries,
        # Its class hard-codes the other sizes of its buckets.
        required={"relative_attention_num_buckets": 32},
        defaults=EncoderConfig(
            family="mpnet",
            embeddings=EmbeddingsConfig(
                vocab_size=30527, position_offset=2, type_vocab_size=0, pad_token_id=1
            ),
            attention=BiasedAttentionConfig(),
            head=HeadConfig(pooler_dropout=None, transform_activation="gelu"),
        ),
    ),
    "electra": _bert(
        "Electra",
        "electra.",
        _electra_heads(),
        encoder={"embeddings.widen": "embeddings_project"},
        tied=_tied("generator_lm_head", "electra", None),
        keys=_BERT_KEYS | {"embeddings.size": "embedding_size"},
        filled={"embedding_size": "hidden_size"},
        read=_electra_entries,
        required_of={
            "ForMultipleChoice": {
                "summary_type": "first",
                "summary_use_proj": True,
                "summary_activation": "gelu",
            }
        },
        defaults=EncoderConfig(  # ELECTRA-small
            family="electra",
            hidden_size=256,
            attention=AttentionConfig(num_heads=4),
            feed_forward=FeedForwardConfig(intermediate_size=1024),
            head=HeadConfig(
                pooler_activation="gelu", pooler_dropout=None, transform_activation="gelu"
            ),
        ),
    ),
    "distilbert": Layout(
        title="DistilBert",
        prefix="distilbert.",
        heads=_distilbert_heads(),
        encoder={
            "embeddings.word_embeddings": "embeddings.word_embeddings",
            "embeddings.position_embeddings": "embeddings.position_embeddings",
            "embeddings.norm": "embeddings.LayerNorm",
            "layers.{n}.attention.output": "transformer.layer.{n}.attention.out_lin",
            "layers.{n}.attention_norm": "transformer.layer.{n}.sa_layer_norm",
            "layers.{n}.feed_forward.up": "transformer.layer.{n}.ffn.lin1",
            "layers.{n}.feed_forward.down": "transformer.layer.{n}.ffn.lin2",
            "layers.{n}.feed_forward_norm": "transformer.layer.{n}.output_layer_norm",
        },
        split=(
            "transformer.layer.{n}.attention.q_lin",
            "transformer.layer.{n}.attention.k_lin",
            "transformer.layer.{n}.attention.v_lin",
        ),
        tied=_tied("vocab_projector", "distilbert", None),
        keys={
            "embeddings.vocab_size": "vocab_size",
            "embeddings.max_position_embeddings": "max_position_embeddings",
            "embeddings.pad_token_id": "pad_token_id",
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "attention.num_heads": "n_heads",
            "attention.dropout": "attention_dropout",
            "feed_forward.intermediate_size": "hidden_dim",
            "feed_forward.activation": "activation",
            "hidden_dropout_prob": "dropout",
            "initializer_range": "initializer_range",
            "head.classifier_dropout": "seq_classif_dropout",
            "head.span_dropout": "qa_dropout",
        },
        defaults=EncoderConfig(
            family="distilbert",
            num_hidden_layers=6,
            embeddings=EmbeddingsConfig(type_vocab_size=0),
            head=HeadConfig(pooler_activation="relu", classifier_dropout=0.2, span_dropout=0.1),
        ),
    ),
    "albert": Layout(
        title="Albert",
        prefix="albert.",
        heads=_albert_heads(),
        encoder={
            "embeddings.word_embeddings": "embeddings.word_embeddings",
            "embeddings.position_embeddings": "embeddings.position_embeddings",
            "embeddings.token_type_embeddings": "embeddings.token_type_embeddings",
            "embeddings.norm": "embeddings.LayerNorm",
            "embeddings.widen": "encoder.embedding_hidden_mapping_in",
            "layers.0.attention.output": f"{_ALBERT}attention.dense",
            "layers.0.attention_norm": f"{_ALBERT}attention.LayerNorm",
            "layers.0.feed_forward.up": f"{_ALBERT}ffn",
            "layers.0.feed_forward.down": f"{_ALBERT}ffn_output",
            "layers.0.feed_forward_norm": f"{_ALBERT}full_layer_layer_norm",
        },
        split=(f"{_ALBERT}attention.query", f"{_ALBERT}attention.key", f"{_ALBERT}attention.value"),
        tied=_tied("predictions.decoder", "albert", "predictions.bias"),
        keys=_BERT_KEYS
        | {
            "embeddings.size": "embedding_size",
            "head.classifier_dropout": "classifier_dropout_prob",
        },
        required={"num_hidden_groups": 1, "inner_group_num": 1},
        token_ids=_ENDS,
        defaults=EncoderConfig(  # ALBERT-xxlarge
            family="albert",
            hidden_size=4096,
            shared_layers=True,
            hidden_dropout_prob=0.0,
            embeddings=EmbeddingsConfig(vocab_size=30000, size=128, projected=True),
            attention=AttentionConfig(num_heads=64, dropout=0.0),
            feed_forward=FeedForwardConfig(intermediate_size=16384, activation="gelu_new"),
            head=HeadConfig(classifier_dropout=0.1),
        ),
    ),
    "deberta": _bert(
        "Deberta",
        "deberta.",
        _deberta_heads(version=1),
        encoder={
            "shared.embeddings": "encoder.rel_embeddings",
            "layers.{n}.attention.qkv": f"{_LAYER}attention.self.in_proj",
            "layers.{n}.attention.qkv.query_bias": f"{_LAYER}attention.self.q_bias",
            "layers.{n}.attention.qkv.value_bias": f"{_LAYER}attention.self.v_bias",
            "layers.{n}.attention.position_key": f"{_LAYER}attention.self.pos_proj",
            "layers.{n}.attention.position_query": f"{_LAYER}attention.self.pos_q_proj",
        },
        split=None,
        by_head=True,
        tied=_tied("cls.predictions.decoder", "deberta", "cls.predictions.bias"),
        keys=_DEBERTA_KEYS,
        required=_DEBERTA_REQUIRED,
        absent=_DEBERTA_ABSENT,
        read=_deberta_entries,
        aliases=_DEBERTA_ALIASES,
        defaults=EncoderConfig(
            family="deberta",
            layer_norm_eps=1e-7,
            embeddings=EmbeddingsConfig(vocab_size=50265, type_vocab_size=0),
            attention=DisentangledAttentionConfig(),
            head=HeadConfig(pooler_activation="gelu"),
        ),
    ),
    "deberta-v2": _bert(
        "DebertaV2",
        "deberta.",
        _deberta_heads(version=2),
        encoder={
            "shared.embeddings": "encoder.rel_embeddings",
            "shared.norm": "encoder.LayerNorm",
            "convolution.conv": "encoder.conv.conv",
            "convolution.norm": "encoder.conv.LayerNorm",
        },
        split=tuple(f"{_LAYER}attention.self.{part}_proj" for part in ("query", "key", "value")),
        tied=_tied("cls.predictions.decoder", "deberta", "cls.predictions.bias"),
        keys=_DEBERTA_KEYS
        | {
            "attention.position_buckets": "position_buckets",
            "convolution.kernel_size": "conv_kernel_size",
            "convolution.activation": "conv_act",
        },
        required=_DEBERTA_REQUIRED | {"share_att_key": True, "norm_rel_ebd": "layer_norm"},
        absent=_DEBERTA_ABSENT | {"share_att_key": False, "norm_rel_ebd": "none"},
        read=_deberta_entries,
        aliases=_DEBERTA_ALIASES,
        defaults=EncoderConfig(  # DeBERTa-v2-xlarge
            family="deberta-v2",
            hidden_size=1536,
            num_hidden_layers=24,
            layer_norm_eps=1e-7,
            embeddings=EmbeddingsConfig(vocab_size=128100, type_vocab_size=0),
            attention=DisentangledAttentionConfig(
                num_heads=24, shared_projections=True, normalised=True
            ),
            feed_forward=FeedForwardConfig(intermediate_size=6144),
            head=HeadConfig(pooler_activation="gelu"),
        ),
    ),
    "modernbert": Layout(
        title="ModernBert",
        prefix="model.",
        heads=_modernbert_heads(),
        encoder={
            "embeddings.word_embeddings": "embeddings.tok_embeddings",
            "embeddings.norm": "embeddings.norm",
            "layers.{n}.attention_norm": "layers.{n}.attn_norm",
            "layers.{n}.attention.qkv": "layers.{n}.attn.Wqkv",
            "layers.{n}.attention.output": "layers.{n}.attn.Wo",
            "layers.{n}.feed_forward_norm": "layers.{n}.mlp_norm",
            "layers.{n}.feed_forward.up": "layers.{n}.mlp.Wi",
            "layers.{n}.feed_forward.down": "layers.{n}.mlp.Wo",
            "norm": "final_norm",
        },
        split=None,
        tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        keys={
            "embeddings.vocab_size": "vocab_size",
            "embeddings.max_position_embeddings": "max_position_embeddings",
            "embeddings.pad_token_id": "pad_token_id",
            "hidden_size": "hidden_size",
            "num_hidden_layers": "num_hidden_layers",
            "attention.num_heads": "num_attention_heads",
            "attention.dropout": "attention_dropout",
            "attention.window": "local_attention",
            "attention.global_every": "global_attn_every_n_layers",
            "attention.theta": "global_rope_theta",
            "attention.local_theta": "local_rope_theta",
            "feed_forward.intermediate_size": "intermediate_size",
            "hidden_dropout_prob": "embedding_dropout",
            "layer_norm_eps": "norm_eps",
            "initializer_range": "initializer_range",
            "initializer_cutoff": "initializer_cutoff_factor",
            "head.pooling": "classifier_pooling",
            "head.classifier_dropout": "classifier_dropout",
        },
        required={
            "hidden_activation": "gelu",
            "attention_bias": False,
            "mlp_bias": False,
            "norm_bias": False,
        },
        required_of={
            **dict.fromkeys(_modernbert_heads().keys() - {"Model"}, _MODERNBERT_HEAD),
            "ForMaskedLM": _MODERNBERT_HEAD | {"decoder_bias": True},
        },
        kinds={"layer_types": list[str], "rope_scaling": dict[str, Any]},
        read=_modernbert_entries,
        token_ids=_ENDS | {"cls_token_id": "cls", "sep_token_id": "sep"},
        defaults=_MODERNBERT,
    ),
}
