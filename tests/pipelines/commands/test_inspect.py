"""`raybert inspect`: every section holds what the model itself says."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import ConfigError, InputError
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from pipelines import cli
from pipelines.commands.inspect import InspectConfig, look, run, write_page

TAUGHT = "the a old man sat by bank of river and took money to on right is turn answer"
WORDS = TAUGHT.split()
LAYERS, HEADS = 3, 4
TEXT, PAIR = "The old man sat by the bank.", "The river is old."
SENTENCES = ("A man took money.", "The old man sat on the river bank.", "Turn right.")
USES = ("The bank of the river.", "A man took the money to the bank.")
EVERYTHING: dict[str, Any] = {
    "text": TEXT,
    "text_pair": PAIR,
    "next_sentence": True,
    "masked": "The [MASK] sat by the [MASK].",
    "sentences": SENTENCES,
    "word": "bank",
    "word_sentences": USES,
}


def saved(path: Path, heads: bool = True, task: Any = None) -> Path:
    from bert_core.objectives.mlm import MaskedLanguageModeling
    from bert_core.objectives.sentence_pairs import NextSentencePrediction
    from tests import tiny

    tokenizer = tiny.tokenizer([*WORDS, "."])
    config = tiny.encoder_config(
        tokenizer.vocab_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=160,
    )
    objectives = [MaskedLanguageModeling, NextSentencePrediction] if heads else []
    return tiny.bundle(path, tokenizer, config, task=task, objectives=objectives)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pretraining has given its heads."""
    return saved(tmp_path_factory.mktemp("inspect") / "bundle")


def config_of(folder: Path, **more: Any) -> InspectConfig:
    return InspectConfig(model=str(folder), **more)


def test_sections_are_the_requested_ones(folder: Path) -> None:
    assert list(look(config_of(folder, text=TEXT))) == ["model", "attention"]
    assert list(look(config_of(folder, masked="The [MASK]."))) == ["model", "masks"]
    assert list(look(config_of(folder, word="bank", word_sentences=USES))) == ["model", "word"]
    every = ["model", "attention", "next_sentence", "masks", "nearest", "word"]
    assert list(look(config_of(folder, **EVERYTHING))) == every


def test_weights_are_kept_to_thousandths(folder: Path) -> None:
    from bert_core.inference.inspection import attention
    from bert_core.inference.predictor import Predictor

    section = look(config_of(folder, text=TEXT, text_pair=PAIR))["attention"]
    predictor = Predictor(folder, device="cpu")
    seen = attention(predictor.model, predictor.bundle.tokenizer, TEXT, PAIR)
    size = len(seen.tokens)
    kept = np.array(section["weights"]).reshape(LAYERS, HEADS, size, size) / 1000
    np.testing.assert_allclose(kept, seen.weights, atol=5.01e-4)
    assert section["tokens"] == seen.tokens


def test_candidates_and_verdict_are_the_tasks_own(folder: Path) -> None:
    from transformers import pipeline

    from bert_core.inference.predictor import Predictor

    found = look(config_of(folder, **EVERYTHING, top_k=3))
    peer: Any = pipeline("fill-mask", model=str(folder), device="cpu", top_k=3)
    for ours, theirs in zip(found["masks"]["masks"], peer(EVERYTHING["masked"]), strict=True):
        assert [one["token"] for one in ours] == [one["token"] for one in theirs]
        wanted = [one["score"] for one in theirs]
        assert [one["score"] for one in ours] == pytest.approx(wanted, abs=1e-5)
    predictor = Predictor(folder, task="next-sentence-prediction")
    (verdict,) = predictor.predict([{"text": TEXT, "text_pair": PAIR}])
    assert found["next_sentence"]["answer"] == verdict


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sentences_are_sorted_by_the_vectors_that_the_model_makes(
    pooling: Any, tmp_path: Path
) -> None:
    from bert_core.inference.predictor import Predictor

    options = FeatureExtractionOptions(pooling=pooling)
    path = saved(tmp_path / "bundle", heads=False, task=FeatureExtraction(options=options))
    found = look(config_of(path, text=TEXT, sentences=SENTENCES))["nearest"]["sentences"]
    first, *others = np.array(Predictor(path).predict([TEXT, *SENTENCES]))
    plain = {
        text: float(first @ one / np.sqrt(first @ first * (one @ one)))
        for text, one in zip(SENTENCES, others, strict=True)
    }
    assert [one["text"] for one in found] == sorted(plain, key=lambda text: -plain[text])
    assert [one["score"] for one in found] == pytest.approx(
        sorted(plain.values(), reverse=True), abs=1e-3
    )


