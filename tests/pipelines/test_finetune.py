"""From a pretrained bundle to the registry: fine-tune, evaluate, publish, predict."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bert_core.bundle import load_bundle
from bert_core.errors import ConfigError, CorpusError
from bert_core.predictor import Predictor
from pipelines import evaluate, finetune, publish
from pipelines.evaluate import EvaluateConfig
from pipelines.publish import PublishConfig
from pipelines.sources import LabelledConfig

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def finetuned(pretrained: Any) -> Any:
    finetune.run(pretrained.finetune(pretrained.folder / "finetune"))
    return pretrained


@pytest.fixture(scope="module")
def evaluated(finetuned: Any) -> Any:
    evaluate.run(evaluation(finetuned, finetuned.folder / "evaluate"))
    return finetuned


def evaluation(made: Any, output: Path) -> EvaluateConfig:
    return EvaluateConfig(
        output=str(output),
        model=str(made.folder / "finetune" / "bundle"),
        held_out=made.rows,
        num_workers=0,
        tracking_uri=made.tracking_uri,
    )


def test_every_seed_is_measured_and_the_first_is_the_bundle(finetuned: Any) -> None:
    config = finetuned.finetune(finetuned.folder / "finetune")
    counts = finetune.run(config).counts
    assert [seed["seed"] for seed in counts["seeds"]] == [0, 1]
    assert counts["train_rows"] == 32
    bundle = load_bundle(finetuned.folder / "finetune" / "bundle")
    assert bundle.task is not None
    assert bundle.task.labels == ["early", "late"]
    assert bundle.metrics["accuracy"] == counts["seeds"][0]["accuracy"]
    assert bundle.lineage["from_scratch"] is False


def test_transformers_loads_the_bundle_and_gives_equal_logits(finetuned: Any) -> None:
    folder = finetuned.folder / "finetune" / "bundle"
    texts = ["Return the number of bytes.", "Open a file, and close it again."]
    predictor = Predictor(folder, device="cpu")
    ours = np.stack(predictor.forward(predictor.encode(predictor.rows(texts))))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.detach().numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.usefixtures("local_ray")
def test_one_worker_gives_the_accuracies_of_none(finetuned: Any, tmp_path: Path) -> None:
    config = finetuned.finetune(tmp_path / "one")
    one = finetune.run(replace(config, num_workers=1)).counts["seeds"]
    assert one == finetune.run(finetuned.finetune(finetuned.folder / "finetune")).counts["seeds"]


def test_from_scratch_takes_fresh_weights(finetuned: Any, tmp_path: Path) -> None:
    config = replace(finetuned.finetune(tmp_path / "scratch"), from_scratch=True, epochs=0.5)
    finetune.run(config)
    words = "encoder.embeddings.word_embeddings.weight"
    scratch = load_bundle(tmp_path / "scratch" / "bundle").state[words]
    pretrained = load_bundle(finetuned.folder / "pretrain" / "bundle").state[words]
    assert np.corrcoef(scratch.flatten(), pretrained.flatten())[0, 1] < 0.1


def test_evaluation_has_every_row_once_and_in_order_and_its_accuracy_is_theirs(
    evaluated: Any,
) -> None:
    folder = evaluated.folder / "evaluate"
    rows = [json.loads(line) for line in Path(evaluated.rows.source).read_text().splitlines()]
    table = pq.read_table(folder / "predictions.parquet").to_pylist()
    assert [row["text"] for row in table] == [row["text"] for row in rows]
    right = np.mean([row["predicted_label"] == row["label"] for row in table])
    counts = evaluate.run(evaluation(evaluated, folder)).counts
    assert counts["accuracy"] == pytest.approx(right)
    assert (folder / "answers.png").stat().st_size > 1000


@pytest.mark.usefixtures("local_ray")
def test_evaluation_on_workers_is_the_same(evaluated: Any, tmp_path: Path) -> None:
    evaluate.run(replace(evaluation(evaluated, tmp_path / "two"), num_workers=2))
    two, none = (
        pq.read_table(folder / "predictions.parquet").to_pylist()
        for folder in (tmp_path / "two", evaluated.folder / "evaluate")
    )
    assert [r["predicted_label"] for r in two] == [r["predicted_label"] for r in none]
    ours, theirs = ([r["predicted_score"] for r in each] for each in (two, none))
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_the_champion_predicts_from_a_process_that_has_only_the_package(
    evaluated: Any, tmp_path: Path
) -> None:
    config = PublishConfig(
        output=str(evaluated.folder / "publish"),
        model=str(evaluated.folder / "finetune" / "bundle"),
        evaluation=str(evaluated.folder / "evaluate"),
        name="early-or-late",
        num_workers=0,
        tracking_uri=evaluated.tracking_uri,
    )
    counts = publish.run(config).counts
    assert counts["is_champion"]
    code = """
import mlflow, sys
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/early-or-late@champion")
print(model.predict(["Return the number of bytes."]).to_dict("records")[0]["label"])
"""
    command = [sys.executable, "-c", code, evaluated.tracking_uri]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    predictor = Predictor(evaluated.folder / "finetune" / "bundle", device="cpu")
    best = predictor.predict(["Return the number of bytes."])[0][0]
    assert done.stdout.strip().splitlines()[-1] == best["label"]


def test_an_evaluation_of_another_bundle_is_refused(evaluated: Any, tmp_path: Path) -> None:
    finetune.run(replace(evaluated.finetune(tmp_path / "other"), seeds=(5,), epochs=0.5))
    config = PublishConfig(
        output=str(tmp_path / "publish"),
        model=str(tmp_path / "other" / "bundle"),
        evaluation=str(evaluated.folder / "evaluate"),
        name="early-or-late",
        num_workers=0,
        tracking_uri=evaluated.tracking_uri,
    )
    with pytest.raises(ConfigError, match="wanted an evaluation of bundle"):
        publish.run(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0.0}, "epochs: wanted above 0, got 0"),
        ({"seeds": (1, 1)}, "seeds: wanted different numbers"),
        ({"lr": -1.0}, "lr: wanted above 0, got -1"),
        ({"warmup_share": 2.0}, "warmup_share: wanted 0 to 1, got 2"),
        ({"rows_per_class": 0}, "rows_per_class: wanted at least 1, got 0"),
        ({"max_length": 4}, "max_length: wanted at least 8, got 4"),
    ],
)
def test_settings_out_of_range_are_refused(
    small: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(small.finetune(Path("x")), **change)


def test_rows_that_are_missing_or_too_few_are_refused(pretrained: Any, tmp_path: Path) -> None:
    config = pretrained.finetune(tmp_path / "out")
    nowhere = LabelledConfig(source=str(tmp_path / "no.jsonl"))
    with pytest.raises(CorpusError, match=r"no.jsonl: wanted a file of labelled rows"):
        finetune.run(replace(config, train=nowhere))
    with pytest.raises(CorpusError, match="wanted at least batch_size = 64 rows, got 32"):
        finetune.run(replace(config, batch_size=64))
    with pytest.raises(ConfigError, match="max_length: wanted at most 512"):
        finetune.run(replace(config, max_length=1024, output=str(tmp_path / "long")))
    with pytest.raises(ConfigError, match=r"task: wanted one of .*, got 'magic'"):
        finetune.run(replace(config, task="magic"))
