"""Rows of tasks: from tables whatever holds them, from requests, and what is said of the rest."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.data.tables import table_rows
from bert_core.errors import CorpusError, InputError
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.sentence_similarity import Similarities
from bert_core.tasks.shapes import as_row, labelled
from bert_core.tasks.text_classification import OneLabel, SeveralLabels
from bert_core.tasks.text_regression import Score
from bert_core.tasks.texts import TextInput
from bert_core.tasks.token_classification import TokenClassification


def rows_of(data: bytes, source: str) -> list[dict]:
    records = table_rows(data, source)
    return labelled(records, (TextInput, OneLabel), {"text": "sentence"}, source)


def parquet(**columns: list) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


ROWS = [{"text": 'it \'s "fine" , no', "label": "1"}, {"text": "naïve", "label": "0"}]
TSV = 'sentence\tlabel\nit \'s "fine" , no\t1\nnaïve\t0\n'.encode()
CSV = 'label,sentence,id\n1,"it \'s ""fine"" , no",x\n0,naïve,y\n'.encode()
JSONL = "".join(
    json.dumps({"sentence": row["text"], "label": int(row["label"])}) + "\n" for row in ROWS
).encode()


@pytest.mark.parametrize(
    ("data", "source"),
    [
        (TSV, "dev.tsv"),
        (CSV, "dev.csv"),
        (JSONL, "dev.jsonl"),
        (JSONL, "dev.ndjson"),
        (parquet(sentence=[row["text"] for row in ROWS], label=[1, 0]), "dev.parquet"),
        (TSV, "DEV.TSV"),
    ],
)
@pytest.mark.parametrize("change", ["none", "byte order mark", "CRLF"])
def test_labelled_rows_are_the_same_whatever_holds_them(
    data: bytes, source: str, change: str
) -> None:
    if not source.endswith("parquet"):
        data = b"\xef\xbb\xbf" * (change == "byte order mark") + data
        data = data.replace(b"\n", b"\r\n") if change == "CRLF" else data
    assert rows_of(data, source) == ROWS


def test_a_quoted_field_of_a_csv_may_hold_line_breaks() -> None:
    assert rows_of(b'sentence,label\n"a\nb",x\n', "a.csv") == [{"text": "a\nb", "label": "x"}]


@pytest.mark.parametrize(
    ("data", "source", "message"),
    [
        (
            b"text,label\na,1\n",
            "a.csv",
            "a.csv: wanted a column 'sentence', there are: text, label: say with columns.text "
            "which holds the text, or add a first line with the names of the columns",
        ),
        (
            b"sentense,label\na,1\n",
            "a.csv",
            "there are: sentense, label (did you mean sentense?): say with columns.text",
        ),
        (
            b"sentence\tlabel\na\t1\nb\t\n",
            "a.tsv",
            "a.tsv, row 2: wanted text in the column 'label'",
        ),
        (b'{"sentence": 3, "label": 1}', "a.jsonl", "a.jsonl, row 1: wanted text in the column"),
        (
            parquet(sentence=["a"], y=[1.5]),
            "a.parquet",
            "wanted a column 'label', there are: sentence, y: say with columns.label which holds "
            "the label",
        ),
        (
            b'{"sentence": "a", "label": "x"}\n{"sentence": "b"}\n',
            "a.jsonl",
            "a.jsonl, row 2: wanted text in the column 'label', got nothing; there are: sentence: ",
        ),
        (b"sentence,label\n", "a.csv", "a.csv: wanted labelled rows, the file holds none"),
        (b"", "a.jsonl", "a.jsonl: wanted labelled rows, the file holds none: give another file"),
        (
            b"sentence,label\n\xff,1\n",
            "a.csv",
            "a.csv, row 1 (line 2): wanted UTF-8, byte 0xff is not",
        ),
        (b"PAR1 but no more", "a.parquet", "a.parquet: wanted a whole Parquet file, it ca"),
        (
            b"x",
            "a.xlsx",
            "a.xlsx: wanted .csv, .tsv, .jsonl, .json or .parquet, also compressed, got .xlsx: "
            "with openpyxl installed, `p",
        ),
        (
            b"[3]",
            "a.json",
            "a.json, object 1: wanted a JSON object, got a number: correct or remov",
        ),
        (b"a\nb", "a.txt", "got .txt: write a .csv whose first line names its columns, such as te"),
        (b"x", "a.dat", "got .dat: convert or rename it"),
    ],
)
def test_invalid_labelled_files_are_explained(data: bytes, source: str, message: str) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        rows_of(data, source)


def test_the_real_sst2_has_its_published_rows(data_dir: Path) -> None:
    source = data_dir / "sst2" / "dev.tsv"
    rows = rows_of(source.read_bytes(), str(source))
    assert len(rows) == 872
    assert {row["label"] for row in rows} == {"0", "1"}


def test_numbers_lists_and_pairs_come_as_the_task_wants_them() -> None:
    records = table_rows(b"a,b,score\nx,y,4.5\nz,,3\n", "a.csv")
    columns = {"text": "a", "text_pair": "b"}
    rows = labelled(records, (TextInput, Score), columns, "a.csv")
    assert rows[0] == {"text": "x", "text_pair": "y", "score": 4.5}
    assert rows[1] == {"text": "z", "text_pair": "", "score": 3.0}
    (row,) = labelled(records[1:], (TextInput, Score), columns, "a.csv")
    assert row == {"text": "z", "score": 3.0}  # a column of empty cells holds nothing
    several = [{"text": "x", "labels": ["a", "b"]}, {"text": "y", "labels": []}]
    assert labelled(several, (TextInput, SeveralLabels), {}, "a.jsonl") == several
    for cell, label in ((True, "True"), (3, "3"), (1.0, "1"), (1.5, "1.5")):
        [row] = labelled([{"text": "x", "label": cell}], (TextInput, OneLabel), {}, "a.parquet")
        assert row["label"] == label
    tags = labelled([{"tokens": ["a"], "tags": [3]}], TokenClassification.shapes(), {}, "a")
    assert tags[0]["tags"] == ["3"]


def test_answers_come_as_squad_or_as_hugging_face_has_them() -> None:
    answers = [{"text": "b", "answer_start": 0}, {"text": "c", "answer_start": 4}]
    hub = {"text": ["b", "c"], "answer_start": [0, 4]}
    for given, wanted in (
        (answers, answers),
        (hub, answers),
        ({"text": [], "answer_start": []}, []),
        ([one | {"answer_id": 3, "meta": {}} for one in answers], answers),
        (hub | {"answer_id": ["x", 3]}, answers),
    ):
        record: dict[str, Any] = {"question": "a", "context": "b", "answers": given}
        [row] = labelled([record], QuestionAnswering.shapes(), {}, "a.json")
        assert row["answers"] == wanted


@pytest.mark.parametrize(
    ("data", "source", "cells"),
    [
        (b"text,label\nhello, world,pos\n", "a.csv", 3),
        (b"text\tlabel\na\tb\tc\n", "a.tsv", 3),
        (b"text,label\nhello\n", "a.csv", 1),
        (b"text\tlabel\na\n", "a.tsv", 1),
    ],
)
def test_a_row_with_other_cells_than_columns_is_refused(
    data: bytes, source: str, cells: int
) -> None:
    message = (
        rf"{source}, row 1 \(line 2\): wanted 2 cells, as many as the header .*, got {cells}: "
    )
    with pytest.raises(CorpusError, match=message):
        table_rows(data, source)


def test_an_unclosed_quote_swallows_no_rows() -> None:
    message = (
        r"a\.csv, row 2 \(line 3\): wanted .* \(a quote opens here that is not closed\): quote"
    )
    with pytest.raises(CorpusError, match=message):
        table_rows(b'label,text\n1,a\n1,"abc\n0,def\n0,ghi\n', "a.csv")


def test_a_cell_may_hold_a_hundred_thousand_words() -> None:
    text = "word " * 100_000
    assert table_rows(f"label,text\n1,{text}\n".encode(), "a.csv")[0]["text"] == text


@pytest.mark.parametrize(
    ("record", "shape", "columns", "message"),
    [
        ({"text": "x", "score": "high"}, Score, {}, "wanted a number in the column 'score', got"),
        ({"text": "x", "score": True}, Score, {}, "'score', got a boolean (true)"),
        ({"text": "x", "labels": "a"}, SeveralLabels, {}, "wanted a list of texts in the column"),
        (
            {"text": "x", "scores": 1},
            Similarities,
            {},
            "wanted a list of numbers in the column 'sc",
        ),
        ({"text": "x", "labels": [None]}, SeveralLabels, {}, "got a list ([null]); there are: te"),
        ({"text": "x", "score": float("nan")}, Score, {}, "wanted a number in the column 'score'"),
        ({"text": "x", "score": "inf"}, Score, {}, "wanted a number in the column 'score', got"),
        ({"text": "a \ud83d", "score": 1}, Score, {}, "text: wanted Unicode text, got half a sur"),
        (
            {"text": "x", "label": "a"},
            OneLabel,
            {"text_pair": "b"},
            "wanted a column 'b', there are: text, label: say with columns.text_pair which",
        ),
        (
            {"text": "x", "label": "a"},
            OneLabel,
            {"txt": "b"},
            "columns: wanted names of the fi",
        ),
    ],
)
def test_records_of_the_wrong_shape_are_named(
    record: dict, shape: type, columns: dict, message: str
) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        labelled([record], (TextInput, shape), columns, "a")


@pytest.mark.parametrize(
    ("value", "row"),
    [
        ("a", {"text": "a"}),
        ({"text": "a"}, {"text": "a"}),
        ({"text": "a", "text_pair": None}, {"text": "a"}),
        ({"text": "a", "text_pair": "b"}, {"text": "a", "text_pair": "b"}),
    ],
)
def test_an_input_is_a_text_or_an_object(value: Any, row: dict) -> None:
    assert as_row(TextInput, value, "inputs") == row


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "inputs: wanted text, got a number (3)"),
        (None, "inputs: wanted text, got nothing"),
        (["a"], 'inputs: wanted text, got a list (["a"])'),
        ({"txt": "a"}, 'wanted text (text) and text_pair (text), got "txt" (did you mean text?)'),
        ({}, "inputs: wanted text (text) and text_pair (text), text is missing"),
        ({"text": "a", "text_pair": 1}, "inputs.text_pair: wanted text, got a number (1)"),
        ({"text": "a \ud83d"}, "inputs.text: wanted Unicode text, got half a surrogate pair at ch"),
    ],
)
def test_an_input_of_another_shape_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        as_row(TextInput, value, "inputs")