def test_the_short_form_says_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(folder, **EVERYTHING, output=str(tmp_path / "new" / "page.html"))
    run(config)
    printed = capsys.readouterr().out
    found = look(config)
    assert f"{folder}: bert, 3 layers of 4 heads, hidden size 32, pretrained only" in printed
    shares = np.array(found["attention"]["habits"]["the token before"])
    layer, head = np.argwhere(shares == shares.max())[0] + 1
    wanted = rf"the token before +{shares.max():.0%}  layer {layer}, head {head}"
    assert re.search(wanted, printed)
    best = found["masks"]["masks"][0][0]
    assert f"  {best['token_str']} {best['score']:.1%}, " in printed
    nearest = found["nearest"]["sentences"][0]
    assert f"  {nearest['score']:6.3f}  {nearest['text']}" in printed
    by_layer = [matrix[0][1] for matrix in found["word"]["cosines"]]
    assert " ".join(f"{each:.2f}" for each in by_layer) in printed
    assert f"inspect: {config.output}, 0.0 MB" in printed
    assert len(printed.splitlines()) < 25


def test_a_page_of_the_largest_text_of_bert_base_stays_below_8_mb(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(128, 0.3), size=(12, 12, 128))
    flat = np.rint(1000 * weights).astype(int).reshape(12, 12, -1).tolist()
    section = {"tokens": ["token"] * 128, "second_start": 128, "weights": flat, "habits": {}}
    assert write_page(str(tmp_path / "page.html"), {"attention": section}) < 8e6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, 'wanted something to look at, got nothing: give --text "…", --masked'),
        ({"text": " "}, "text: wanted text, got ' ': give some, or omit it"),
        ({"text": "a", "sentences": ("b", "")}, "sentences: wanted text, got ''"),
        ({"masked": "no mask"}, r"masked: wanted a text with \[MASK\] for each .* 'no mask': put"),
        ({"word": "bank"}, "word: wanted word_sentences with it, got none: give both"),
        ({"text": "a", "next_sentence": True}, "next_sentence: wanted text_pair with it"),
        ({"masked": "[MASK]", "sentences": ("a",)}, "sentences: wanted text with it"),
        ({"text": "a", "top_k": 0}, "top_k: wanted at least 1, got 0"),
    ],
)
def test_inconsistent_settings_are_refused_before_the_model_loads(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        InspectConfig(model="model", **more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"text": "bank " * 127}, "text: wanted at most 128 tokens .* got 129: shorten it"),
        ({"text": "bank " * 159}, "text: wanted at most 160 tokens .* got 161: shorten it"),
        ({"masked": "[MASK] " * 159}, "masked: wanted at most 160 tokens .* got 161: shorten it"),
        (
            {"text": "bank", "sentences": ("bank", "bank " * 159)},
            r"sentences\[1\]: wanted at most 160 tokens .* got 161: shorten it",
        ),
        (
            {"word": "bank", "word_sentences": ("The bank.",)},
            "word_sentences: wanted 'bank' at least twice, .* once: give another sentence with it",
        ),
    ],
)
def test_a_text_that_a_section_cannot_use_is_named(
    more: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(InputError, match=message):
        look(config_of(folder, **more))


@pytest.mark.parametrize("field", ["masked", "next_sentence"])
def test_a_missing_head_is_named(field: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "bundle", heads=False)
    more = {"masked": "The [MASK]."} if field == "masked" else {"text_pair": PAIR, field: True}
    message = f"{field}: wanted a model with a head for .* leave {field} out"
    with pytest.raises(ConfigError, match=message):
        look(config_of(path, text=TEXT, **more))
    found = look(config_of(path, text=TEXT, text_pair=PAIR))
    assert found["model"]["task"] is None


def test_the_command_writes_the_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", "--model", str(folder), "--text", TEXT, "--output", str(output)])
    assert ended.value.code == 0
    assert output.is_file()
    assert not re.findall(r'(?:src|href)="(?!data:)', output.read_text())
