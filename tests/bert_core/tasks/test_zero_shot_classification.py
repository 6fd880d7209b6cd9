"""Labels of a request beside transformers' pipeline."""

from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ConfigError, CorpusError, FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.shapes import labelled
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from bert_core.tasks.zero_shot_classification import (
    ZeroShotClassification,
    ZeroShotOptions,
    ZeroShotParameters,
)
from tests import tiny

TOKENIZER = tiny.tokenizer([*tiny.pieces(tiny.ALPHABET), "this", "example", "is", "about", "."])
CONFIG = tiny.encoder_config(
    TOKENIZER.vocab_size, max_position_embeddings=40, initializer_range=0.4
)
LABELS = ["blue sea", "a tree", "file"]
TEXTS = ["the sea is deep.", "a tree", "", "Return the name of the file. " * 8]
NAME = "zero-shot-classification"
ORDERS = {
    "mnli": ["contradiction", "neutral", "entailment"],
    "sorted": ["Contradiction", "Entailment", "Neutral"],
    "first": ["ENTAILMENT", "neutral", "contradiction"],
    "two": ["entailment", "not_entailment"],
}


def inference_model(folder: Path, labels: list[str], **options: Any) -> Path:
    task = TextClassification(labels, TextClassificationOptions(**options))
    return tiny.bundle(folder, TOKENIZER, CONFIG, task=task)


@pytest.fixture(params=ORDERS, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inference_model(tmp_path_factory.mktemp(request.param) / "model", ORDERS[request.param])


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("template", ["This example is {}.", "about {0}"])
@pytest.mark.parametrize("labels", [LABELS, LABELS[:1]], ids=len)
def test_answers_are_those_of_transformers_pipeline_and_only_the_text_is_cut(
    folder: Path, multi_label: bool, template: str, labels: list[str]
) -> None:
    from transformers import pipeline

    peer: Any = pipeline("zero-shot-classification", model=str(folder), device="cpu")
    peer.tokenizer.model_max_length = 40
    parameters = ZeroShotParameters(
        candidate_labels=labels, hypothesis_template=template, multi_label=multi_label,
        truncation=True,
    )  # fmt: skip
    predictor = Predictor(folder, device="cpu")
    assert predictor.max_length == 40
    ours = predictor.also[NAME].predict(TEXTS, parameters)
    for text, answer in zip(TEXTS, ours, strict=True):
        # The pipeline refuses an empty text, but not a blank one.
        wanted = peer(text or " ", labels, hypothesis_template=template, multi_label=multi_label)
        assert [one["label"] for one in answer] == wanted["labels"]
        scores = [one["score"] for one in answer]
        assert scores == pytest.approx(wanted["scores"], abs=1e-5)


def test_the_contradiction_goes_by_its_name(tmp_path: Path) -> None:
    """transformers takes the first label where the entailment is not first, whatever it says."""
    parameters = ZeroShotParameters(candidate_labels=LABELS, multi_label=True)
    answers = []
    for place, labels in enumerate((["neutral", "contradiction", "entailment"],
                                    ["contradiction", "neutral", "entailment"])):  # fmt: skip
        predictor = Predictor(inference_model(tmp_path / f"{place}", labels), device="cpu")
        answers.append(predictor.also[NAME].predict(TEXTS[:2], parameters))
    assert answers[0] != answers[1], "another output stands for the contradiction"


def test_labels_come_with_a_row_a_request_or_the_model(tmp_path: Path) -> None:
    folder = inference_model(tmp_path / "model", ORDERS["mnli"])
    chosen = Predictor(folder, "cpu", task=NAME, options={"candidate_labels": LABELS})
    (wanted,) = chosen.predict(TEXTS[:1])
    assert {one["label"] for one in wanted} == set(LABELS)
    assert sum(one["score"] for one in wanted) == pytest.approx(1.0)
    plain = Predictor(folder, "cpu", task=NAME)
    parameters = ZeroShotParameters(candidate_labels=LABELS)
    assert plain.predict(TEXTS[:1], parameters) == [wanted]
    rows = [
        {"text": TEXTS[0], "candidate_labels": LABELS},
        {"text": TEXTS[0], "candidate_labels": ["file"]},
        {"text": TEXTS[0]},
    ]
    of_row, alone, of_request = plain.predict(rows, parameters)
    assert [one["label"] for one in of_row] == [one["label"] for one in wanted]
    assert [one["label"] for one in alone] == ["file"]
    assert [one["label"] for one in of_request] == [one["label"] for one in wanted]
    with pytest.raises(InputError, match=r"inputs\[0\]: wanted labels to choose from, got none"):
        plain.predict(TEXTS[:1])


def test_the_head_and_its_passes_are_shared(tmp_path: Path) -> None:
    predictor = Predictor(inference_model(tmp_path / "model", ORDERS["mnli"]), device="cpu")
    other = predictor.also[NAME]
    assert other.backend is predictor.backend
    assert (predictor.task.name, other.task.name) == ("text-classification", NAME)
    rows = other.rows([{"text": TEXTS[0], "candidate_labels": LABELS}])
    windows = other.encode(rows)
    pairs = predictor.encode(predictor.rows([{"text": "a tree", "text_pair": "the sea"}]))
    scores = predictor.forward([*windows, *pairs])
    (together,) = other.decode(rows, windows, scores[:3])
    assert [one["label"] for one in together] == [one["label"] for one in other.predict(rows)[0]]


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (["ham", "spam"], {}),
        (["contradiction", "entailment"], {"multi_label": True}),
        (["contradiction", "entailment"], {"pairs": False}),
    ],
)
def test_a_model_that_does_not_infer_is_refused(
    labels: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = inference_model(tmp_path / "model", labels, **options)
    assert Predictor(folder, device="cpu").also == {}
    message = "this one is for text-classification: give a model for text-classification that can"
    with pytest.raises(FormatError, match=message):
        Predictor(folder, task=NAME)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"candidate_labels": []}, "candidate_labels: wanted at least one label, got an empty li"),
        ({"candidate_labels": ["a", "b", "a"]}, "wanted each label once, got 'a' twice"),
        ({"candidate_labels": ["a", " "]}, r"candidate_labels\[1\]: wanted a label, got ' '"),
        ({"hypothesis_template": "about it"}, r"wanted a text with {} where the label goes"),
        ({"hypothesis_template": "about {name}"}, r"wanted a text with {} where the label goes"),
        ({"hypothesis_template": "about {"}, r"wanted a text with {} where the label goes"),
        ({"hypothesis_template": "about {:>1000000000}"}, r"wanted a text with {} where the label"),
        ({"hypothesis_template": "about {0.__class__}"}, r"wanted a text with {} where the label"),
        ({"hypothesis_template": "about {!r}"}, r"wanted a text with {} where the label goes"),
        ({"hypothesis_template": "about {} {0}"}, r"wanted a text with {} where the label goes"),
        ({"hypothesis_template": "about {} {}"}, r"wanted a text with {} where the label goes"),
        ({"hypothesis_template": "about {0} {0}"}, r"wanted a text with {} where the label goes"),
        ({"hypothesis_template": "{}" + "a" * 499}, r"wanted at most 500 characters.* got 501"),
    ],
)
def test_invalid_labels_and_templates_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ZeroShotParameters(**given)
    with pytest.raises(ConfigError, match=message):
        ZeroShotClassification.options_of(given)


