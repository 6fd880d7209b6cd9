"""Parameters that Hugging Face's clients send, beside what its own pipelines do with them."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.compared_texts import VectorParameters
from bert_core.tasks.feature_extraction import FeatureExtraction, FeatureExtractionParameters
from bert_core.tasks.fill_mask import FillMask, FillMaskParameters
from bert_core.tasks.question_answering import (
    QuestionAnswering,
    QuestionAnsweringOptions,
    QuestionAnsweringParameters,
)
from bert_core.tasks.tagged_words import AggregationStrategy
from bert_core.tasks.token_classification import (
    TokenClassification,
    TokenClassificationParameters,
)
from tests import tiny

TOKENIZER = tiny.tokenizer([*tiny.pieces(tiny.LETTERS), ".", ",", "abc"])
LABELS = ["B-loc", "B-per", "I-loc", "I-per", "O"]
TEXTS = ["abc ad fgh, gab bad. caged", "bead a b face dab, deaf abc", "hag"]


def predictor(folder: Path, task: Any, seed: int = 3) -> Predictor:
    config = tiny.encoder_config(TOKENIZER.vocab_size, initializer_range=0.6)
    return Predictor(tiny.bundle(folder, TOKENIZER, config, task=task, seed=seed), device="cpu")


@pytest.mark.parametrize(
    "labels",
    [LABELS, ["loc", "per", "O"], ["NOUN", "PUNCT-COMMA", "B-"], ["B-loc", "I-loc", "per", "O"]],
    ids="-".join,
)
@pytest.mark.parametrize("strategy", ["first", "average", "max"])
def test_entities_are_those_of_transformers_for_every_strategy(
    tmp_path: Path, strategy: AggregationStrategy, labels: list[str]
) -> None:
    from transformers import pipeline

    ours = predictor(tmp_path / "tags", TokenClassification(labels))
    peer = pipeline(
        "token-classification",
        model=str(tmp_path / "tags"),
        device="cpu",
        aggregation_strategy=strategy,
    )
    parameters = ours.task.parameters(aggregation_strategy=strategy)  # type: ignore[call-arg]
    found = 0
    for text, answer in zip(TEXTS, ours.predict(TEXTS, parameters), strict=True):
        wanted: Any = peer(text)
        # transformers gives one score per entity from its words, each from its pieces.
        assert [(each["entity_group"], each["start"], each["end"]) for each in answer] == [
            (each["entity_group"], each["start"], each["end"]) for each in wanted
        ]
        for each, other in zip(answer, wanted, strict=True):
            assert each["score"] == pytest.approx(float(other["score"]), abs=1e-5)
        found += len(answer)
    assert found > 2


def test_strategies_differ_where_pieces_of_a_word_do(tmp_path: Path) -> None:
    ours = predictor(tmp_path / "tags", TokenClassification(LABELS))
    kinds: tuple[AggregationStrategy, ...] = ("first", "average", "max")
    answers = [
        ours.predict(TEXTS, TokenClassificationParameters(aggregation_strategy=kind))
        for kind in kinds
    ]
    assert answers[0] != answers[1] != answers[2] != answers[0]
    simple = TokenClassificationParameters(aggregation_strategy="simple")
    assert ours.predict(TEXTS, simple) == answers[0]


def test_a_stride_reads_a_long_text_in_windows_that_overlap_by_it(tmp_path: Path) -> None:
    ours = predictor(tmp_path / "tags", TokenClassification(LABELS))
    rows = [{"text": " ".join(TEXTS * 4)}]
    counts = [
        len(ours.encode(rows, TokenClassificationParameters(stride=stride)))
        for stride in (0, 4, 12)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_targets_and_several_masks_are_answered_as_by_transformers(tmp_path: Path) -> None:
    from transformers import pipeline

    ours = predictor(tmp_path / "masks", FillMask())
    peer = pipeline("fill-mask", model=str(tmp_path / "masks"), device="cpu")
    targets, text = ["abc", "a", ","], "a [MASK] b."
    [answer] = ours.predict([text], FillMaskParameters(targets=targets))
    wanted: Any = peer(text, targets=targets)
    assert [each["token"] for each in answer] == [each["token"] for each in wanted]
    for each, other in zip(answer, wanted, strict=True):
        assert each["score"] == pytest.approx(other["score"], abs=1e-6)
    [best] = ours.predict([text], FillMaskParameters(targets=targets, top_k=1))
    assert best == answer[:1]
    # With several masks, transformers also writes what is around the text.
    [several] = ours.predict(["a [MASK] b [MASK]."])
    others: Any = peer("a [MASK] b [MASK].")
    assert [
        [f"[CLS] {each['sequence']} [SEP]" for each in candidates] for candidates in several
    ] == [[each["sequence"] for each in candidates] for candidates in others]


@pytest.mark.parametrize("targets", [[], ["abc", "abca"], ["x"]])
def test_targets_that_are_no_single_token_are_refused(tmp_path: Path, targets: list[str]) -> None:
    ours = predictor(tmp_path / "masks", FillMask())
    with pytest.raises(InputError, match="targets: wanted"):
        ours.predict(["a [MASK] b."], FillMaskParameters(targets=targets))


QUESTION = {"question": "abc a?", "context": " ".join(TEXTS)}


def test_parameters_of_a_question_read_a_passage_as_the_models_options_do(tmp_path: Path) -> None:
    ours = predictor(tmp_path / "span", QuestionAnswering())
    chosen = QuestionAnsweringOptions(doc_stride=3, max_question_length=2)
    trained = predictor(tmp_path / "trained", QuestionAnswering(options=chosen))
    asked = QuestionAnsweringParameters(doc_stride=3, max_question_len=2)
    assert ours.predict([QUESTION], asked) == trained.predict([QUESTION])
    assert ours.predict([QUESTION], asked) != ours.predict([QUESTION])


def test_a_window_is_as_short_as_requested(tmp_path: Path) -> None:
    ours = predictor(tmp_path / "span", QuestionAnswering())
    windows = ours.encode([QUESTION], QuestionAnsweringParameters(max_seq_len=12))
    assert max(len(window.ids[0]) for window in windows) <= 12
    assert len(windows) > len(ours.encode([QUESTION]))


def test_answers_are_extended_to_whole_words(tmp_path: Path) -> None:
    ours = predictor(tmp_path / "span", QuestionAnswering())
    context = QUESTION["context"]
    cut = False
    for whole in (False, True):
        parameters = QuestionAnsweringParameters(top_k=20, align_to_words=whole)
        [answers] = ours.predict([QUESTION], parameters)
        for answer in answers:
            around = [context[end - 1 : end + 1] for end in (answer["start"], answer["end"]) if end]
            within = any(len(pair) == 2 and pair.isalpha() for pair in around)
            cut |= within
            assert not (whole and within)
    assert cut  # without it, some answers end within a word


def test_a_prompt_stands_before_a_text(tmp_path: Path) -> None:
    chosen = FeatureExtraction.options(prompts={"query": "a bad "}, default_prompt=None)
    ours = predictor(tmp_path / "vectors", FeatureExtraction(options=chosen))
    asked = FeatureExtractionParameters(prompt_name="query")
    assert ours.predict(["abc"], asked) == ours.predict(["a bad abc"])
    with pytest.raises(InputError, match=r"prompt_name: wanted .* \(query\), got 'passage'"):
        ours.predict(["abc"], FeatureExtractionParameters(prompt_name="passage"))


@pytest.mark.parametrize("prompt", ["query", None])
def test_prompts_are_those_of_sentence_transformers(tmp_path: Path, prompt: str | None) -> None:
    from sentence_transformers import SentenceTransformer

    chosen = FeatureExtraction.options(
        prompts={"query": "a bad ", "usual": "face, "}, default_prompt="usual"
    )
    ours = predictor(tmp_path / "vectors", FeatureExtraction(options=chosen))
    peer = SentenceTransformer(str(tmp_path / "vectors"), device="cpu")
    wanted = peer.encode(TEXTS, prompt_name=prompt)
    came = ours.predict(TEXTS, FeatureExtractionParameters(prompt_name=prompt))
    np.testing.assert_allclose(came, wanted, atol=1e-5)
    similarities = ours.also["sentence-similarity"]
    [cosines] = similarities.predict(
        [{"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}],
        VectorParameters(prompt_name=prompt),
    )
    np.testing.assert_allclose(cosines, peer.similarity(wanted[:1], wanted[1:])[0], atol=1e-5)


def test_vectors_are_cut_to_lengths_that_the_model_was_trained_for(tmp_path: Path) -> None:
    chosen = FeatureExtraction.options(dimensions=[8, 16], normalize=True)
    ours = predictor(tmp_path / "vectors", FeatureExtraction(options=chosen))
    whole = np.array(ours.predict(TEXTS))
    cut = np.array(ours.predict(TEXTS, FeatureExtractionParameters(dimensions=8)))
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(
        cut, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-6
    )
    same = ours.predict(TEXTS, FeatureExtractionParameters(dimensions=whole.shape[1]))
    np.testing.assert_array_equal(same, whole)
    with pytest.raises(InputError, match=r"trained for \(8, 16, 32\), got 9"):
        ours.predict(TEXTS, FeatureExtractionParameters(dimensions=9))


def test_base64_has_the_same_numbers(tmp_path: Path) -> None:
    ours = predictor(tmp_path / "vectors", FeatureExtraction())
    packed = ours.predict(TEXTS, FeatureExtractionParameters(encoding_format="base64"))
    numbers = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in packed]
    np.testing.assert_array_equal(numbers, np.array(ours.predict(TEXTS), dtype=np.float32))
