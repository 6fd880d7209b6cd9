"""Rows that do not fit a task, whichever source they come from: refused together, or skipped."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from bert_core.tasks.token_classification import TokenClassification
from pipelines.corpus.labelled import (
    BAD,
    STRIPPED,
    LabelledConfig,
    labelled_input,
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


def test_bad_rows_are_refused_together_or_left_out_on_request(
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


def test_faults_common_to_all_rows_are_not_left_out(tmp_path: Path) -> None:
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
        source = LabelledConfig(source=str(path), columns={**columns})
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


# Of each format a broken row between two good ones, as rows of a table are: where and why.
TAGS = TokenClassification.shapes()
LABELS = TextClassification.shapes()
COLUMNS = "\t".join("_" * 8)
BROKEN: dict[str, tuple[str | bytes, tuple[type, type], str]] = {
    "conll, a column too few": (
        "a B-x\n\nb B-x\nc\nd B-x\n\ne O\n", TAGS, "line 4: wanted 2 columns, got 1 ('c')",
    ),
    "conll, a column too many": (
        "a\tx\tO\n\nb\tO\n\nc\tx\tO", TAGS, "line 3: wanted 3 columns, got 2 ('b\\tO')",
    ),
    "conll, first": ("b x O\n\na O\n\nc O", TAGS, "line 1: wanted 2 columns, got 3 ('b x O')"),
    "conll, not UTF-8": (
        b"a O\n\nb\xe9 O\n\nc O\n", TAGS, "line 3: wanted UTF-8, byte 0xe9 is not",
    ),
    "conllu": (
        f"1\ta\t{COLUMNS}\n\n1\tb\n\n1\tc\t{COLUMNS}\n", TAGS,
        "line 3: wanted 10 columns between tabs (id, form, lemma, upos, xpos, feats, head, "
        "deprel, deps, misc), got 2 ('1\\tb'): correct the line",
    ),
    "sst2": (
        "sentence\tlabel\na\tx\nb\nc\ty\n", LABELS,
        "line 3: wanted 2 columns separated by tabs (sentence, label), got 1",
    ),
    "sst2, not UTF-8": (
        b"sentence\tlabel\na\tx\n\xff\tx\nc\ty\n", LABELS, "line 3: wanted UTF-8, byte 0xff is",
    ),
    "cola, without a header": (
        "s\t1\t\ta\ns\t0\ns\t0\t*\tc\n", LABELS, "line 2: wanted 4 columns separated by tabs",
    ),
    "clinc_train": (
        json.dumps({"train": [["a", "x"], ["b"], ["c", "y"]]}), LABELS,
        'pair 2 of train: wanted a list of text and intent, got a list (["b"])',
    ),
    "squad": (
        json.dumps({"data": [{"paragraphs": [{"context": "a b", "qas": [
            {"question": "q", "answers": []}, {"id": "1"}, {"question": "r", "answers": []}
        ]}]}]}),
        QuestionAnswering.shapes(),
        'question 2: wanted an object with a question, as SQuAD publishes it, got an object ({"id',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_row_of_any_format_is_a_bad_row_like_others(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, shapes, fault = BROKEN[case]
    path = tmp_path / "a.data"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = LabelledConfig(source=str(path), format=case.partition(",")[0])
    with pytest.raises(CorpusError, match=re.escape(f"{path}, {fault}")):
        labelled_rows(config, "train", shapes)
    found = labelled_rows(replace(config, bad_rows="skip"), "train", shapes)
    assert (len(found.rows), found.remarks[BAD]) == (2, 1)
    told = capsys.readouterr().out
    assert f"{path}: left out 1 row: wanted" in told
    assert "(row " in told


EVERY_FITTING = [
    ("text-classification", ["x", "y"], {}, {"text": "a", "label": "x"}, {"label": "z"}),
    (
        "text-classification", ["x", "y"], {"multi_label": True},
        {"text": "a", "labels": ["x", "y"]}, {"labels": ["x", "z"]},
    ),
    (
        "token-classification", ["B-x", "O"], {"entities": True},
        {"tokens": ["a"], "tags": ["B-x"]}, {"tags": ["noun"]},
    ),
    (
        "zero-shot-classification", [], {"candidate_labels": ["x", "y"]},
        {"text": "a", "label": "x"}, {"label": "z"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "labels", "options", "good", "bad"), EVERY_FITTING)
def test_rows_whose_labels_a_model_does_not_know_are_bad_rows_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    name: str, labels: list[str], options: dict[str, Any], good: Any, bad: Any,
) -> None:  # fmt: skip
    kind = TASKS[name]
    task = kind(labels, kind.options_of(options))
    rows = [good, good | bad, good, good | bad]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = LabelledConfig(source=str(path))
    with pytest.raises(CorpusError, match=r"row 2: .*1 other row \(row 4\); 2 of 4 rows in all"):
        labelled_rows(config, "held_out", task.shapes(task.chosen), task.fitting)
    config = replace(config, bad_rows="skip")
    found = labelled_rows(config, "held_out", task.shapes(task.chosen), task.fitting)
    assert (found.rows, found.remarks[BAD]) == ([good, good], 2)
    assert "(rows 2, 4)" in capsys.readouterr().out


def test_each_unknown_label_is_named_and_many_are_counted(tmp_path: Path) -> None:
    path, task = tmp_path / "a.jsonl", TextClassification(["x", "y"])
    rows = [{"text": "a", "label": f"odd {chr(97 + n % 13)}"} for n in range(26)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(CorpusError) as raised:
        labelled_rows(LabelledConfig(source=str(path)), "held_out", task.shapes(), task.fitting)
    message = str(raised.value)
    assert "its label 'odd b' is not one of the model's in 2 other rows (rows 2, 15)" in message
    assert "; 3 other things are wrong; 26 of 26 rows in all" in message


def test_training_questions_without_an_answer_are_bad_rows(tmp_path: Path) -> None:
    """bert and transformers leave them out of SQuAD 1.1."""
    good = {"question": "is it", "context": "it is", "answers": [{"text": "it", "answer_start": 0}]}
    path, task = tmp_path / "a.jsonl", QuestionAnswering()
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (good, good | {"answers": []})))
    config = LabelledConfig(source=str(path), bad_rows="skip")
    trained = partial(task.fitting, trained=True)
    assert labelled_rows(config, "train", task.shapes(), trained).rows == [good]
    assert len(labelled_rows(config, "held_out", task.shapes(), task.fitting).rows) == 2


# As Jigsaw's and GoEmotions' CSV files are, and lists as transformers' multi-label models take.
JIGSAW = "id,comment_text,toxic,insult\n1,a,1,0\n2,b,0,0\n3,c,1,1\n"
PER_LABEL: dict[str, tuple[str, str]] = {
    "csv": ("a.csv", JIGSAW),
    "csv, as pandas writes floats and booleans": (
        "a.csv", "comment_text,toxic,insult\na,1.0,False\nb,0.0,False\nc,1.0,True\n",
    ),
    "jsonl": (
        "a.jsonl",
        '{"comment_text": "a", "toxic": 1, "insult": 0}\n'
        '{"comment_text": "b", "toxic": false, "insult": 0.0}\n'
        '{"comment_text": "c", "toxic": true, "insult": 1.0}\n',
    ),
    "lists": (
        "a.jsonl",
        '{"comment_text": "a", "labels": [1.0, 0.0]}\n{"comment_text": "b", "labels": [0, 0]}\n'
        '{"comment_text": "c", "labels": [1, 1]}\n',
    ),
}  # fmt: skip
SEVERAL = TextClassificationOptions(multi_label=True)
NAMED: dict[str, list[str] | str] = {"text": "comment_text", "labels": ["toxic", "insult"]}
ASSIGNED = [
    {"text": "a", "labels": ["toxic"]},
    {"text": "b", "labels": []},
    {"text": "c", "labels": ["toxic", "insult"]},
]


def several(config: LabelledConfig, usual: Any = None) -> Any:
    task = TextClassification(["insult", "toxic"], SEVERAL)
    return labelled_rows(config, "train", task.shapes(SEVERAL), task.fitting, usual)


@pytest.mark.parametrize("case", PER_LABEL)
def test_labels_may_have_a_column_each(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, text = PER_LABEL[case]
    (tmp_path / name).write_text(text)
    config = LabelledConfig(source=str(tmp_path / name), columns=NAMED)
    assert several(config).rows == ASSIGNED
    assert several(replace(config, columns={}), NAMED).rows == ASSIGNED, "as in training"
    told = capsys.readouterr().out
    assert 'columns {text = "comment_text", labels = ["toxic", "insult"]}, as in training' in told


def test_labels_in_columns_leave_unused_columns_unread(tmp_path: Path) -> None:
    far = pa.array([9_000_000_000_000_000_000] * 3, pa.timestamp("us"))  # no Python type holds it
    table = {"comment_text": [*"abc"], "toxic": [1, 0, 1], "insult": [0, 0, 1], "created": far}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    config = LabelledConfig(source=str(tmp_path / "a.parquet"), columns=NAMED)
    assert several(config).rows == ASSIGNED


def test_a_cell_other_than_0_and_1_makes_a_bad_row(tmp_path: Path) -> None:
    """Jigsaw's test set has -1 in rows that are not scored, and its shares of annotators."""
    path = tmp_path / "a.csv"
    path.write_text(f"{JIGSAW}4,d,-1,-1\n5,e,0.83,0\n6,f,,0\n")
    config = LabelledConfig(source=str(path), columns=NAMED)
    message = "row 4: wanted 0 or 1 in the column 'toxic', got text (\"-1\"): correct the row"
    with pytest.raises(CorpusError, match=re.escape(message)):
        several(config)
    found = several(replace(config, bad_rows="skip"))
    assert (found.rows, found.remarks[BAD]) == (ASSIGNED, 3)


