"""Every family and head beside transformers' class: outputs, hidden states, gradients, names."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bert_core.determinism import fix_products
from bert_core.errors import ConfigError, FormatError, InputError
from bert_core.inference.export import TOLERANCE, export_graph, largest_difference
from bert_core.model.attention import RelativeBias
from bert_core.model.config import DisentangledAttentionConfig, EncoderConfig, RotaryAttentionConfig
from bert_core.model.disentangled import RelativePositions
from bert_core.model.encoder import Encoder
from bert_core.model.families import ARCHITECTURES, LAYOUTS
from bert_core.model.hf import (
    architecture,
    encoder_config_from_huggingface,
    encoder_config_to_huggingface,
)
from bert_core.model.hf_weights import from_huggingface, to_huggingface
from bert_core.model.sharing import plain_state
from bert_core.model.size import count_parameters, flops_per_token
from bert_core.model.variants import VARIANTS
from bert_core.objectives.base import Batch, Objective, ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.objectives.embedding import Embedding
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.multiple_choice import MultipleChoice
from bert_core.objectives.rtd import ReplacedTokenDetection
from bert_core.objectives.sentence_pairs import NextSentencePrediction, SentenceOrderPrediction
from bert_core.objectives.span import Span
from bert_core.objectives.token_classification import TokenClassification
from bert_core.torch_scores import TorchBackend

LABELS, CHOICES, VOCABULARY = 5, 2, 97
TOKENIZER = Tokenizer.from_vocabulary(
    [*SPECIAL_TOKENS, *map(chr, range(ord("!"), ord("!") + VOCABULARY - 5))], lowercase=False
)
LENGTHS = [16, 11, 5, 21]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 26,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "p2c|c2p"}
# Distances share vectors from 4 on, and rows are longer than that.
_DEBERTA_V2 = _DEBERTA | {
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_buckets": 8,
    "max_relative_positions": 20,
}
_MODERNBERT = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 26,
    "local_attention": 6,
    "global_rope_theta": 160.0,
    "local_rope_theta": 40.0,
}
# Entries of a small `config.json` of each kind of encoder there is.
KINDS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **SIZES},
    "roberta": {"model_type": "roberta", **SIZES, "type_vocab_size": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", **SIZES, "type_vocab_size": 1},
    # Distances share a bucket from 8 on, and rows are longer than that.
    "mpnet": {"model_type": "mpnet", **SIZES},
    # Embeddings narrower than the encoder, and as wide.
    "electra": {"model_type": "electra", **SIZES, "embedding_size": 12},
    "electra-wide": {"model_type": "electra", **SIZES, "embedding_size": 32},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": 26,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
        "qa_dropout": 0.0,
    },
    "albert": {
        "model_type": "albert",
        **SIZES,
        "embedding_size": 12,
        "classifier_dropout_prob": 0.0,
    },
    "deberta": {"model_type": "deberta", **SIZES, **_DEBERTA},
    # Rows are longer than the distances that it tells apart.
    "deberta-near": {
        "model_type": "deberta",
        **SIZES,
        **_DEBERTA,
        "max_relative_positions": 7,
    },
    "deberta-biased": {
        "model_type": "deberta",
        **SIZES,
        **_DEBERTA,
        "position_biased_input": True,
        "type_vocab_size": 2,
    },
    "deberta-v2": {"model_type": "deberta-v2", **SIZES, **_DEBERTA_V2, "conv_kernel_size": 3},
    "deberta-v3": {"model_type": "deberta-v2", **SIZES, **_DEBERTA_V2},
    # Rows are longer than a window, blocks of which end inside of rows.
    "modernbert": {"model_type": "modernbert", **_MODERNBERT},
    "modernbert-mean": {
        "model_type": "modernbert",
        **_MODERNBERT,
        "local_attention": 12,
        "global_attn_every_n_layers": 2,
        "classifier_pooling": "mean",
    },
}
HEADS: dict[str, Callable[[EncoderConfig], Objective]] = {
    "mlm": MaskedLanguageModeling,
    "nsp": NextSentencePrediction,
    "sop": SentenceOrderPrediction,
    "classification": lambda config: Classification(config, LABELS),
    "token_classification": lambda config: TokenClassification(config, LABELS),
    "span": Span,
    "multiple_choice": MultipleChoice,
    "rtd": ReplacedTokenDetection,
    "embedding": lambda config: Embedding(),
}
QUICK = ("ForMaskedLM", "ForSequenceClassification")
CASES = [
    pytest.param(
        kind,
        tuple(sorted(objectives)),
        id=f"{kind}-{ending}",
        marks=[] if ending in QUICK else [pytest.mark.drill],
    )
    for kind, entries in KINDS.items()
    for objectives, ending in ARCHITECTURES.items()
    if objectives != {"rtd"}  # it has a generator: test_pretrained_bundles
    and ending in LAYOUTS[entries["model_type"]].heads
    and all(
        any(f".{name}." in ours for ours in LAYOUTS[entries["model_type"]].heads[ending])
        for name in objectives
    )
]
Model = TypeVar("Model", bound=nn.Module)
ABOUT_VARIANTS = """---
hide: [toc] # room for the table
---

