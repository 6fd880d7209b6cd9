"""Questions about passages through the stages: all of them read a passage in the same windows."""

import json
from dataclasses import replace
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


def test_an_evaluation_reads_passages_in_the_windows_of_training(
    pretrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bert_core.bundle.format import load_bundle
    from bert_core.predictor import Predictor

    data = tmp_path / "squad.json"
    data.write_text(json.dumps({"data": [article(number) for number in range(len(LINES))]}))
    rows = LabelledConfig(source=str(data), format="squad")
    config = replace(
        pretrained.finetune(tmp_path / "finetune"),
        task="question-answering", train=rows, held_out=rows, rows_per_class=None, seeds=(0,),
        max_length=WINDOW, epochs=20.0, batch_size=4, lr=3e-3,
    )  # fmt: skip
    trained = finetune.run(config).counts

    bundle = load_bundle(tmp_path / "finetune" / "bundle")
    assert isinstance(bundle.task, QuestionAnswering)
    assert bundle.task.chosen.max_length == WINDOW < bundle.encoder_config.max_length
    predictor = Predictor(tmp_path / "finetune" / "bundle", device="cpu")
    paragraph = article(0)["paragraphs"][0]
    row = {"question": paragraph["qas"][0]["question"], "context": paragraph["context"]}
    windows = predictor.encode([row], None)
    assert max(window.tokens for window in windows) <= WINDOW
    assert len(windows) > 1

    evaluation = EvaluateConfig(
        output=str(tmp_path / "evaluate"), model=str(tmp_path / "finetune"), held_out=rows,
        num_workers=0, tracking_uri=pretrained.tracking_uri,
    )  # fmt: skip
    capsys.readouterr()
    measured = evaluate.run(evaluation).counts
    for name in ("exact_match", "f1"):
        assert measured[name] == trained[f"{name}_mean"]
    assert measured["f1"] > 0.3
    told = capsys.readouterr().out
    assert "evaluate: f1 " in told
    assert "evaluate: exact_match " in told

    # A student reads in windows of its own, and its teacher is measured in the teacher's.
    student = DistillConfig(
        output=str(tmp_path / "distill"), teacher=str(tmp_path / "finetune"), train=rows,
        held_out=rows, max_length=16, epochs=1.0, batch_size=4, precision="fp32", num_workers=0,
        tracking_uri=pretrained.tracking_uri,
    )  # fmt: skip
    counts = distill.run(student).counts
    assert counts["teacher_f1"] == pytest.approx(measured["f1"])
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

    table = pq.read_table(tmp_path / "evaluate" / "predictions.parquet")
    assert table["id"].to_pylist() == [f"q{number}" for number in range(len(LINES))]
    assert all(table["predicted_answer"].to_pylist())
