"""Thresholds, abstention and calibration decide the answers of text classification everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.bundle.format import load_bundle
from bert_core.errors import ConfigError, FormatError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from tests import tiny

TEXTS = [{"text": "the sea"}, {"text": "a tree"}, {"text": "blue"}]


def task(labels: str = "ham spam", **options: Any) -> TextClassification:
    return TextClassification(labels.split(), TextClassificationOptions(**options))


def logits(*spam: float) -> list[np.ndarray]:
    """Scores before softmax that give `spam` these probabilities, and `ham` the rest."""
    return [np.log(np.array([1 - share, share])) for share in spam]


def test_the_threshold_of_one_label_decides_between_two() -> None:
    answers = task(thresholds={"spam": 0.3}).decode(TEXTS, [], logits(0.9, 0.31, 0.29))
    assert [answer[0]["label"] for answer in answers] == ["spam", "spam", "ham"]
    assert answers[1] == [
        {"label": "spam", "score": pytest.approx(0.31), "assigned": True},
        {"label": "ham", "score": pytest.approx(0.69), "assigned": False},
    ]
    other = task(thresholds={"ham": 0.7}).decode(TEXTS, [], logits(0.9, 0.31, 0.29))
    assert [answer[0]["label"] for answer in other] == ["spam", "spam", "ham"], "the same"
    for edge, wanted in ((0.0, {"spam"}), (1.0, {"ham"})):
        at_edge = task(thresholds={"spam": edge}).decode(TEXTS, [], logits(0.9, 0.31, 0.29))
        assert {answer[0]["label"] for answer in at_edge} == wanted


def test_without_thresholds_answers_are_as_ever() -> None:
    [answer] = task().decode(TEXTS[:1], [], logits(0.3))
    assert answer == [
        {"label": "ham", "score": pytest.approx(0.7)},
        {"label": "spam", "score": pytest.approx(0.3)},
    ]


def test_each_of_several_labels_has_a_threshold_of_its_own() -> None:
    several = task("blue sea tree", multi_label=True, thresholds={"sea": 0.1, "tree": 0.9})
    shares = np.array([0.6, 0.2, 0.8])
    [answer] = several.decode(TEXTS[:1], [], [np.log(shares / (1 - shares))])
    assert [(each["label"], each["assigned"]) for each in answer] == [
        ("tree", False), ("blue", True), ("sea", True),
    ]  # fmt: skip
    assert several.cells(answer)["labels"] == ["blue", "sea"]
    rows = [{"text": "the sea", "labels": ["blue", "sea"]}]
    assert several.metrics(several.compare(rows, [answer]))["accuracy"] == 1.0
    assert several.confidence([answer]) == pytest.approx([0.6 * 0.2 * 0.2])


def test_a_model_abstains_below_a_score_and_is_measured_on_the_others() -> None:
    unsure = task(abstain_below=0.8)
    answers = unsure.decode(TEXTS, [], logits(0.9, 0.6, 0.05))
    assert [answer[0]["label"] for answer in answers] == ["spam", "spam", "ham"]
    assert [answer[0]["assigned"] for answer in answers] == [True, False, True]
    cells = [unsure.cells(answer) for answer in answers]
    assert [each["abstained"] for each in cells] == [False, True, False]
    assert {*cells[0]} == {*unsure.cell_types}
    rows = [
        row | {"label": label} for row, label in zip(TEXTS, ["spam", "ham", "spam"], strict=True)
    ]
    metrics = unsure.metrics(unsure.compare(rows, answers))
    assert metrics["coverage"] == pytest.approx(2 / 3)
    assert metrics["answered_accuracy"] == 0.5
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    nothing = unsure.metrics(unsure.compare(rows[:1], unsure.decode(TEXTS[:1], [], logits(0.5))))
    assert (nothing["coverage"], nothing["answered_accuracy"]) == (0.0, 0.0)
    assert "coverage" not in unsure.baseline(rows)


def test_the_requested_function_changes_scores_and_no_decision() -> None:
    strict = task(thresholds={"spam": 0.3})
    raw = strict.parameters(function_to_apply="none", top_k=1)
    answers = strict.decode(TEXTS[:2], [], logits(0.31, 0.29), raw)
    assert [[each["label"] for each in answer] for answer in answers] == [["spam"], ["ham"]]
    assert answers[0][0]["score"] == pytest.approx(np.log(0.31))


@pytest.mark.parametrize("several", [False, True])
def test_answers_before_calibration_are_those_of_the_raw_scores(several: bool) -> None:
    scale, shift = np.array([0.5, 0.5]), np.array([0.3, -0.2])
    calibration = {
        label: [float(a), float(b)]
        for label, a, b in zip(("ham", "spam"), scale, shift, strict=True)
    }
    plain = task(multi_label=several)
    calibrated = task(multi_label=several, calibration=calibration)
    raw = [np.array([1.5, -0.5]), np.array([-4.0, 2.0])]
    answers = calibrated.decode(TEXTS[:2], [], [scale * each + shift for each in raw])
    before = calibrated.before_calibration(answers)
    assert before is not None
    for ours, wanted in zip(before, plain.decode(TEXTS[:2], [], raw), strict=True):
        assert [each["label"] for each in ours] == [each["label"] for each in wanted]
        found, known = ([each["score"] for each in answer] for answer in (ours, wanted))
        np.testing.assert_allclose(found, known, rtol=1e-9)
    assert plain.before_calibration(answers) is None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"thresholds": {"spma": 0.3}}, r"thresholds: wanted labels of the model, .*mean spam"),
        ({"thresholds": {"spam": 1.3}}, r"thresholds: wanted scores from 0 to 1, got 1.3 for 'sp"),
        (
            {"thresholds": {"spam": 0.3, "ham": 0.7}},
            r"wanted one for one of two .* 2 for 2",
        ),
        ({"abstain_below": 1.5}, r"abstain_below: wanted 0 to 1, got 1.5"),
        ({"abstain_below": 0.5, "multi_label": True}, r"abstain_below: wanted none with multi_la"),
        (
            {"calibration": {"eggs": [1.0, 0.0]}},
            r"calibration: wanted labels of .*, got 'eg",
        ),
    ],
)
def test_options_that_do_not_fit_the_labels_are_refused(
    options: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        task(**options)


def test_thresholds_that_are_no_numbers_and_a_calibration_by_hand_are_refused() -> None:
    kind = TextClassification
    with pytest.raises(ConfigError, match=r"options.thresholds: wanted an object of numbers, got"):
        kind.options_of({"thresholds": {"spam": "high"}})
    with pytest.raises(ConfigError, match=r"options.calibration: wanted none, since it is read"):
        kind.options.check_given({"calibration": {}})


def test_what_decides_is_told_in_words() -> None:
    assert task().notes == []
    told = task(
        thresholds={"spam": 0.3}, abstain_below=0.8,
        calibration={"ham": [0.5, 0.0], "spam": [0.5, 0.0]},
    ).notes  # fmt: skip
    assert told == [
        "scores are calibrated on selection rows, by a temperature of 2, in the weights",
        "a label is assigned from its threshold on: spam 0.3",
        "it abstains where the best score is below 0.8",
    ]
    [one] = task("a b c", multi_label=True, thresholds={"a": 0.25}).notes
    assert one.endswith("a 0.25, others 0.5")
    [both] = task(calibration={"ham": [0.5, 0.1], "spam": [0.7, 0.0]}).notes
    assert "by a scale per label and shifts" in both


def test_a_bundle_keeps_what_decides_and_its_digest_covers_it(tmp_path: Path) -> None:
    decided = task(thresholds={"spam": 0.3}, abstain_below=0.4)
    folders = [
        tiny.bundle(tmp_path / name, tiny.tokenizer(), task=each)
        for name, each in (("usual", task()), ("decided", decided))
    ]
    usual, kept = map(load_bundle, folders)
    assert kept.task is not None
    assert kept.task.record == decided.record
    assert kept.digest != usual.digest
    [answer] = Predictor(folders[1], device="cpu").predict(["the sea is blue"])
    assert {*answer[0]} == {"label", "score", "assigned"}
    path = folders[1] / "raybert.json"
    path.write_text(path.read_text().replace("0.3", "0.9"))
    with pytest.raises(FormatError, match="edited since the bundle was written"):
        load_bundle(folders[1])