# Encoders

`raybert pretrain --variant <variant>` trains a model of these sizes. Written by
`tests/bert_core/model/test_families.py`: parameters are exactly those of transformers' class
without a head; "published" is what the paper, or its authors' repository, says. GFLOP are per token
of a row of 512, for a forward and a backward pass.
"""
ABOUT_FAMILIES = """## Families

The test also compares each variant, made small, with transformers' own classes: with the same
weights, scores and all hidden states agree within 1e-5, padded and packed, and gradients within
1e-4. `Model` is the encoder alone. A recipe is a config that trains the family as its paper does
(`raybert list configs`); what each learns when made small is in [Small
recipes](benchmarks/recipes.md).
"""
CONFIGS = Path(__file__).parents[3] / "configs"


def config_of(kind: str) -> EncoderConfig:
    return encoder_config_from_huggingface(KINDS[kind])


def built(config: EncoderConfig, objectives: tuple[str, ...]) -> ObjectiveModel:
    """Ours; without objectives it has a pooler where theirs has one."""
    torch.manual_seed(1)
    model = ObjectiveModel(config, [HEADS[name](config) for name in objectives])
    if not objectives and "encoder.pooler.dense" in LAYOUTS[config.family].heads["Model"]:
        model.encoder = Encoder(config)
    return scrambled(model).eval()


def ours_of(kind: str, objectives: tuple[str, ...]) -> ObjectiveModel:
    return built(config_of(kind), objectives)


def their_class(entries: dict[str, Any], objectives: tuple[str, ...], name: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(entries.pop("model_type"), **entries)
    config.num_labels = 2 if {"sop", "span", "nsp"} & set(objectives) else LABELS
    torch.manual_seed(2)
    return scrambled(getattr(transformers, name)(config)).eval()


def theirs_of(kind: str, objectives: tuple[str, ...]) -> nn.Module:
    name = architecture(config_of(kind), frozenset(objectives))
    return their_class(dict(KINDS[kind]), objectives, name)


def scrambled(model: Model) -> Model:
    """Biases off zero and norms off one, or a mix-up of two of them would go unseen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


ROW_BY_ROW = "bert_core.model.layout.ROW_BY_ROW"
"""Set to 0, each row that lies end to end is a block of its own; set high, rows share blocks."""


def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Batch]:
    """The rows of `batches` in every way that an encoder computes on them."""
    padded, packed = batches()
    yield padded
    for row_by_row, evened in ((0, False), (1000, False), (0, True), (1000, True)):
        monkeypatch.setattr(ROW_BY_ROW, row_by_row)
        monkeypatch.setattr("bert_core.model.layout.BIN_TOKENS", 8)  # rows fill more than one bin
        monkeypatch.setattr(Encoder, "_makes_kernels", lambda *_, evened=evened: evened)
        yield packed


