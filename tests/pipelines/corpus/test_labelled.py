"""Rows that do not fit a task, whichever source they come from: refused together, or skipped."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import CorpusError
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.text_classification import TextClassification
from pipelines.corpus.labelled import (
    BAD,
    STRIPPED,
    LabelledConfig,
    labelled_rows,
    usual_columns,
)

GOOD = {"text": "a", "choices": ["b", "c"], "label": 0}
OUT_OF_RANGE = GOOD | {"label": 5}
NO_LABEL = GOOD | {"label": None}
TASK = TASKS["multiple-choice"]


def read(path: Path, rows: list[dict[str, Any]], **config: Any) -> Any:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = LabelledConfig(source=str(path), **config)
    return labelled_rows(source, "train", TASK.shapes(), partial(TASK.checked, options=None))


def test_bad_rows_are_refused_together_and_left_out_if_so_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "a.jsonl", [GOOD, OUT_OF_RANGE, GOOD, NO_LABEL, OUT_OF_RANGE]
    with pytest.raises(CorpusError) as raised:
        read(path, rows)
    message = str(raised.value)
    assert message.startswith(f"{path}, row 2: wanted a label from 0 to 1, the index of a choice")
    assert "the same is wrong in 1 other row (row 5); 3 of 5 rows in all" in message
    assert 'bad_rows = "skip" beside the source' in message, "which is the following"
    found = read(path, rows, bad_rows="skip")
    assert found.rows == [GOOD, GOOD]
    assert (found.remarks[BAD], found.remarks[STRIPPED]) == (3, 0)
    told = capsys.readouterr().out
    assert f"{path}: left out 3 rows: wanted a label from … to …, the index of a choice" in told
    assert "(rows 2, 5); wanted a whole number in the column 'label' (row 4)" in told
    with pytest.raises(CorpusError, match=r"2 of 2 rows in all: none is left"):
        read(path, [NO_LABEL, NO_LABEL], bad_rows="skip")


def test_what_is_wrong_with_all_rows_together_is_not_left_out(tmp_path: Path) -> None:
    rows = [GOOD | {"label": 1}, GOOD | {"label": 2}]
    with pytest.raises(CorpusError, match=r"a\.jsonl, rows: wanted labels that count .* from 0"):
        read(tmp_path / "a.jsonl", rows, bad_rows="skip")


def test_questions_need_no_id(tmp_path: Path) -> None:
    """The field is optional: transformers' and bert's readers make one if there is none."""
    question = {"question": "is it", "answers": [{"text": "it", "answer_start": 0}]}
    paragraph = {"context": "it is", "qas": [question]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    source = LabelledConfig(source=str(path), format="squad")
    (row,) = labelled_rows(source, "train", TASKS["question-answering"].shapes()).rows
    assert row == question | {"context": "it is"}


def test_the_columns_of_training_are_taken_where_none_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By every stage after it, whatever has been made of the bundle since."""
    from bert_core.bundle.format import load_bundle
    from tests import tiny

    trained = {
        "stage": "finetune",
        "config": {"train": {"columns": {"text": "body", "label": "q"}}},
    }
    task = TextClassification(["x", "y"])
    lineages = {"tuned": trained, "exported": {"stage": "export", "parent_lineage": trained}}
    for name, lineage in lineages.items():
        folder = tiny.bundle(tmp_path / name, tiny.tokenizer(), task=task, lineage=lineage)
        usual = usual_columns(load_bundle(folder), task.name)
        assert usual == {"text": "body", "label": "q"}
        assert usual_columns(load_bundle(folder), "text-regression") == {}
    path, shapes = tmp_path / "a.jsonl", task.shapes()

    def rows(record: dict[str, str], **columns: str) -> list[dict[str, Any]]:
        path.write_text(json.dumps(record))
        source = LabelledConfig(source=str(path), columns=columns)
        return labelled_rows(source, "held_out", shapes, usual=usual).rows

    wanted = [{"text": "a", "label": "x"}]
    assert rows({"body": "a", "q": "x", "text": "other"}) == wanted
    told = capsys.readouterr().out
    assert f'{path}: columns {{text = "body", label = "q"}}, as in training' in told
    assert rows({"text": "a", "label": "x"}) == wanted, "a file may have the fields' own names"
    assert rows({"body": "b", "q": "x", "title": "a"}, text="title") == wanted
    assert 'columns {label = "q"}, as in training' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.csv", "text,label\na,x\nb,x,y\nc,\nd,y\n\ne\n", "wanted … cells, as many as"),
        (
            "a.jsonl",
            '{"text": "a", "label": "x"}\n{"text": "b",\n{"text": "c", "label": null}\n'
            '{"text": "d", "label": "y"}\n[]\n',
            "wanted",
        ),
    ],
)
def test_rows_that_cannot_be_read_are_bad_rows_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, kind: str
) -> None:
    path, shapes = tmp_path / name, TextClassification.shapes()
    path.write_text(text)
    with pytest.raises(CorpusError) as raised:
        labelled_rows(LabelledConfig(source=str(path)), "train", shapes)
    message = str(raised.value)
    assert message.startswith(f"{path}, {'row 2 (line 3)' if name == 'a.csv' else 'line 2'}: want")
    assert "wanted text in the column 'label' in 1 other row (row 3)" in message
    assert "3 of 5 rows in all" in message
    skipping = LabelledConfig(source=str(path), bad_rows="skip")
    rows = labelled_rows(skipping, "train", shapes).rows
    assert rows == [{"text": "a", "label": "x"}, {"text": "d", "label": "y"}]
    told = capsys.readouterr().out
    assert f"{path}: left out 3 rows: " in told
    assert kind in told
    path.write_text(text.splitlines()[0][:4] + ("" if name == "a.jsonl" else ",label\na\n"))
    with pytest.raises(CorpusError, match="none is left"):
        labelled_rows(skipping, "train", shapes)