def test_a_column_per_label_is_refused_with_the_setting_that_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(JIGSAW)
    config = LabelledConfig(source=str(path), columns={"text": "comment_text"})
    with pytest.raises(CorpusError) as raised:
        several(config)
    listed = re.findall(r"--train\.columns\.labels '(.*)'", str(raised.value))
    assert json.loads(listed[0]) == ["toxic", "insult"]
    wrong: tuple[tuple[dict[str, list[str] | str], str], ...] = (
        ({"labels": ["toxic", "insolt"]}, "wanted a column 'insolt', there are: id, comment_text"),
        ({"labels": ["toxic", "toxic"]}, "wanted the name of each label once"),
        ({"text": ["toxic"]}, r"columns\.text: wanted the name of a column, got a list"),
    )
    for columns, message in wrong:
        with pytest.raises((ConfigError, CorpusError), match=message):
            several(replace(config, columns={**config.columns, **columns}))
    with pytest.raises(ConfigError, match="only the labels of texts with any number of them"):
        labelled_rows(replace(config, columns=NAMED), "train", TextClassification.shapes())


def test_columns_of_labels_can_be_named_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    from pipelines.configure import parser_for

    others = ["--model", "m", "--output", "o"]
    given = ["--train.columns.text", "comment_text", "--train.columns.labels", '["toxic","insult"]']
    parsed = parser_for("finetune").parse_args([*given, *others])
    assert parsed.train.columns == NAMED
    path = tmp_path / "a.toml"
    path.write_text('[train]\ncolumns = {text = "comment_text", labels = ["toxic", "insult"]}\n')
    parsed = parser_for("finetune").parse_args(["--config", str(path), *others])
    assert parsed.train.columns == NAMED


