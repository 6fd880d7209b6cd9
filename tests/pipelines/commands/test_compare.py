"""Two models on the same rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import ConfigError, CorpusError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_regression import TextRegression
from pipelines.cli import main
from pipelines.commands.compare import CompareConfig, run
from pipelines.corpus.labelled import LabelledConfig
from tests import tiny

TEXTS = [f"the {first} {second}" for first in tiny.WORDS[:6] for second in tiny.WORDS[:5]]


def bundle(folder: Path, labels: tuple[str, ...] = ("bad", "good"), seed: int = 0) -> Path:
    task = TextClassification(labels, TextClassification.options())
    tokenizer = tiny.tokenizer()
    # Weights so large that answers differ from text to text.
    config = tiny.encoder_config(tokenizer.vocab_size, initializer_range=1.0)
    return tiny.bundle(folder, tokenizer, config, task=task, seed=seed)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [bundle(folder / str(seed), seed=seed) for seed in (1, 2)]


def write(path: Path, labels: list[str]) -> str:
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def answers(model: Path) -> list[str]:
    return [answer[0]["label"] for answer in Predictor(model, device="cpu").predict(TEXTS)]


def test_metrics_stand_side_by_side_and_rows_that_one_alone_answers_right_are_shown(
    models: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_a, of_b = map(np.array, map(answers, models))
    # Half of the labels are A's answers, and half B's.
    labels = np.where(np.arange(len(TEXTS)) % 2 == 0, of_a, of_b)
    rows = write(tmp_path / "rows.jsonl", labels.tolist())
    with pytest.raises(SystemExit) as ended:
        main(["compare", *map(str, models), "--held_out.source", rows, "--show", "1"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    right_a, right_b = of_a == labels, of_b == labels
    (accuracy,) = [line.split() for line in lines if line.startswith("accuracy")]
    assert accuracy[1:5] == [f"{100 * right_a.mean():.1f}", "%", f"{100 * right_b.mean():.1f}", "%"]
    gain = 100 * (right_b.mean() - right_a.mean())
    assert float(accuracy[5]) == pytest.approx(gain, abs=0.06)
    assert float(accuracy[6]) <= gain <= float(accuracy[7])
    only_a = np.flatnonzero(right_a & ~right_b)
    assert len(only_a), "models that answer alike show nothing"
    place = lines.index(f"only A is right on {len(only_a)} rows")
    assert lines[place + 1] == f"  row {only_a[0] + 1}: {TEXTS[only_a[0]]} · {labels[only_a[0]]}"
    assert lines[place + 2].startswith(f"    A label {of_a[only_a[0]]}, score 0.")
    assert f"both are right on {(right_a & right_b).sum()} rows, both wrong on 0" in lines


def test_models_for_different_tasks_and_labels_that_one_lacks_are_refused(
    models: list[Path], tmp_path: Path
) -> None:
    rows = LabelledConfig(source=write(tmp_path / "rows.jsonl", ["good"] * len(TEXTS)))

    def compare(b: Path) -> Any:
        run(CompareConfig(a=str(models[0]), b=str(b), held_out=rows))

    stars = tiny.bundle(tmp_path / "stars", tiny.tokenizer(), task=TextRegression())
    with pytest.raises(ConfigError, match=r"b: wanted a model for text-classification .* got one"):
        compare(stars)
    with pytest.raises(CorpusError, match=r"row 1: .*good.* is not one of the model's"):
        compare(bundle(tmp_path / "other", ("bad", "fine")))
