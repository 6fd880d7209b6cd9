"""A ranker that teaches: its scores are those of a column, and what it cannot teach is refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ConfigError, CorpusError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_ranking import TextRanking, TextRankingParameters
from pipelines import finetune
from pipelines.answering.teacher import Teacher
from pipelines.corpus.labelled import LabelledConfig
from pipelines.finetune import FinetuneConfig
from tests import tiny
from tests.labelled_rows import write

WORDS = tiny.tokenizer()
ROWS = [
    {"text": "blue sea", "text_pair": "the sea is blue", "negatives": ["a tree", "the tree"]},
    {"text": "a tree", "text_pair": "the tree", "negatives": ["a sea"]},
    {"text": "tree tree", "text_pair": "a tree", "negatives": ["the sea is blue"]},
    {"text": "the sea", "text_pair": "a sea", "negatives": ["tree", "a blue tree"]},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tasks = {
        "ranker": TextRanking(),
        "classifier": TextClassification(["a", "b"]),
        "vectors": FeatureExtraction(),
    }
    return {name: tiny.bundle(folder / name, WORDS, task=task) for name, task in tasks.items()}


@pytest.fixture
def config(small: Any, models: dict[str, Path], tmp_path: Path) -> FinetuneConfig:
    return FinetuneConfig(
        output=str(tmp_path / "finetune"), model=str(models["vectors"]), task="feature-extraction",
        train=LabelledConfig(source=write(tmp_path / "rows.jsonl", ROWS)), batch_size=4, epochs=3.0,
        max_length=16, lr=1e-3, precision="fp32", num_workers=0, tracking_uri=small.tracking_uri,
        teacher=str(models["ranker"]),
    )  # fmt: skip


def scored(ranker: Path) -> list[dict[str, Any]]:
    """The rows with the column that the ranker gives."""
    predictor = Predictor(ranker, device="cpu")
    parameters = TextRankingParameters(raw_scores=True, truncation=True)
    rows = []
    for row in ROWS:
        passages = [row["text_pair"], *row["negatives"]]
        pairs = [{"text": row["text"], "text_pair": passage} for passage in passages]
        answers = predictor.predict(pairs, parameters)
        rows.append({**row, "scores": [answer["score"] for answer in answers]})
    return rows


def weights(config: FinetuneConfig) -> bytes:
    return Path(config.output, "bundle", "model.safetensors").read_bytes()


def test_a_teacher_trains_as_a_column_with_its_scores_does(
    config: FinetuneConfig, models: dict[str, Path], tmp_path: Path
) -> None:
    counts = finetune.run(replace(config, held_out=config.train)).counts
    assert counts["train_rows"] == 4
    teacher = Teacher("ranker", models["ranker"], "", str(tmp_path / "kept"))
    rows = teacher.taught(ROWS, "rows", config)
    source = LabelledConfig(source=write(tmp_path / "scored.jsonl", rows))
    by_column = replace(config, output=str(tmp_path / "column"), train=source, teacher=None)
    finetune.run(by_column)
    untaught = replace(config, output=str(tmp_path / "untaught"), teacher=None)
    finetune.run(untaught)
    assert weights(config) == weights(by_column) != weights(untaught)


def test_a_resumed_run_reads_the_scores_that_the_first_start_kept(
    config: FinetuneConfig, models: dict[str, Path], tmp_path: Path
) -> None:
    ranker = Path(shutil.copytree(models["ranker"], tmp_path / "ranker"))
    teacher = Teacher("ranker", ranker, "1234", str(tmp_path / "kept"))
    first = teacher.taught(ROWS, "rows", config)
    wanted = [score for row in scored(ranker) for score in row["scores"]]
    assert [score for row in first for score in row["scores"]] == pytest.approx(wanted, abs=1e-6)
    shutil.rmtree(ranker)
    assert teacher.taught(ROWS, "rows", config) == first
    with pytest.raises(Exception, match="ranker"):
        replace(teacher, digest="5678", folder=tmp_path / "no-ranker").taught(ROWS, "rows", config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"teacher": "classifier"},
            r"teacher: wanted a model for text-ranking, got .*, which is fo",
        ),
        (
            {"teacher": "vectors"},
            "is for feature-extraction: give another, or use `raybert distill`",
        ),
        (
            {"task": "text-ranking"},
            "teacher: wanted none for text-ranking, which does not learn fr",
        ),
    ],
)
def test_what_a_teacher_cannot_teach_is_told_before_work(
    changes: dict[str, Any], message: str, config: FinetuneConfig, models: dict[str, Path]
) -> None:
    changes = {name: str(models.get(value, value)) for name, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        finetune.run(replace(config, **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"negatives": None},
            "wanted negatives in every row, .* 1 row without, the first .* row 2:",
        ),
        ({"scores": [1.0, 0.0]}, "wanted rows without scores, .* got 1 row with scores: leave the"),
    ],
)
def test_rows_that_it_cannot_score_are_told_before_it_scores_any(
    change: dict[str, Any], message: str, config: FinetuneConfig
) -> None:
    rows = [ROWS[0], ROWS[1] | change]
    with pytest.raises(CorpusError, match=message):
        Teacher("ranker", Path("nowhere"), "", "nowhere").taught(rows, "rows.jsonl", config)
