"""Numbers to learn are in any unit: prices and years are learned as well as shares are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bert_core.errors import CorpusError
from bert_core.tasks.text_regression import TextRegression
from pipelines import distill, evaluate, finetune
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.finetune import FinetuneConfig
from tests import tiny

TEXTS = [f"{article} {noun}" for article in ("the", "a") for noun in ("sea", "tree") * 4]
ONES = [1.0 if text.endswith("sea") else -1.0 for text in TEXTS]
PRICES, YEARS = (350_000.0, 100_000.0), (2000.0, 10.0)


def rows_in(folder: Path, mean: float, deviation: float) -> LabelledConfig:
    path = folder / f"{mean:g}.jsonl"
    rows = [
        {"text": text, "score": mean + deviation * one}
        for text, one in zip(TEXTS, ONES, strict=True)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return LabelledConfig(source=str(path))


def settings(folder: Path, rows: LabelledConfig, precision: str = "fp32") -> dict[str, Any]:
    return {
        "train": rows, "held_out": rows, "max_length": 8, "batch_size": 8, "epochs": 20.0,
        "lr": 3e-3, "precision": precision, "num_workers": 0,
        "tracking_uri": f"sqlite:///{folder}/mlflow.db",
    }  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = tiny.tokenizer()
    config = tiny.encoder_config(words.vocab_size, dropout=0.0)
    return tiny.bundle(tmp_path_factory.mktemp("encoder") / "bundle", words, config)


@pytest.fixture(scope="module")
def priced(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives prices."""
    folder = tmp_path_factory.mktemp("priced")
    made = settings(folder, rows_in(folder, *PRICES))
    finetune.run(
        FinetuneConfig(
            output=str(folder / "out"), model=str(encoder), task="text-regression", **made
        )
    )
    return folder / "out" / "bundle"


def answers_of(bundle: Path) -> np.ndarray:
    from bert_core.inference.predictor import Predictor

    answers = Predictor(bundle, device="cpu").predict(TEXTS)
    return np.array([answer["score"] for answer in answers])


def test_the_same_is_learned_in_every_unit(encoder: Path, priced: Path, tmp_path: Path) -> None:
    made = settings(tmp_path, rows_in(tmp_path, 0.0, 1.0))
    finetune.run(
        FinetuneConfig(
            output=str(tmp_path / "out"), model=str(encoder), task="text-regression", **made
        )
    )
    standard = answers_of(tmp_path / "out" / "bundle")
    mean, deviation = PRICES
    assert np.abs(standard - ONES).max() < 0.3, "it can be learned"
    np.testing.assert_allclose((answers_of(priced) - mean) / deviation, standard, atol=2e-3)


def test_a_bundle_has_the_weights_that_give_numbers_in_their_unit(
    encoder: Path, priced: Path
) -> None:
    """So that every reader of Hugging Face's layout, and every graph, gives them too."""
    from bert_core.bundle.format import load_bundle

    task = TextRegression()
    plain = tiny.model(load_bundle(encoder).encoder_config, task.build_objective)
    learned = load_bundle(priced)
    assert set(learned.state) == set(plain.state_dict())
    bias = learned.state["objectives.classification.head.linear.bias"]
    assert bias.item() == pytest.approx(PRICES[0], rel=0.2)


def test_years_are_learned_in_bfloat16(encoder: Path, tmp_path: Path) -> None:
    rows = rows_in(tmp_path, *YEARS)
    counts = finetune.run(
        FinetuneConfig(
            output=str(tmp_path / "out"), model=str(encoder), task="text-regression",
            **settings(tmp_path, rows, "bf16"),
        )
    ).counts  # fmt: skip
    assert counts["rmse_mean"] < 3.0 < counts["baseline_rmse"]


def test_training_goes_on_from_what_was_learned_in_another_unit(
    priced: Path, tmp_path: Path
) -> None:
    mean, deviation = PRICES
    rows = rows_in(tmp_path, mean, deviation / 2)
    made = settings(tmp_path, rows) | {"epochs": 0.01, "lr": 1e-9}
    finetune.run(
        FinetuneConfig(
            output=str(tmp_path / "on"), model=str(priced), task="text-regression", **made
        )
    )
    np.testing.assert_allclose(
        answers_of(tmp_path / "on" / "bundle"), answers_of(priced), rtol=1e-4
    )


def test_a_student_and_an_evaluation_are_reported_in_the_unit_of_the_rows(
    priced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_in(tmp_path, *PRICES)
    counts = distill.run(
        DistillConfig(
            output=str(tmp_path / "out"), teacher=str(priced), layers=(0, 1),
            **settings(tmp_path, rows) | {"epochs": 1.0, "lr": 1e-4},
        )
    ).counts  # fmt: skip
    assert counts["baseline_rmse"] == pytest.approx(100_000)
    assert counts["rmse_mean"] < 40_000
    told = capsys.readouterr().out
    assert "in the unit of the rows; always giving their mean has 100,000" in told
    assert "little was learnt" not in told
    evaluate.run(
        EvaluateConfig(
            output=str(tmp_path / "evaluate"), model=str(tmp_path / "out" / "bundle"),
            held_out=rows, num_workers=0, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        )
    )  # fmt: skip
    assert "; always giving the mean has 100,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([4.0, 4.0], "at least two different scores, found 2 rows"),
        ([1.7e9, 1.7e9 + 900], "subtract 1700000000 from all of them"),
        ([1e200, 2e200], "give them in another unit"),
        ([0.0, 1e-40], "give them in another unit"),
    ],
)
def test_scores_that_cannot_be_learned_are_refused(scores: list[float], message: str) -> None:
    rows = [{"text": "a", "score": score} for score in scores]
    with pytest.raises(CorpusError, match=message):
        TextRegression.from_rows(rows)
    with pytest.raises(CorpusError, match=message):
        TextRegression().to_learn(rows, 16)
