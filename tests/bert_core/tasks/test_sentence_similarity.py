"""Cosines beside sentence-transformers' own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import CorpusError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionOptions
from bert_core.tasks.sentence_similarity import SentenceSimilarity
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

TOKENIZER = tiny.tokenizer()
CONFIG = tiny.encoder_config(TOKENIZER.vocab_size, initializer_range=0.5)
INPUT: dict[str, Any] = {
    "source_sentence": "the sea is blue",
    "sentences": ["a tree", "the blue sea", "the sea is blue", "a " * 60],
}
NAME = "sentence-similarity"


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.filterwarnings("ignore")
def test_answers_are_sentence_transformers_cosines_in_order(pooling: Any, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    options = FeatureExtractionOptions(pooling=pooling, layer=1, max_length=12)
    folder = tiny.bundle(
        tmp_path / "bundle", TOKENIZER, CONFIG, task=FeatureExtraction(options=options)
    )
    predictor = Predictor(folder, device="cpu")
    other = predictor.also[NAME]
    assert other.backend is predictor.backend
    (ours,) = other.predict([INPUT], other.task.parameters(truncate=True))  # type: ignore[call-arg]
    peer = SentenceTransformer(str(folder), device="cpu")
    first, others = (peer.encode([text]) if isinstance(text, str) else peer.encode(text)
                     for text in INPUT.values())  # fmt: skip
    wanted = peer.similarity(first, others)[0]
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    assert ours[2] == pytest.approx(1.0)
    asked = Predictor(folder, "cpu", task=NAME)
    assert asked.task.record == other.task.record


def test_any_encoder_compares_sentences(tmp_path: Path) -> None:
    task = TextClassification(["ham", "spam"])
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=task)
    mean, cls = (
        Predictor(folder, "cpu", task=NAME, options={"pooling": pooling})
        for pooling in ("mean", "cls")
    )
    inputs = [{**INPUT, "sentences": INPUT["sentences"][:3]}]
    assert len(mean.predict(inputs)[0]) == 3
    assert mean.predict(inputs) != cls.predict(inputs)
    assert "sentence-similarity" not in Predictor(folder, device="cpu").also
    with pytest.raises(InputError, match=r"inputs\[0\]: wanted at most 32 tokens .* truncate to"):
        mean.predict([INPUT])


def test_no_sentences_are_refused(tmp_path: Path) -> None:
    folder = tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=FeatureExtraction())
    with pytest.raises(InputError, match=r"inputs\[0\]: sentences: wanted at least one sentence"):
        Predictor(folder, "cpu", task=NAME).predict([{"source_sentence": "a", "sentences": []}])


def test_cosines_are_measured_over_all_sentences_and_faults_within_a_row() -> None:
    task = SentenceSimilarity()
    rows = [
        {"source_sentence": "a", "sentences": ["b", "c", "d"], "scores": [3.0, 2.0, 0.0]},
        {"source_sentence": "a", "sentences": ["b"], "scores": [1.0]},
    ]
    columns = task.compare(rows, [[0.9, 0.95, 0.1], [0.5]])
    assert task.faults(columns) == pytest.approx([1 / 3, 0.0])
    # Ranks of scores 4, 3, 1, 2 and of cosines 3, 4, 1, 2.
    assert task.metrics(columns)["spearman"] == pytest.approx(0.8)
    baseline = task.baseline(rows)
    assert baseline == {"spearman": 0.0, "pearson": 0.0}
    with pytest.raises(CorpusError, match="row 1: wanted a score for each of 1 sentences, got 0"):
        task.compare([{"source_sentence": "a", "sentences": ["b"], "scores": []}], [[0.1]])
