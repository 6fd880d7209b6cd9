"""Texts in, answers out: the same for any batch, in order, and refused with a reason."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_core.errors import FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.sentence_pairs import NextSentencePrediction
from bert_core.tasks.text_classification import (
    TextClassification,
    TextClassificationParameters,
)
from tests import tiny
from tests.exactness import TOLERANCE

WORDS = [f"word{number}" for number in range(40)]
TOKENIZER = tiny.tokenizer(WORDS)
CONFIG = tiny.encoder_config(TOKENIZER.vocab_size, max_position_embeddings=36)
TASK = TextClassification(["ham", "maybe", "spam"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.bundle(
        tmp_path_factory.mktemp("predictor") / "bundle", TOKENIZER, CONFIG, task=TASK
    )


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    return Predictor(folder, device="cpu")


def scores(predictor: Predictor, texts: list[str]) -> np.ndarray:
    return np.stack(predictor.forward(predictor.encode(predictor.rows(texts))))


def texts_of_all_lengths(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(0, 15))) for _ in range(count)]


def test_answers_are_those_of_transformers_pipeline(folder: Path, predictor: Predictor) -> None:
    from transformers import pipeline

    # Its tokenizer has no limit of its own here, so texts stay below that of the model.
    texts = [" ".join(text.split()[:20]) for text in texts_of_all_lengths(12)]
    peer = pipeline("text-classification", model=str(folder), device="cpu")
    expected: Any = peer(texts, top_k=None)
    for ours, theirs in zip(predictor.predict(texts), expected, strict=True):
        assert [answer["label"] for answer in ours] == [answer["label"] for answer in theirs]
        scores = [answer["score"] for answer in theirs]
        assert [answer["score"] for answer in ours] == pytest.approx(scores, abs=1e-5)


def test_scores_that_are_not_numbers_are_no_answer(folder: Path) -> None:
    damaged = Predictor(folder, device="cpu")
    with torch.no_grad():
        next(damaged.model.parameters()).fill_(float("nan"))
    with pytest.raises(FormatError, match=r"wanted numbers as scores of .*, got NaN"):
        damaged.predict([WORDS[0]])


def test_a_text_gets_the_same_answer_in_any_company_and_order(predictor: Predictor) -> None:
    texts = texts_of_all_lengths(300)  # several forward passes
    together = scores(predictor, texts)
    backwards = scores(predictor, texts[::-1])[::-1]
    alone = np.concatenate([scores(predictor, [text]) for text in texts[:20]])
    np.testing.assert_allclose(together, backwards, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(together[:20], alone, rtol=0, atol=TOLERANCE)


def test_a_long_text_is_refused_or_cut_at_the_last_position(predictor: Predictor) -> None:
    long = " ".join(WORDS)
    assert predictor.max_length == 32  # 36 positions, padded in steps of 8
    tokens = len(predictor.bundle.tokenizer.encode([long], None)[0])
    message = rf"inputs\[1\]: wanted at most 32 tokens.* got {tokens}: set the parameter truncation"
    with pytest.raises(InputError, match=message):
        predictor.predict(["word1", long])
    cut = TextClassificationParameters(truncation=True)
    assert [window.tokens for window in predictor.encode([{"text": long}], cut)] == [32]
    assert predictor.predict([long], cut) == predictor.predict([long + " word3" * 1000], cut)


def test_parameters_shape_the_answer(predictor: Predictor) -> None:
    (answer,) = predictor.predict(["word1"], TextClassificationParameters(top_k=1))
    assert len(answer) == 1
    assert answer == predictor.predict(["word1"])[0][:1]


def test_several_threads_may_ask_at_once(predictor: Predictor) -> None:
    texts = texts_of_all_lengths(40)
    alone = [predictor.predict([text]) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: predictor.predict([text]), texts)) == alone


def test_a_pair_gets_the_answer_of_transformers_pipeline(
    folder: Path, predictor: Predictor
) -> None:
    from transformers import pipeline

    texts = texts_of_all_lengths(24)
    pairs = [{"text": a, "text_pair": b} for a, b in zip(texts[::2], texts[1::2], strict=True)]
    pairs.append({"text": texts[0], "text_pair": ""})
    peer = pipeline("text-classification", model=str(folder), device="cpu")
    for pair, ours in zip(pairs, predictor.predict(pairs), strict=True):
        theirs: Any = peer(pair, top_k=None)
        assert [answer["label"] for answer in ours] == [answer["label"] for answer in theirs]
        wanted = [answer["score"] for answer in theirs]
        assert [answer["score"] for answer in ours] == pytest.approx(wanted, abs=1e-5)


def test_the_number_of_threads_is_that_asked_for(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        Predictor(folder, device="cpu", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "inputs: wanted a list of at least one input, got an empty list"),
        ("word1", "inputs: wanted a list of at least one input, got str"),
        (None, "inputs: wanted a list of at least one input, got NoneType"),
        (["word1", 3], r"inputs\[1\]: wanted text, got a number \(3\)"),
        ([None], r"inputs\[0\]: wanted text, got nothing"),
        (["a \ud83d"], r"inputs\[0\]: .* half a surrogate pair at character 2: send whole"),
    ],
)
def test_inputs_that_are_not_texts_are_refused(
    inputs: Any, message: str, predictor: Predictor
) -> None:
    with pytest.raises(InputError, match=message):
        predictor.predict(inputs)


def test_an_empty_text_is_a_text(predictor: Predictor) -> None:
    assert len(predictor.predict([""])) == 1


def test_a_bundle_without_a_task_is_refused(tmp_path: Path) -> None:
    tiny.bundle(tmp_path / "bare", TOKENIZER, CONFIG)
    with pytest.raises(
        FormatError, match=r"raybert finetune`, or ask for feature-extraction, or a"
    ):
        Predictor(tmp_path / "bare")


def test_a_pretrained_bundle_fills_masks_and_tells_what_is_next(
    tmp_path: Path, folder: Path
) -> None:
    from transformers import pipeline

    heads = [MaskedLanguageModeling, NextSentencePrediction]
    path = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, objectives=heads)
    text = "word1 [MASK] word3"
    peer: Any = pipeline("fill-mask", model=str(path), device="cpu")(text)
    (ours,) = Predictor(path, device="cpu").predict([text])
    assert [one["token"] for one in ours] == [one["token"] for one in peer]
    assert [one["sequence"] for one in ours] == [one["sequence"] for one in peer]
    assert [one["score"] for one in ours] == pytest.approx([one["score"] for one in peer], abs=1e-5)
    pair = {"text": "word1", "text_pair": "word2 word3"}
    ((best, other),) = Predictor(path, task="next-sentence-prediction").predict([pair])
    assert best["score"] + other["score"] == pytest.approx(1.0)
    with pytest.raises(FormatError, match=r"wanted a bundle for question-answering, .* or ask for"):
        Predictor(path, task="question-answering")
    with pytest.raises(FormatError, match=r"wanted a bundle for fill-mask, this one is for text-c"):
        Predictor(folder, task="fill-mask")


def test_half_precision_changes_scores_a_little(folder: Path, predictor: Predictor) -> None:
    def scores(of: Predictor) -> np.ndarray:
        """(texts, labels)"""
        answers = of.predict(["a text", "another one, and longer"])
        by_label = [{each["label"]: each["score"] for each in answer} for answer in answers]
        return np.array([[row[label] for label in of.task.labels] for row in by_label])

    half = scores(Predictor(folder, device="cpu", precision="bf16"))
    assert 0 < np.abs(half - scores(predictor)).max() < 0.05


def test_the_output_of_a_stage_stands_for_its_bundle(folder: Path, predictor: Predictor) -> None:
    stage = Predictor(folder.parent, device="cpu")  # the bundle's folder is called bundle
    assert stage.bundle.digest == predictor.bundle.digest
    assert stage.predict(["word1"]) == predictor.predict(["word1"])
