"""What selection rows decide beside the weights, and who asks for it in vain."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import ConfigError
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from pipelines import evaluate, finetune
from pipelines.corpus.labelled import LabelledConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.finetune import FinetuneConfig
from pipelines.training.decisions import Decisions, check_decisions, decide
from pipelines.training.selection import SelectionConfig
from tests import tiny
from tests.labelled_rows import WORDS, write

RNG = np.random.default_rng(0)
SINGLE = TextClassification(["ham", "spam"], TextClassificationOptions(positive_label="spam"))
SEVERAL = TextClassification(["blue", "sea", "tree"], TextClassificationOptions(multi_label=True))
KINDS = {"one label": SINGLE, "several labels": SEVERAL}
RAW = SINGLE.parameters(function_to_apply="none")


def selection(**changes: Any) -> SelectionConfig:
    return SelectionConfig(share=0.2, **changes)


def rows_and_answers(task: TextClassification) -> tuple[list[Any], list[Any]]:
    """300 rows, and answers that know something of their labels and are far too certain."""
    right = RNG.random((300, len(task.labels))) < 0.2
    scores = 6 * (right - 0.5 + RNG.standard_normal(right.shape))
    rows: list[Any] = []
    for index, labels in enumerate(right):
        names = [name for name, has in zip(task.labels, labels, strict=True) if has]
        text = {"text": f"{index}"}
        spam = {"label": "spam" if labels[1] else "ham"}
        rows.append(text | ({"labels": names} if task.chosen.multi_label else spam))
    return rows, task.decode(rows, [], list(scores), RAW)


@pytest.mark.parametrize("kind", KINDS)
def test_thresholds_are_no_worse_than_the_usual_one_and_scores_are_calibrated(kind: str) -> None:
    task = KINDS[kind]
    rows, answers = rows_and_answers(task)
    made = decide(task, rows, answers, selection(calibrate="per_label", thresholds=True))
    decided = made.of(task)
    assert isinstance(decided, TextClassification)
    assert {*made.thresholds} == ({*task.labels} if task.chosen.multi_label else {"spam"})
    scores = [{each["label"]: each["score"] for each in answer} for answer in answers]
    logits = np.array([[each[label] for label in task.labels] for each in scores])
    usual = task.metrics(task.compare(rows, task.decode(rows, [], list(logits))))
    scaled = list(made.scaling.applied(logits))
    better = decided.metrics(decided.compare(rows, decided.decode(rows, [], scaled)))
    name = "macro_f1" if task.chosen.multi_label else "f1_of_spam"
    assert better[name] > usual[name]
    assert made.says[0].startswith("calibrated on 300 selection rows: their expected calibration")
    now, was = (float(word.strip("., ")) for word in made.says[0].split() if "0." in word)
    assert now < was


def test_a_model_abstains_as_often_as_its_precision_asks() -> None:
    rows, answers = rows_and_answers(SINGLE)
    made = decide(SINGLE, rows, answers, selection(calibrate="temperature", abstain_precision=0.9))
    decided = made.of(SINGLE)
    assert made.abstain_below is not None
    scores = [{each["label"]: each["score"] for each in answer} for answer in answers]
    scaled = made.scaling.applied(np.array([[each["ham"], each["spam"]] for each in scores]))
    metrics = decided.metrics(decided.compare(rows, decided.decode(rows, [], list(scaled))))
    assert metrics["answered_accuracy"] >= 0.9 > metrics["accuracy"]
    assert f"it answers {100 * metrics['coverage']:.1f}\xa0% of the selection rows" in " ".join(
        made.says
    )


def test_what_cannot_be_decided_is_told() -> None:
    rows = [{"text": "a", "labels": ["sea"]}, {"text": "b", "labels": []}]
    answers = SEVERAL.decode(rows, [], [np.array([0.1, 2.0, -1.0])] * 2, RAW)
    made = decide(SEVERAL, rows, answers, selection(thresholds=True))
    assert {*made.thresholds} == {"sea"}
    assert made.says[0] == "no selection row has blue, tree: the threshold stays at 0.5"
    wrong = [{"text": "a", "label": "ham"}, {"text": "b", "label": "spam"}]
    answers = SINGLE.decode(wrong, [], [np.array([0.0, 2.0])] * 2, RAW)
    made = decide(SINGLE, wrong, answers, selection(abstain_precision=0.9))
    assert made.abstain_below is None
    assert made.says[0].startswith(
        "no threshold makes 90.0\xa0% of the answers to the 2 selection rows right"
    )


@pytest.mark.parametrize("field", ["calibrate", "thresholds", "abstain_precision"])
def test_rows_that_were_trained_on_decide_nothing(field: str) -> None:
    value: Any = {"calibrate": "temperature", "thresholds": True, "abstain_precision": 0.9}[field]
    with pytest.raises(ConfigError, match=f"selection.{field}: wanted the default without select"):
        SelectionConfig(**{field: value})


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.trainable])
def test_every_task_decides_or_refuses_to(name: str) -> None:
    kind = TASKS[name]
    for of_kind in kind.kinds:
        task = kind.from_rows(of_kind.rows, kind.options_of(of_kind.options))
        check_decisions(selection(), task)
        if kind.decides:
            check_decisions(selection(calibrate="per_label"), task)
            continue
        with pytest.raises(
            ConfigError, match=f"selection.calibrate: wanted the default for {name}"
        ):
            check_decisions(selection(calibrate="temperature"), task)


@pytest.mark.parametrize(
    ("task", "asked", "wanted"),
    [
        (
            TextClassification(["ham", "spam"]),
            {"thresholds": True},
            "wanted to know which of ham and spam",
        ),
        (
            TextClassification(["a", "b", "c"]),
            {"thresholds": True},
            "wanted two labels or options",
        ),
        (SEVERAL, {"abstain_precision": 0.9}, "abstain_precision: wanted none with multi_label"),
        (
            TextClassification(["0", "1"], TextClassificationOptions(thresholds={"1": 0.2})),
            {"thresholds": True},
            "thresholds: wanted the default with options.thresholds",
        ),
    ],
)
def test_decisions_that_do_not_fit_the_task_are_refused(
    task: TextClassification, asked: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        check_decisions(selection(**asked), task)
    check_decisions(selection(thresholds=True), TextClassification(["0", "1"]))


def test_decisions_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows, answers = rows_and_answers(SINGLE)
    made = decide(SINGLE, rows, answers, selection(calibrate="per_label", thresholds=True))
    made.write(str(tmp_path / "decisions.json"))
    assert Decisions.read(str(tmp_path / "decisions.json")) == made


@pytest.mark.guard
def test_the_bundle_answers_as_its_selection_rows_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from bert_core.inference.predictor import Predictor

    rows = [
        {"text": f"{a} {b} {c}", "label": "1" if "file" in (a, b, c) else "0"}
        for a in WORDS for b in WORDS for c in WORDS[:2]
    ]  # fmt: skip
    folder = tiny.bundle(tmp_path / "encoder", tiny.tokenizer(WORDS))
    held_out = LabelledConfig(source=write(tmp_path / "held_out.jsonl", rows[::4]))
    config = FinetuneConfig(
        output=str(tmp_path / "out"), model=str(folder), held_out=held_out,
        train=LabelledConfig(source=write(tmp_path / "train.jsonl", rows)),
        selection=SelectionConfig(
            share=0.3, calibrate="per_label", thresholds=True, abstain_precision=0.9
        ),
        max_length=16, epochs=2.0, lr=1e-3, precision="fp32", examples=0, num_workers=0,
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    counts = finetune.run(config).counts
    assert "calibrated on 60 selection rows" in capsys.readouterr().out
    predictor = Predictor(tmp_path / "out", device="cpu")
    task = predictor.task
    assert isinstance(task, TextClassification)
    assert {*task.chosen.thresholds} == {"1"}
    texts = [row["text"] for row in rows[::4]]
    answers = predictor.predict(texts)
    measured = task.metrics(task.compare(rows[::4], answers))
    assert measured == pytest.approx({name: counts[f"{name}_mean"] for name in measured})
    evaluation = EvaluateConfig(
        output=str(tmp_path / "scores"), model=config.output, held_out=held_out, num_workers=0,
        tracking_uri=config.tracking_uri,
    )  # fmt: skip
    scored = evaluate.run(evaluation).counts
    assert measured == pytest.approx({name: scored[name] for name in measured})
    before, after = (scored[f"expected_calibration_error{end}"] for end in ("_before", ""))
    assert 0 <= after <= 1
    assert before != after
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "bundle")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "bundle").eval()
    theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(-1)
    ours = [{each["label"]: each["score"] for each in answer} for answer in answers]
    np.testing.assert_allclose(
        [[each["0"], each["1"]] for each in ours], theirs.detach(), atol=1e-5
    )