def test_positions_in_utf_16_units_are_recognised_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, shapes = tmp_path / "a.jsonl", TokenClassification.shapes()
    span = {"start": 3, "end": 6, "label": "person", "text": "Ada"}
    rows = [{"text": "😀 Ada", "entities": [span]}, {"text": "a", "entities": []}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = LabelledConfig(source=str(path))
    found = labelled_rows(source, "train", shapes, TokenClassification.checked).rows
    assert found[0]["spans"] == [span | {"start": 2, "end": 5}]
    told = capsys.readouterr().out
    assert f"{path}: its positions count UTF-16 units, as the spans' own texts say" in told


def passages(path: Path, columns: dict[str, Any]) -> list[dict[str, Any]]:
    task = TASKS["feature-extraction"]
    config = LabelledConfig(source=str(path), columns=columns)
    return labelled_rows(config, "train", task.shapes(), partial(task.checked, options=None)).rows


def test_negatives_may_be_a_text_a_list_or_a_column_for_each(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "text,text_pair,negative_1,negative_2\nq,a,b,c\nr,d,,e\ns,f,,\n"
    )
    rows = passages(tmp_path / "a.csv", {"negatives": ["negative_1", "negative_2"]})
    assert [row.get("negatives") for row in rows] == [["b", "c"], ["e"], None]
    rows = passages(tmp_path / "a.csv", {"negatives": "negative_2"})
    assert [row.get("negatives") for row in rows] == [["c"], ["e"], None]
    with pytest.raises(CorpusError, match=r"a\.csv: wanted a column 'negative_3', there are: text"):
        passages(tmp_path / "a.csv", {"negatives": ["negative_1", "negative_3"]})
    (tmp_path / "a.jsonl").write_text('{"text": "q", "text_pair": "a", "negatives": ["b", "a"]}\n')
    message = r"a\.jsonl, row 1: wanted negatives other than the text_pair, got text \(\"a\"\) as"
    with pytest.raises(CorpusError, match=message):
        passages(tmp_path / "a.jsonl", {})


def test_a_folder_of_brat_has_a_text_beside_each_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, shapes = tmp_path / "brat", TokenClassification.shapes()
    (folder / "more").mkdir(parents=True)
    for name in ("a", "more/b"):
        (folder / f"{name}.txt").write_text("Ada left")
        (folder / f"{name}.ann").write_text("T1\tperson 0 3\tAda\nR1\tx Arg1:T1 Arg2:T1\n")
    (folder / "c.txt").write_text("nobody has read it")
    source = LabelledConfig(source=str(folder), format="brat")
    check = TokenClassification.checked
    found = labelled_rows(source, "train", shapes, check)
    assert [row["text"] for row in found.rows] == ["Ada left"] * 2
    told = capsys.readouterr().out
    assert f"{folder}: passed over 1 file of other kinds: c.txt" in told
    assert f"{folder}: not used: 2 relations" in told
    before = labelled_input("train", source, "train").digest
    (folder / "a.txt").write_text("Eve left")
    assert labelled_input("train", source, "train").digest != before, "the texts are inputs too"
    (folder / "more" / "b.txt").write_text("Eve left")
    message = (
        rf"{folder}/a\.ann, row 1: wanted the span's own text, \"Ada\", at 0 to 3, got "
        r'"Eve": .*; the same is wrong in 1 other row \(b\.ann row 1\); 2 of 2 rows in all'
    )
    with pytest.raises(CorpusError, match=message):
        labelled_rows(source, "train", shapes, check)
    (folder / "a.txt").unlink()
    message = (
        rf"{folder}/a\.ann: wanted the file that belongs to it beside it, {folder}/a\.txt, there"
    )
    with pytest.raises(CorpusError, match=message):
        labelled_rows(source, "train", shapes, check)


def test_rows_that_their_tool_rejects_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    answers = ("accept", "reject", "reject", "ignore")
    span = {"start": 0, "end": 3, "label": "x"}
    rows = [{"text": "Ada", "spans": [span], "answer": answer} for answer in answers]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = LabelledConfig(source=str(path), format="prodigy")
    assert len(labelled_rows(source, "train", TokenClassification.shapes()).rows) == 1
    assert f"{path}: left out 3 rows: 2 rejected, 1 ignored" in capsys.readouterr().out
