"""Weights and samples of uneven classes: what a run asks for, against the rows that there are."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_core.bundle.format import load_bundle
from bert_core.data.windows import Window
from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.digests import NO_ROWS
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from bert_core.tasks.token_classification import TokenClassification
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.finetune import FinetuneConfig, build_seed_model
from pipelines.training.classes import (
    ClassesConfig,
    class_loss,
    class_order,
    sampled_classes,
)
from pipelines.training.labelled_sets import read_sets
from pipelines.training.records import Notice, Records
from pipelines.training.seeds import TrainableTask, train_seeds
from pipelines.training.student import LossesConfig
from pipelines.training.worker import RankPlace
from tests import tiny
from tests.labelled_rows import TRAINED, WORDS, rows_of, write

SINGLE = TextClassification(["ham", "spam"])
SEVERAL = TextClassification(
    ["blue", "sea", "tree"], TextClassificationOptions(multi_label=True, pairs=False)
)
UNEVEN = [{"text": "the sea", "label": "ham"}] * 8 + [{"text": "a tree", "label": "spam"}] * 2
LABELS = [["sea"], ["sea", "blue"], ["sea", "tree"], [], ["tree"], ["tree"]]
MANY = [{"text": "the sea", "labels": labels} for labels in LABELS]
TAGGED = [{"tokens": ["the", "sea"], "tags": ["O", "B-place"]}] * 3


def windows(task: Task, rows: Sequence[Any]) -> list[Window]:
    return task.encode(rows, tiny.tokenizer(), 16, labelled=True)


@pytest.mark.parametrize(
    ("classes", "wanted"),
    [
        (ClassesConfig(), ()),
        (ClassesConfig(focal_gamma=2.0), ()),
        (ClassesConfig(weighting="balanced"), (10 / 16, 10 / 4)),
        (ClassesConfig(weights={"spam": 5.0}), (1.0, 5.0)),
    ],
    ids=str,
)
def test_labels_are_weighted_by_their_training_rows(
    classes: ClassesConfig, wanted: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    loss = class_loss(classes, SINGLE, windows(SINGLE, UNEVEN))
    assert loss.weights == wanted
    assert loss.focal_gamma == classes.focal_gamma
    assert ("weights of labels: spam" in capsys.readouterr().out) == bool(wanted)


def test_with_several_labels_rows_with_one_are_weighted_against_the_others() -> None:
    balanced = ClassesConfig(weighting="balanced")
    weights = class_loss(balanced, SEVERAL, windows(SEVERAL, MANY)).weights
    assert weights == (5.0, 1.0, 1.0)
    given = ClassesConfig(weights={"tree": 2.0})
    assert class_loss(given, SEVERAL, windows(SEVERAL, MANY)).weights == (1.0, 1.0, 2.0)


def test_tags_are_weighted_by_their_words_and_those_of_no_word_are_not() -> None:
    task = TokenClassification.from_rows(TAGGED)
    assert task.labels == ["B-place", "I-place", "O"]
    loss = class_loss(ClassesConfig(weighting="balanced"), task, windows(task, TAGGED))
    assert loss.weights == (1.0, 1.0, 1.0), "as many of one as of the other"
    more = [*TAGGED, {"tokens": ["the", "tree", "is", "blue"], "tags": ["O"] * 4}]
    loss = class_loss(ClassesConfig(weighting="balanced"), task, windows(task, more))
    assert loss.weights == pytest.approx((10 / 6, 1.0, 10 / 14))
    with pytest.raises(CorpusError, match="got none of 'I-place'"):
        class_loss(ClassesConfig(weights={"I-place": 2.0}), task, windows(task, more))


@pytest.mark.parametrize(
    "classes",
    [
        ClassesConfig(weighting="balanced"),
        ClassesConfig(weights={"spam": 2.0}),
        ClassesConfig(sampling_power=0.5),
    ],
    ids=str,
)
def test_a_label_without_a_training_row_is_told_before_the_first_step(
    classes: ClassesConfig,
) -> None:
    only_ham = windows(SINGLE, UNEVEN[:8])
    wanted = r"every label, got none of 'spam': add rows, lower selection\.share"
    with pytest.raises(CorpusError, match=wanted):
        (class_loss if classes.is_weighted else sampled_classes)(classes, SINGLE, only_ham)


def test_weights_of_labels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"wanted labels of .* 'spma' \(did you mean spam\?\); .*: ham, spam"
    ):
        class_loss(ClassesConfig(weights={"spma": 2.0}), SINGLE, windows(SINGLE, UNEVEN))


def test_a_label_of_every_row_cannot_be_balanced() -> None:
    rows = windows(
        SEVERAL, [row | {"labels": [*row["labels"], "blue"]} for row in (MANY[0], MANY[4])]
    )
    with pytest.raises(CorpusError, match="wanted training rows without the label 'blue'"):
        class_loss(ClassesConfig(weighting="balanced"), SEVERAL, rows)
    assert class_loss(ClassesConfig(weights={"blue": 2.0}), SEVERAL, rows).weights[0] == 2.0


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"weights": {"spam": 0.0}}, r"classes.weights: wanted finite numbers above 0, got 0.0"),
        ({"weights": {"a": 1.0}, "weighting": "balanced"}, "wanted none with classes.weighting"),
        ({"focal_gamma": 2.0, "label_smoothing": 0.1}, "focal_gamma: wanted 0 with classes.label_"),
        ({"sampling_power": 1.5}, "classes.sampling_power: wanted 0 to 1, got 1.5"),
        ({"label_smoothing": 1.0}, "classes.label_smoothing: wanted at least 0 and below 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        ClassesConfig(**settings)


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.trainable])
def test_every_task_takes_weights_or_refuses_them(name: str) -> None:
    kind, classes = TASKS[name], ClassesConfig(weighting="balanced")
    if kind.classes_in is None:
        with pytest.raises(ConfigError, match=f"classes.weighting: wanted the default for {name}"):
            classes.check_task(kind)
        ClassesConfig().check_task(kind)
        return
    classes.check_task(kind)
    for rows in kind.kinds:
        options = kind.options_of(rows.options)
        task = kind.from_rows(rows.rows, options)
        counted = 2 * len(rows.rows) if kind is TextClassification else None
        made = windows(task, list(rows.rows))
        labels = np.concatenate([window.labels[kind.classes_in] for window in made])
        assert counted is None or len(labels) * 2 == counted
        assert labels.max() < len(task.labels)
        loss = class_loss(ClassesConfig(weights={task.labels[0]: 3.0}), task, made)
        assert loss.weights[0] == 3.0
        objective = task.build_objective(tiny.encoder_config(16))
        assert hasattr(objective, "loss")


def test_rows_are_sampled_by_their_label_or_the_rarest_of_several() -> None:
    even = ClassesConfig(sampling_power=0.0)
    order = class_order(even, SINGLE, windows(SINGLE, UNEVEN), 0)
    assert np.bincount(order.samples(0, 10).rows >= 8).tolist() == [5, 5]
    sampled = sampled_classes(even, SEVERAL, windows(SEVERAL, MANY)).tolist()
    assert sampled == [1, 0, 1, 3, 2, 2], "of sea and tree, as many of each, the first"
    same = class_order(ClassesConfig(), SINGLE, windows(SINGLE, UNEVEN), 0)
    assert sorted(same.samples(0, 10).rows) == list(range(10))


def test_words_of_a_text_cannot_be_sampled_by_their_tags() -> None:
    task = TokenClassification.from_rows(TAGGED)
    with pytest.raises(ConfigError, match=r"sampling_power: wanted 1 for token-classification"):
        class_order(ClassesConfig(sampling_power=0.5), task, windows(task, TAGGED), 0)


def test_a_student_without_a_loss_of_labels_takes_no_weights() -> None:
    changed = DistillConfig(
        output="out", teacher="teacher", losses=LossesConfig(hard=0.0),
        classes=ClassesConfig(sampling_power=0.0),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"classes.weighting: wanted .* losses.hard = 0"):
        replace(changed, classes=ClassesConfig(weighting="balanced"))
    with pytest.raises(ConfigError, match="shards: wanted no classes with it"):
        replace(changed, shards="shards")


@pytest.mark.trained
@pytest.mark.parametrize(("kind", "classes"), [
    ("text-classification-single", ClassesConfig(weights={"files": 1e-9}, sampling_power=0.5)),
    ("token-classification-entities", ClassesConfig(weights={"B-person": 1e-9, "O": 1e-9})),
])  # fmt: skip
def test_a_run_learns_by_its_weights(
    kind: str, classes: ClassesConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What weighs nothing is never answered."""
    monkeypatch.setattr(RankPlace, "here", lambda _: RankPlace(0, 1, torch.device("cpu")))
    task, of_kind = TRAINED[kind]
    tokenizer = tiny.tokenizer([*tiny.pieces(tiny.ALPHABET), *WORDS[1:], "."])
    rows = LabelledConfig(source=write(tmp_path / "rows.jsonl", rows_of(of_kind, 24)))
    folder = tiny.bundle(tmp_path / "encoder", tokenizer)
    config = FinetuneConfig(
        output=str(tmp_path / "out"), model=str(folder),
        task=task.name, options=dict(of_kind.options), train=rows, held_out=rows, classes=classes,
        max_length=32, batch_size=8, epochs=8.0, lr=3e-3, precision="fp32", num_workers=0,
    )  # fmt: skip
    bundle = load_bundle(folder)
    learned, sets = read_sets(config, bundle)
    build = partial(build_seed_model, folder, learned, config.dropout, True)
    trainable = TrainableTask(learned, tokenizer, bundle.encoder_config, build, NO_ROWS)
    reports: list[Any] = []

    def report(records: Records, last: bool) -> Notice:
        reports.extend(records)
        return "nothing"

    weighing = trainable.weighing(classes, sets["train"].windows)
    train_seeds(weighing, sets, config, "run", report)
    [scored] = [numbers for _, numbers in reports if "held_out/loss" in numbers]
    if kind == "text-classification-single":
        assert scored["held_out/task/f1_of_files"] == 0
        assert scored["held_out/task/accuracy"] == 0.5
    else:
        assert scored["held_out/task/recall"] == pytest.approx(1 / 3), "places alone"