def batches() -> tuple[Batch, Batch]:
    """The same rows, padded and end to end; ids are never [PAD]'s, 0 or 1, nor is padding more."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    types = [(torch.arange(length) >= length // 2).long() for length in LENGTHS]
    padded = {
        "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "token_type_ids": nn.utils.rnn.pad_sequence(types, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence([row * 0 + 1 for row in rows], True),
    }
    real = padded["attention_mask"].flatten().nonzero().flatten()
    choices = {"choices": torch.full((len(LENGTHS) // CHOICES,), CHOICES)}
    everywhere = {"mlm_positions": real, "token_positions": real} | choices
    count = torch.arange(len(real))
    packed = {
        "input_ids": torch.cat(rows),
        "token_type_ids": torch.cat(types),
        "offsets": torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)]),
    }
    packed |= {"mlm_positions": count, "token_positions": count}
    return padded | everywhere, packed | choices


def forward_of(entries: dict[str, Any], model: nn.Module, batch: Batch, choices: bool) -> Any:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    # Their [PAD] is 1 where ours pads with 0, which says as little.
    pad = encoder_config_from_huggingface(entries).embeddings.pad_token_id
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
    if "type_vocab_size" in entries or entries["model_type"] in ("bert", "albert", "electra"):
        segments = entries.get("type_vocab_size", 2) > 1
        inputs["token_type_ids"] = batch["token_type_ids"] * segments
    if choices:
        inputs = {name: value.unflatten(0, (-1, CHOICES)) for name, value in inputs.items()}
    return model(**inputs, output_hidden_states=True)


def logits_of(output: Any, objectives: tuple[str, ...], real: Tensor) -> dict[str, Tensor]:
    """Their scores in the form of ours, at real tokens."""
    found = {}
    for name in objectives:
        if name == "span":
            both = torch.stack([output.start_logits, output.end_logits], dim=-1)
            found[name] = both[real]
        elif name == "mlm":
            scores = output.prediction_logits if "prediction_logits" in output else output.logits
            found[name] = scores[real]
        elif name == "token_classification":
            found[name] = output.logits[real]
        elif name == "rtd":
            found[name] = output.logits[real][:, None]
        elif name == "nsp" and "seq_relationship_logits" in output:
            found[name] = output.seq_relationship_logits
        elif name == "sop":
            found[name] = output.sop_logits
        else:
            found[name] = output.logits
    return found


def ours_logits(model: ObjectiveModel, batch: Batch, real: Tensor) -> dict[str, Tensor]:
    logits = model.logits(batch)
    return {name: value[real] if name == "span" else value for name, value in logits.items()}


def load_into_theirs(model: nn.Module, state: dict[str, Tensor], config: EncoderConfig) -> None:
    prefix = (
        "" if hasattr(model, LAYOUTS[config.family].prefix[:-1]) else LAYOUTS[config.family].prefix
    )
    named = {name.removeprefix(prefix): one for name, one in to_huggingface(state, config).items()}
    keys = model.load_state_dict(named, strict=False)
    assert not keys.unexpected_keys
    # The tied decoder is the word embedding, which the module itself shares.
    assert set(keys.missing_keys) <= LAYOUTS[config.family].tied.keys()


@pytest.mark.parametrize(("kind", "objectives"), CASES)
def test_outputs_hidden_states_gradients_and_names_equal_transformers(
    kind: str, objectives: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, config = ours_of(kind, objectives), theirs_of(kind, objectives), config_of(kind)
    load_into_theirs(theirs, ours.state_dict(), config)
    name = architecture(config, frozenset(objectives))
    again = from_huggingface(theirs.state_dict(), config, name)
    assert again.keys() == ours.state_dict().keys()
    assert all(torch.equal(again[one], value) for one, value in ours.state_dict().items())
    padded, _ = batches()
    real = padded["attention_mask"] == 1
    expected = forward_of(KINDS[kind], theirs, padded, objectives == ("multiple_choice",))
    hidden_states = [one.flatten(0, -3) for one in expected.hidden_states]
    scores = logits_of(expected, objectives, real)
    for batch in ways(monkeypatch):
        encoded = ours.encoder(
            batch["input_ids"],
            batch["token_type_ids"],
            batch.get("attention_mask"),
            batch.get("offsets"),
            all_layers=True,
        )
        assert len(encoded.layers) == len(hidden_states)
        for mine, other in zip(encoded.layers, hidden_states, strict=True):
            mine = mine if "offsets" in batch else mine[real]
            torch.testing.assert_close(mine, other[real], atol=1e-5, rtol=0)
        if not objectives and encoded.pooled is not None:
            torch.testing.assert_close(encoded.pooled, expected.pooler_output, atol=1e-5, rtol=0)
        mine = ours_logits(ours, batch, real)
        assert mine.keys() == scores.keys()
        for name, score in scores.items():
            torch.testing.assert_close(mine[name], score, atol=1e-5, rtol=0)
    if not objectives:
        return
    tied = LAYOUTS[config.family].tied  # a module names what it shares by whichever comes first
    slopes = gradients(theirs, loss_of(scores))
    wanted = {tied.get(name, name): gradient for name, gradient in slopes.items()}
    for batch in ways(monkeypatch):
        ours.zero_grad()
        found = to_huggingface(gradients(ours, loss_of(ours_logits(ours, batch, real))), config)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("modernbert")])
def test_masked_words_have_transformers_scores_whatever_the_activation(
    kind: str, activation: str
) -> None:
    """Some families have a GELU before vocabulary scores whatever the layers have."""
    entries = KINDS[kind] | {"activation" if kind == "distilbert" else "hidden_act": activation}
    config = encoder_config_from_huggingface(entries)
    ours = built(config, ("mlm",))
    theirs = their_class(dict(entries), ("mlm",), architecture(config, frozenset({"mlm"})))
    load_into_theirs(theirs, ours.state_dict(), config)
    padded, _ = batches()
    real = padded["attention_mask"] == 1
    expected = forward_of(entries, theirs, padded, choices=False).logits[real]
    torch.testing.assert_close(ours.logits(padded)["mlm"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dropped", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
@pytest.mark.parametrize("kind", ["bert", "mpnet", "deberta-v3"])
def test_dropout_moves_hidden_states_as_far_as_transformers_does(kind: str, dropped: str) -> None:
    entries = KINDS[kind] | {dropped: 0.2}
    config = encoder_config_from_huggingface(entries)
    ours = built(config, ("mlm",))
    theirs = their_class(dict(entries), ("mlm",), architecture(config, frozenset({"mlm"})))
    load_into_theirs(theirs, ours.state_dict(), config)
    padded, packed = batches()
    # Every row 200 times: 20 draws of 10 copies, each of which loses others of its numbers.
    padded = {
        name: padded[name].repeat(10, 1)
        for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    real = padded["attention_mask"] == 1
    ends = torch.tensor([0, *torch.tensor(LENGTHS * 10).cumsum(0)])
    packed = {name: packed[name].repeat(10) for name in ("input_ids", "token_type_ids")}

    @torch.no_grad()
    def moved(model: nn.Module, vectors: Callable[[], Tensor]) -> float:
        still = vectors()
        model.train()
        torch.manual_seed(0)
        return float(sum((vectors() - still).square().mean() for _ in range(20)) / 20)

    wanted = moved(
        theirs,
        lambda: forward_of(entries, theirs, padded, choices=False).hidden_states[-1][real],
    )
    found = moved(
        ours.encoder,
        lambda: ours.encoder(packed["input_ids"], packed["token_type_ids"], offsets=ends).hidden,
    )
    assert found == pytest.approx(wanted, rel=0.05)


@pytest.mark.skipif(not fix_products(), reason="this CPU's products depend on their shape")
@pytest.mark.parametrize("kind", KINDS)
def test_in_inference_mode_a_row_is_the_same_to_the_bit_in_any_company(kind: str) -> None:
    # As wide as vector registers are long, like all published encoders: what is left over of a
    # layer's activations would be computed by other instructions.
    wide = {"hidden_dim" if kind == "distilbert" else "intermediate_size": 64}
    torch.manual_seed(1)
    encoder = scrambled(Encoder(encoder_config_from_huggingface(KINDS[kind] | wide))).eval()
    rows = [torch.randint(2, VOCABULARY, (length,)) for length in (9, *LENGTHS, 9, 24, 1)]

    def vectors(of: list[Tensor]) -> tuple[Tensor, ...]:
        ids, lengths = torch.cat(of), [len(row) for row in of]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        return encoder(ids, ids * 0, offsets=offsets).hidden.split(lengths)

    with torch.inference_mode():
        alone = [vectors([row])[0] for row in rows]
        for order in (range(len(rows)), reversed(range(len(rows))), (0, 5, 2), (5, 0)):
            chosen = list(order)
            for index, hidden in zip(chosen, vectors([rows[i] for i in chosen]), strict=True):
                assert torch.equal(hidden, alone[index]), f"row {index} of {chosen}"


@pytest.mark.parametrize("row_by_row", [0, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_at_any_padding_and_in_any_company(
    kind: str, row_by_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROW_BY_ROW, row_by_row)
    config = config_of(kind)
    torch.manual_seed(1)
    encoder = scrambled(Encoder(config)).eval()
    row = torch.randint(2, VOCABULARY, (1, 9))
    alone = encoder(row, row * 0).hidden
    for padding in (1, 4, 11):
        # What stands under the padding must not matter either: garbage, not only [PAD].
        ids = torch.cat([row, torch.randint(0, VOCABULARY, (1, padding))], dim=1)
        mask = (torch.arange(9 + padding) < 9).long()[None]
        padded = encoder(ids, ids * 0, mask).hidden[:, :9]
        torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)
    for before, after in ((0, 12), (5, 0), (17, 3)):
        others = [torch.randint(2, VOCABULARY, (count,)) for count in (before, after)]
        rows = [each for each in (others[0], row[0], others[1]) if len(each)]
        ids, lengths = torch.cat(rows), torch.tensor([len(each) for each in rows])
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        packed = encoder(ids, ids * 0, offsets=offsets).hidden[before : before + 9]
        torch.testing.assert_close(packed[None], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_tokens_that_are_asked_for_get_the_vectors_and_gradients_of_all(
    kind: str, layers: int
) -> None:
    config = replace(config_of(kind), num_hidden_layers=layers)
    torch.manual_seed(1)
    encoder = scrambled(Encoder(config)).eval()
    ids = torch.randint(2, VOCABULARY, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [7]])).long()
    offsets = torch.tensor([0, 9, 13, 20])
    flat, real = ids[mask.bool()], torch.tensor([0, 8, 10, 12, 18, 24])
    padded = {"input_ids": ids, "token_type_ids": ids % 2, "attention_mask": mask}
    packed = {"input_ids": flat, "token_type_ids": flat % 2, "offsets": offsets}
    for batch, places in ((padded, real), (packed, torch.tensor([0, 8, 10, 12, 14, 19]))):
        found = []
        for asked in (None, places, places[:0]):
            encoder.zero_grad()
            encoded = encoder(**batch, places=asked)
            hidden = encoded.hidden.flatten(0, -2)
            hidden = hidden[places] if asked is None else hidden
            total = hidden.square().sum() if asked is None or len(asked) else hidden.sum()
            (total + encoded.pooled.cos().sum()).backward()
            slopes = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
            found.append((hidden, encoded.pooled, slopes))
        (whole, pooled, wanted), (chosen, alike, slopes), (none, also, _) = found
        assert none.shape == (0, config.hidden_size)
        for mine, theirs in ((chosen, whole), (alike, pooled), (also, pooled)):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
        for name, slope in slopes.items():
            torch.testing.assert_close(slope, wanted[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_in_half_precision_gradients_are_those_of_fp32_but_for_rounding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    encoder = scrambled(Encoder(config_of(kind))).eval()
    _, packed = batches()
    rows = {name: packed[name] for name in ("input_ids", "token_type_ids", "offsets")}

    def gradient(half: bool) -> Tensor:
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            hidden = encoder(**rows).hidden
        hidden.float().cos().sum().backward()
        return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])

    wanted = gradient(half=False)
    for fused_from in (0, 512):
        monkeypatch.setattr("bert_core.model.dot_product.FUSED_FROM", fused_from)
        for row_by_row in (0, 1000):
            monkeypatch.setattr(ROW_BY_ROW, row_by_row)
            error = (gradient(half=True) - wanted).norm() / wanted.norm()
            assert 1e-4 < error < 0.05, (fused_from, row_by_row)


@pytest.mark.parametrize("row_by_row", [0, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_attention_are_those_of_transformers_and_change_nothing(
    kind: str, row_by_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(ROW_BY_ROW, row_by_row)
    ours = ours_of(kind, ())
    theirs: Any = theirs_of(kind, ())
    load_into_theirs(theirs, ours.state_dict(), ours.encoder.config)
    assert isinstance(theirs, transformers.PreTrainedModel)
    theirs.set_attn_implementation("eager")
    theirs.config.output_attentions = True
    padded, packed = batches()
    wanted = forward_of(dict(KINDS[kind]), theirs, padded, choices=False).attentions
    for batch in (padded, packed):
        encoded = ours.encode(batch, all_scores=True)
        alike = ours.encode(batch)
        real = encoded.rows.masks()
        for plain, fused in ((encoded.hidden, alike.hidden), (encoded.pooled, alike.pooled)):
            if fused is not None and "offsets" in batch:
                torch.testing.assert_close(plain, fused, atol=1e-5, rtol=0)
        assert len(encoded.scores) == len(wanted) == ours.encoder.config.num_hidden_layers
        for layer, their_layer in zip(encoded.scores, wanted, strict=True):
            assert len(layer) == len(real)
            found = [row for block in layer for row in block.softmax(-1)]  # each (H, s, s)
            for row, their_row, length in zip(found, their_layer, LENGTHS, strict=True):
                torch.testing.assert_close(
                    row[:, :length, :length], their_row[:, :length, :length], atol=1e-5, rtol=0
                )
                assert not row[:, :length, length:].any()


def test_distances_have_the_buckets_of_transformers() -> None:
    import transformers

    bias = RelativeBias(VARIANTS["mpnet-base"].config)
    distances = torch.arange(-600, 601)
    theirs = transformers.models.mpnet.modeling_mpnet.MPNetEncoder.relative_position_bucket
    assert torch.equal(bias.bucket(distances), theirs(distances))


def test_a_row_past_the_last_position_is_refused_with_both_lengths() -> None:
    encoder = Encoder(config_of("roberta"))
    ids = torch.full((1, 25), 2)
    with pytest.raises(InputError, match=r"rows of at most 24 tokens.* got 25"):
        encoder(ids, ids * 0)
    with pytest.raises(InputError, match=r"rows of at most 24 tokens.* got 25"):
        encoder(ids[0], ids[0] * 0, offsets=torch.tensor([0, 25]))


def batch_of(lengths: list[int]) -> Batch:
    """Rows of these lengths, padded to a multiple of 8; every real token asked for."""
    generator = torch.Generator().manual_seed(6)
    width = -(-max(lengths) // 8) * 8
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(2, VOCABULARY, mask.shape, generator=generator) * mask
    real = mask.flatten().nonzero().flatten()
    starts = torch.arange(len(lengths)) * width
    batch = {
        "input_ids": ids,
        "token_type_ids": (torch.arange(width) > 3).long() * mask,
        "mlm_positions": real,
        "token_positions": real,
        "vector_starts": starts,
        "vector_ends": starts + torch.tensor(lengths),
        "choices": torch.tensor([len(lengths)]),
    }
    return batch if mask.all() else batch | {"attention_mask": mask}


GRAPHS = [
    *(
        (kind, *objectives)
        for kind, objectives in cast(
            "list[tuple[str, tuple[str, ...]]]", [case.values for case in CASES]
        )
        if len(objectives) == 1
    ),
    *((kind, "embedding") for kind in KINDS),
]
# The drills have every kind, with its way of pooling, and every objective; the rest is for the
# matrix.
DRILLED = {
    *((kind, "classification") for kind in KINDS),
    *({objective: (kind, objective) for kind, objective in reversed(GRAPHS)}.values()),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "objective"),
    [
        pytest.param(*graph, marks=pytest.mark.drill if graph in DRILLED else pytest.mark.matrix)
        for graph in GRAPHS
    ],
)
def test_a_graph_gives_the_scores_of_torch(kind: str, objective: str, tmp_path: Path) -> None:
    import onnx

    from bert_core.inference.engines.onnxruntime import OnnxRuntime

    model = built(replace(config_of(kind), num_hidden_layers=2), (objective,))
    export_graph(model, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    backend = TorchBackend(model)
    graph_scores, positions = backend.objective.graph_scores, model.encoder.config.max_length
    assert graph_scores is not None
    graph = OnnxRuntime(tmp_path / "model.onnx", graph_scores, positions, threads=1)
    for lengths in ([24, 1, 15], [8], [7, 16], [16, 16, 16, 16, 16, 16, 16], [2]):
        batch = {name: tensor.numpy() for name, tensor in batch_of(lengths).items()}
        wanted, found = backend.logits(batch), graph.logits(batch)
        assert largest_difference([wanted], [found]) < TOLERANCE, lengths


def loss_of(scores: dict[str, Tensor]) -> Tensor:
    """Every score weighted by its own fixed number, so that none can stand for another."""
    generator = torch.Generator().manual_seed(4)
    weighted = [
        (score * torch.randn(score.shape, generator=generator)).sum() / len(score)
        for _, score in sorted(scores.items())
    ]
    return torch.stack(weighted).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize(("kind", "objectives"), CASES)
def test_every_parameter_gets_a_gradient(kind: str, objectives: tuple[str, ...]) -> None:
    """But a key's bias, to which softmax is blind where only content attends to content."""
    if not objectives:
        return
    model = ours_of(kind, objectives)
    padded, _ = batches()
    found = gradients(model, loss_of(ours_logits(model, padded, padded["attention_mask"] == 1)))
    config = config_of(kind)
    longest = max(LENGTHS)
    for name, _ in model.named_parameters():
        assert name in found, name
        gradient = found[name]
        if name.endswith("qkv.bias") and "deberta" not in kind:
            query, key, value = gradient.chunk(3)
            assert key.abs().max() < 1e-5
            gradient = torch.cat([query, value])
        if name.endswith("word_embeddings.weight") and "mlm" not in objectives:
            gradient = gradient[padded["input_ids"][padded["attention_mask"] == 1].unique()]
        if name.endswith("position_embeddings.weight"):  # positions that no row has
            offset = config.embeddings.position_offset
            gradient = gradient[offset : offset + longest]
        if name.endswith("token_type_embeddings.weight"):
            assert len(gradient) == config.embeddings.type_vocab_size
        if name == "encoder.shared.embeddings.weight":  # distances that no row has
            shared = model.encoder.shared
            assert isinstance(shared, RelativeBias | RelativePositions)
            near = shared.bucket(torch.arange(1 - longest, longest))
            if isinstance(shared, RelativePositions):
                near = (near + len(gradient) // 2).clamp(0, len(gradient) - 1)
            gradient = gradient[near.unique()]
        moved = (gradient.reshape(len(gradient), -1) != 0).any(-1)
        if ".pooler." in name and config.head.pooler_activation == "relu":
            assert moved.any(), name  # units that no row wakes up
        else:
            assert moved.all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_goes_there_and_back(kind: str) -> None:
    import transformers

    config = config_of(kind)
    entries = encoder_config_to_huggingface(config)
    assert encoder_config_from_huggingface(entries) == config
    theirs = transformers.AutoConfig.for_model(**entries)
    assert encoder_config_from_huggingface(theirs.to_dict()) == config
    assert encoder_config_from_huggingface(theirs.to_diff_dict()) == config


COMPILED = """
import json, sys, torch
from dataclasses import replace
from torch._dynamo.testing import CompileCounter
from bert_core.model.encoder import Encoder
from bert_core.model.hf import encoder_config_from_huggingface
for kind, entries in json.load(sys.stdin).items():
    torch._dynamo.reset()
    counter = CompileCounter()
    config = replace(encoder_config_from_huggingface(entries), num_hidden_layers=2)
    encoder = Encoder(config).eval()
    compiled = torch.compile(encoder, backend=counter, fullgraph=True)
    for rows, length in ((4, 8), (4, 16), (3, 24), (5, 20), (6, 12), (7, 22), (2, 9)):
        ids = torch.randint(2, 97, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        compiled(ids, ids * 0, mask)
    print(kind, counter.frame_count)
"""


@pytest.mark.drill
def test_an_encoder_compiles_whole_and_not_again_for_every_batch() -> None:
    """Once as the first batch is, then for any length, then for any number of rows."""
    # In a process of its own, since the checks of types here are no code that compiles.
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        input=json.dumps(KINDS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts.keys() == KINDS.keys()
    assert {kind: count for kind, count in counts.items() if int(count) > 3} == {}


@pytest.mark.drill
@pytest.mark.parametrize(("kind", "objectives"), [case for case in CASES if case.values[1]])
def test_bundles_go_to_transformers_and_back(
    kind: str, objectives: tuple[str, ...], tmp_path: Path
) -> None:
    import transformers

    model, config = ours_of(kind, objectives), config_of(kind)
    words = list(TOKENIZER.vocabulary)
    pad = config.embeddings.pad_token_id
    words[0], words[pad] = words[pad], words[0]
    tokenizer = Tokenizer.from_vocabulary(words, lowercase=False)
    save_bundle(tmp_path / "ours", model, tokenizer, About())
    name = architecture(config, frozenset(objectives))
    theirs, info = getattr(transformers, name).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    for name, special in LAYOUTS[config.family].token_ids.items():
        assert getattr(theirs.config, name) == getattr(tokenizer, f"{special}_id")
    padded, _ = batches()
    real = padded["attention_mask"] == 1
    output = forward_of(KINDS[kind], theirs.eval(), padded, objectives == ("multiple_choice",))
    mine = ours_logits(model, padded, real)
    for objective, scores in logits_of(output, objectives, real).items():
        torch.testing.assert_close(mine[objective], scores, atol=1e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        bundle = load_bundle(tmp_path / folder)
        assert bundle.encoder_config == config
        wanted = {k: v for k, v in model.state_dict().items() if ".classification." not in k}
        assert bundle.state.keys() >= wanted.keys()
        assert all(torch.equal(bundle.state[one], wanted[one]) for one in wanted)


@pytest.mark.usefixtures("unchecked")  # hundreds of models are built
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.guard if kind == "bert" else pytest.mark.drill)
        for kind in KINDS
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(kind: str, tmp_path: Path) -> None:
    """Every tensor in turn, as transformers' files have them."""
    # ModernBERT's first layer lacks a norm.
    layers = 2 if config_of(kind).family == "modernbert" else 1
    config = replace(config_of(kind), num_hidden_layers=layers)
    model = built(config, ("mlm",))
    save_bundle(tmp_path / "bundle", model, TOKENIZER, About())
    bundle = load_bundle(tmp_path / "bundle")
    whole = load_file(tmp_path / "bundle" / "model.safetensors")
    prefix = LAYOUTS[config.family].prefix
    encoder = [name for name in whole if name.startswith(prefix)]
    assert len(encoder) > 8
    for name in encoder:
        rest = {other: tensor for other, tensor in whole.items() if other != name}
        wider = {name: torch.zeros(*whole[name].shape[:-1], whole[name].shape[-1] + 1)}
        longer = {name: torch.zeros(whole[name].shape[0] + 1, *whole[name].shape[1:])}
        for state in (rest, rest | wider, rest | longer):
            with pytest.raises(FormatError, match=r"wanted encoder\.|tensor .*: wanted (shape|q)"):
                build_model(
                    replace(bundle, state=from_huggingface(state, config)), [HEADS["mlm"](config)]
                )


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_is_larger_than_the_model_is_refused(kind: str, tmp_path: Path) -> None:
    model = ours_of(kind, ("mlm",))
    save_bundle(tmp_path / "bundle", model, TOKENIZER, About())
    (tmp_path / "bundle" / "raybert.json").unlink()
    larger = Tokenizer.from_vocabulary([*TOKENIZER.vocabulary, "one", "more"], lowercase=False)
    larger.save(tmp_path / "bundle")
    with pytest.raises(
        FormatError, match=r"at most 97 tokens.*got 99 in the tokenizer: use the tok"
    ):
        load_bundle(tmp_path / "bundle")


def small(config: EncoderConfig) -> EncoderConfig:
    """The same mathematics in small: what an encoder is but for its sizes."""
    attention: dict[str, Any] = {"num_heads": 4, "dropout": 0.0}
    if isinstance(config.attention, DisentangledAttentionConfig):
        attention["max_relative_positions"] = 20
        attention["position_buckets"] = 8 if config.attention.position_buckets else 0
    if isinstance(config.attention, RotaryAttentionConfig):
        attention["window"] = 8
    embeddings = replace(
        config.embeddings,
        vocab_size=VOCABULARY,
        size=12 if config.embeddings.size else None,
        max_position_embeddings=24 + config.embeddings.position_offset,
        pad_token_id=min(config.embeddings.pad_token_id, VOCABULARY - 1),
    )
    return replace(
        config,
        hidden_size=32,
        num_hidden_layers=2,
        hidden_dropout_prob=0.0,
        embeddings=embeddings,
        attention=replace(config.attention, **attention),
        feed_forward=replace(config.feed_forward, intermediate_size=48),
    )


def equal_classes(config: EncoderConfig) -> list[str]:
    """transformers' classes that give what ours give, by their endings."""
    entries = encoder_config_to_huggingface(small(config))
    found = []
    for objectives, ending in ARCHITECTURES.items():
        try:
            name = architecture(config, objectives)
        except ConfigError:
            continue
        names = tuple(sorted(objectives))
        model = built(small(config), names)
        theirs = their_class(dict(entries), names, name)
        state = plain_state(model)
        whole = {one: value for one, value in state.items() if ".generator." not in one}
        load_into_theirs(theirs, whole, small(config))
        padded, packed = batches()
        real = padded["attention_mask"] == 1
        output = forward_of(entries, theirs, padded, names == ("multiple_choice",))
        wanted = output.hidden_states[-1].flatten(0, -3)[real]
        close = [(model.encode(packed).hidden - wanted).abs().max() < 1e-5]
        mine = ours_logits(model, padded, real)
        close += [
            (mine[one] - scores).abs().max() < 1e-5
            for one, scores in logits_of(output, names, real).items()
        ]
        if all(close):
            found.append(ending.removeprefix("For"))
    return found


def recipes_of(family: str) -> list[str]:
    """The configs by which a family is trained at its paper's size."""
    found = []
    for path in sorted(CONFIGS.glob("pretrain/*.toml")):
        variant = VARIANTS.get(tomllib.loads(path.read_text()).get("variant", ""))
        if variant is not None and variant.config.family == family:
            found.append(f"pretrain/{path.stem}")
    found = [name for name in found if not name.endswith(("_wikitext2", "_languages"))]
    return found + [f"distill/{path.stem}" for path in CONFIGS.glob(f"distill/{family}.toml")]


def test_every_family_has_a_recipe() -> None:
    assert [family for family in LAYOUTS if not recipes_of(family)] == []


@pytest.mark.drill
def test_the_table_of_variants_is_what_was_measured() -> None:
    """Rewrites `docs/variants.md` if it differs."""
    variants = [
        "| variant | family | layers | hidden | heads | parameters | published | GFLOP | paper |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    families = ["| family | tokenizer | recipes | classes that agree |", "|---|---|---|---|"]
    measured: dict[EncoderConfig, list[str]] = {}
    for name, variant in VARIANTS.items():
        config = variant.config
        if small(config) not in measured:
            measured[small(config)] = equal_classes(config)
        classes = ", ".join(measured[small(config)])
        recipes = ", ".join(f"`{recipe}`" for recipe in recipes_of(config.family))
        family = f"| {config.family} | {variant.tokenizer} | {recipes} | {classes} |"
        if family not in families:
            families.append(family)
        variants.append(
            f"| `{name}` | {config.family} | {config.num_hidden_layers} | {config.hidden_size} | "
            f"{config.attention.num_heads} | {count_parameters(config):,} | {variant.published} | "
            f"{flops_per_token(config, 512) / 1e9:.3f} | {variant.paper} |"
        )
    table = "\n".join([ABOUT_VARIANTS, *variants, "", ABOUT_FAMILIES, *families, ""])
    path = Path(__file__).parents[3] / "docs" / "variants.md"
    written = path.read_text() if path.exists() else ""
    if written != table:
        path.write_text(table)
    assert written == table, f"{path} was out of date and has been rewritten: commit it"