def test_a_label_that_leaves_no_room_for_the_text_is_refused(tmp_path: Path) -> None:
    folder = inference_model(tmp_path / "model", ORDERS["mnli"])
    long = ZeroShotParameters(candidate_labels=["sea" * 20], truncation=True)
    with pytest.raises(InputError, match="wanted a label and a template of fewer than 37 tokens"):
        Predictor(folder, "cpu", task=NAME).predict(TEXTS[:1], long)
    short = ZeroShotParameters(candidate_labels=["sea"])
    with pytest.raises(InputError, match="set the parameter truncation to have it cut"):
        Predictor(folder, "cpu", task=NAME).predict(TEXTS, short)


def test_labelled_rows_are_measured_by_the_labels_of_the_option() -> None:
    rows = [{"text": "a", "label": "sea"}, {"text": "b", "label": "tree"}]
    task = ZeroShotClassification(options=ZeroShotOptions(candidate_labels=["sea", "tree"]))
    assert labelled(rows, task.shapes(task.chosen), {}, "rows") == rows
    answers = [[{"label": "sea", "score": 0.9}, {"label": "tree", "score": 0.1}]] * 2
    columns = task.compare(rows, answers)
    assert task.metrics(columns)["accuracy"] == 0.5
    assert list(task.by_class(columns)) == ["sea", "tree"]
    assert task.faults(columns).tolist() == [0, 1]
    with pytest.raises(CorpusError, match="row 2: wanted one of the labels of the option candidat"):
        ZeroShotClassification(options=ZeroShotOptions(candidate_labels=["sea"])).constant(rows)


def test_models_are_compared_on_the_same_labels() -> None:
    one, same, other = (
        ZeroShotClassification(options=ZeroShotOptions(candidate_labels=labels))
        for labels in (["a", "b"], ["b", "a"], ["a", "c"])
    )
    assert one.is_comparable(same)
    assert not one.is_comparable(other)


def test_a_row_whose_label_is_not_among_its_own_candidates_is_a_bad_row() -> None:
    task = ZeroShotClassification(options=ZeroShotOptions(candidate_labels=LABELS))
    good = {"text": "a", "candidate_labels": ["file", "a tree"], "label": "file"}
    taken, error, without = task.fitting(
        [good, good | {"label": "blue sea"}, {"text": "a", "label": "file"}]
    )
    assert (taken, without) == (good, {"text": "a", "label": "file"})
    assert str(error) == (
        "wanted one of its candidate_labels, file, a tree, got the label 'blue sea': correct the "
        "row, or remove it"
    )
