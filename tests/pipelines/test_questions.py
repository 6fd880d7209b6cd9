"""Questions about passages through the stages: all of them read a passage in the same windows."""

import json
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bert_core.errors import CorpusError
from bert_core.tasks.question_answering import QuestionAnswering
from pipelines import distill, evaluate, finetune
from pipelines.corpus.labelled import LabelledConfig
from pipelines.distill import DistillConfig
from pipelines.evaluate import EvaluateConfig

WINDOW = 24
LINES = [
    "Return the number of bytes", "Open a file and close it", "Raise an error", "Parse a string",
    "Close the socket", "Read all lines of the file", "Write bytes", "Return a new list",
]  # fmt: skip


def article(number: int) -> dict[str, Any]:
    """A passage that is longer than a window, and a question about its middle, in SQuAD's form."""
    lines = LINES[number:] + LINES[:number]
    context, answer = ". ".join(lines), lines[4].split()[-1]
    truth = {"text": answer, "answer_start": context.index(lines[4]) + lines[4].index(answer)}
    question = {"id": f"q{number}", "question": lines[4].split()[0], "answers": [truth]}
    return {"title": str(number), "paragraphs": [{"context": context, "qas": [question]}]}


@dataclass(frozen=True)
class Answering:
    """A bundle that was fine-tuned on questions, and what was measured of it."""

    folder: Path
    rows: LabelledConfig
    trained: dict[str, Any]
    measured: dict[str, Any]
    told: str
    """By the evaluation."""


@pytest.fixture(scope="module")
def answering(pretrained: Any, tmp_path_factory: pytest.TempPathFactory) -> Answering:
    folder = tmp_path_factory.mktemp("questions")
    data = folder / "squad.json"
    data.write_text(json.dumps({"data": [article(number) for number in range(len(LINES))]}))
    rows = LabelledConfig(source=str(data), format="squad")
    config = replace(
        pretrained.finetune(folder / "finetune"),
        task="question-answering", train=rows, held_out=rows, rows_per_class=None, seeds=(0,),
        max_length=WINDOW, epochs=20.0, batch_size=4, lr=3e-3,
    )  # fmt: skip
    trained = finetune.run(config).counts
    evaluation = EvaluateConfig(
        output=str(folder / "evaluate"), model=str(folder / "finetune"), held_out=rows,
        num_workers=0, tracking_uri=pretrained.tracking_uri,
    )  # fmt: skip
    with redirect_stdout(StringIO()) as told:
        measured = evaluate.run(evaluation).counts
    return Answering(folder, rows, trained, measured, told.getvalue())


def test_an_evaluation_reads_passages_in_the_windows_of_training(answering: Answering) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.inference.predictor import Predictor

    bundle = load_bundle(answering.folder / "finetune" / "bundle")
    assert isinstance(bundle.task, QuestionAnswering)
    assert bundle.task.chosen.max_length == WINDOW < bundle.encoder_config.max_length
    predictor = Predictor(answering.folder / "finetune" / "bundle", device="cpu")
    paragraph = article(0)["paragraphs"][0]
    row = {"question": paragraph["qas"][0]["question"], "context": paragraph["context"]}
    windows = predictor.encode([row], None)
    assert max(window.tokens for window in windows) <= WINDOW
    assert len(windows) > 1
    for name in ("exact_match", "f1"):
        assert answering.measured[name] == answering.trained[f"{name}_mean"]
    assert answering.measured["f1"] > 0.3
    assert "evaluate: f1 " in answering.told
    assert "evaluate: exact_match " in answering.told
    table = pq.read_table(answering.folder / "evaluate" / "predictions.parquet")
    assert table["id"].to_pylist() == [f"q{number}" for number in range(len(LINES))]
    assert all(table["predicted_answer"].to_pylist())


def test_a_student_reads_in_windows_of_its_own_and_its_teacher_in_the_teachers(
    answering: Answering, pretrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bert_core.bundle.format import load_bundle

    student = DistillConfig(
        output=str(tmp_path / "distill"), teacher=str(answering.folder / "finetune"),
        train=answering.rows, held_out=answering.rows, max_length=16, epochs=1.0, batch_size=4,
        precision="fp32", num_workers=0, tracking_uri=pretrained.tracking_uri,
    )  # fmt: skip
    counts = distill.run(student).counts
    assert counts["teacher_f1"] == pytest.approx(answering.measured["f1"])
    told = capsys.readouterr().out
    assert f"windows of 16 tokens, but the teacher was trained on {WINDOW}" in told
    distilled = load_bundle(tmp_path / "distill" / "bundle")
    assert isinstance(distilled.task, QuestionAnswering)
    assert distilled.task.chosen.max_length == 16

    # It may be asked to give no answer where its teacher is not; without that, rows have answers.
    more = [article(number) for number in range(len(LINES))]
    more[0]["paragraphs"][0]["qas"][0]["answers"] = []
    (tmp_path / "none.json").write_text(json.dumps({"data": more}))
    some = LabelledConfig(source=str(tmp_path / "none.json"), format="squad")
    student = replace(student, output=str(tmp_path / "none"), train=some, held_out=some)
    with pytest.raises(CorpusError, match=r"row 1: wanted an answer, got none"):
        distill.run(student)
    distill.run(replace(student, options={"no_answer": True}))
    able = load_bundle(tmp_path / "none" / "bundle").task
    assert isinstance(able, QuestionAnswering)
    assert able.chosen.no_answer
