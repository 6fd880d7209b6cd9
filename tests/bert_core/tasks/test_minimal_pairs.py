"""Scores of sentences beside a plain loop over masks with transformers, on the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_core.data.tokenizer import Tokenizer, TokenizerKind
from bert_core.data.vocabulary import train_tokenizer
from bert_core.errors import InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.base import CuttingParameters
from bert_core.tasks.minimal_pairs import BAD, GOOD, MinimalPairs
from tests import tiny

SENTENCES = ["The whales swim, don't they?", "the whale swims in the unknown sea", "a", ""]
TEXTS = [*SENTENCES, "The sea is blue. A whale's song; whales sing in the sea!"]
FAMILIES = {"wordpiece": "Bert", "bpe": "Roberta", "unigram": "XLMRoberta"}
OFFSET = {"wordpiece": 0, "bpe": 2, "unigram": 2}  # of RoBERTa's positions


def tokenizer_of(kind: TokenizerKind) -> Tokenizer:
    if kind == "wordpiece":
        words = ["the", "whale", "##es", "sea", "un", "##known", *"?,.'!;"]
        return tiny.tokenizer([*words, *tiny.pieces(tiny.ALPHABET)])
    return train_tokenizer(kind, TEXTS, vocab_size=290 if kind == "bpe" else 40, lowercase=True)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked-word model that transformers wrote."""
    import transformers

    path, tokenizer = tmp_path_factory.mktemp(request.param), tokenizer_of(request.param)
    family = FAMILIES[request.param]
    config = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForMaskedLM")
    torch.manual_seed(0)
    entries = tiny.entries(
        tokenizer.vocab_size,
        initializer_range=0.5,
        max_position_embeddings=32 + OFFSET[request.param],
    )
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_id}
    model(config(**entries, **ids)).save_pretrained(path)
    tokenizer.save(path, 32)
    return path


def plain_loop(folder: Path, text: str) -> float:
    """Mask each token with those after it in its word, and add up what its place gives it."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(text, return_tensors="pt")
    ids, words = encoded["input_ids"][0], encoded.word_ids(0)
    total = 0.0
    for place, word in enumerate(words):
        if word is None:
            continue
        masked = ids.clone()
        for later in range(place, len(words)):
            if words[later] == word:
                masked[later] = tokenizer.mask_token_id
        with torch.inference_mode():
            logits = model(masked[None]).logits[0, place]
        total += float(logits.double().log_softmax(-1)[ids[place]])
    return total


@pytest.mark.filterwarnings("ignore")
def test_scores_are_those_of_a_plain_loop_over_masks(folder: Path) -> None:
    pairs = [{GOOD: one, BAD: other} for one in SENTENCES for other in SENTENCES[:2]]
    answers = Predictor(folder, device="cpu", task="minimal-pairs").predict(pairs)
    wanted = {text: plain_loop(folder, text) for text in SENTENCES}
    assert wanted[""] == 0.0 > wanted["a"] > wanted[SENTENCES[1]]
    for pair, answer in zip(pairs, answers, strict=True):
        good, bad = wanted[pair[GOOD]], wanted[pair[BAD]]
        assert answer["score_good"] == pytest.approx(good, abs=1e-4)
        assert answer["score_bad"] == pytest.approx(bad, abs=1e-4)
        if pair[GOOD] != pair[BAD]:
            assert answer["preferred"] == (GOOD if good > bad else BAD)


def test_later_pieces_of_a_word_are_masked_with_the_piece_and_other_words_are_seen() -> None:
    tokenizer = tokenizer_of("wordpiece")
    row = {GOOD: "the unknown sea", BAD: "sea"}
    window, _ = MinimalPairs().encode([row], tokenizer, 16)
    shown = [[tokenizer.vocabulary[index] for index in ids[1:-1]] for ids in window.ids]
    assert shown == [
        ["[MASK]", "un", "##known", "sea"],
        ["the", "[MASK]", "[MASK]", "sea"],
        ["the", "un", "[MASK]", "sea"],
        ["the", "un", "##known", "[MASK]"],
    ]
    assert window.positions["mlm_positions"].tolist() == [1, 2, 3, 4]


def test_accuracy_is_overall_and_of_every_phenomenon_and_a_tie_is_wrong() -> None:
    task = MinimalPairs()
    rows = [
        {GOOD: "a", BAD: "b", "field": "syntax", "UID": "x"},
        {GOOD: "a", BAD: "b", "field": "syntax", "UID": "y"},
        {GOOD: "a", BAD: "b", "field": "syntax", "UID": "y"},
        {GOOD: "a", BAD: "b"},
    ]
    scores = [np.array([one]) for one in (-1.0, -2.0, -3.0, -2.0, -2.0, -2.0, 0.0, -9.0)]
    windows = task.encode(rows, tokenizer_of("wordpiece"), 16)
    columns = task.compare(rows, task.decode(rows, windows, scores))
    assert task.metrics(columns) == {"accuracy": 0.5}
    assert task.by_class(columns) == {
        "syntax": {"accuracy": pytest.approx(1 / 3), "support": 3},
        "x": {"accuracy": 1.0, "support": 1},
        "y": {"accuracy": 0.0, "support": 2},
    }
    assert task.baseline(rows) == {"accuracy": 0.5}
    wrong = task.wrong(columns)
    assert wrong is not None
    assert wrong.tolist() == [False, True, True, False]
    assert task.faults(columns).argmax() == 1


def test_a_field_and_a_term_of_the_same_name_are_distinguished() -> None:
    task = MinimalPairs()
    rows = [
        {GOOD: "a", BAD: "b", "field": "binding"},
        {GOOD: "a", BAD: "b", "field": "binding"},
        {GOOD: "a", BAD: "b", "linguistics_term": "binding"},
    ]
    answers = [{"score_good": one, "score_bad": 0.0} for one in (1.0, -1.0, 1.0)]
    assert task.by_class(task.compare(rows, answers)) == {
        "binding": {"accuracy": 0.5, "support": 2},
        "binding (linguistics_term)": {"accuracy": 1.0, "support": 1},
    }


def test_the_masks_of_a_long_sentence_are_shared_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Predictor(folder, device="cpu", task="minimal-pairs")
    pairs = [{GOOD: one, BAD: SENTENCES[1]} for one in SENTENCES]
    whole = predictor.predict(pairs)
    monkeypatch.setattr("bert_core.tasks.minimal_pairs.TOKENS_AT_ONCE", 24)
    rows = predictor.rows(pairs)
    windows = predictor.encode(rows, None)
    assert len(windows) > 2 * len(pairs)
    assert max(window.tokens for window in windows) <= 24
    for one, other in zip(predictor.predict(pairs), whole, strict=True):
        assert one["score_good"] == pytest.approx(other["score_good"], abs=1e-4)
        assert one["score_bad"] == pytest.approx(other["score_bad"], abs=1e-4)


def test_a_sentence_that_is_too_long_is_refused_or_cut(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("wordpiece")
    config = tiny.encoder_config(tokenizer.vocab_size)
    model = tiny.bundle(
        tmp_path / "model", tokenizer, config, objectives=[MinimalPairs().build_objective]
    )
    predictor = Predictor(model, device="cpu", task="minimal-pairs")
    pair = {GOOD: "the sea " * 40, BAD: "the sea"}
    with pytest.raises(InputError, match=r"inputs\[0\]: wanted at most 32 tokens .* truncation"):
        predictor.predict([pair])
    [answer] = predictor.predict([pair], CuttingParameters(truncation=True))
    [same] = predictor.predict([{**pair, GOOD: "the sea " * 15}])
    assert answer == same
