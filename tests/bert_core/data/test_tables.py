"""Tables row by row: what a row is, where it stands, and what is said of one that is none."""

import csv
import io
import json
import random
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.data import tables
from bert_core.data.labelled_formats import FORMATS, labelled_records
from bert_core.data.tables import TextRow, TextTable, table_rows
from bert_core.errors import CorpusError
from bert_core.tasks.multiple_choice import MultipleChoice
from bert_core.tasks.shapes import labelled
from bert_core.tasks.text_classification import OneLabel, SeveralLabels
from bert_core.tasks.text_regression import Score
from bert_core.tasks.texts import TextInput
from bert_core.tasks.token_classification import TokenClassification


def rows_of(data: bytes, source: str = "a.csv") -> list[TextRow]:
    return list(TextTable(io.BytesIO(data), source).rows())


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_row_says_on_which_line_it_begins_whatever_lies_within_its_quotes(
    ending: str, mark: str
) -> None:
    text = f'{mark}\nid,text\n1,"a\n\nb"\n\n2,"say ""c"", d"\n3,é'.replace("\n", ending)
    table = TextTable(io.BytesIO(text.encode()), "a.csv.gz")
    rows = list(table.rows())
    assert table.columns == ("id", "text")
    assert [(row.line, row.cells) for row in rows] == [
        (3, ["1", f"a{ending}{ending}b"]), (6, []), (7, ["2", 'say "c", d']), (8, ["3", "é"]),
    ]  # fmt: skip
    assert {row.fault for row in rows} == {None}
    assert table.header_bytes + sum(row.size_bytes for row in rows) == len(text.encode())


@pytest.mark.parametrize(
    ("bad", "lines", "fault"),
    [
        ('x,"a"b\n', 1, "cannot be read (',' expected after '\"'): quote cells that hold commas"),
        ("x\n", 1, "wanted 2 cells, as many as the header has columns, got 1: quote cells that"),
        ('x,"a\nb",c\n', 2, "wanted 2 cells, as many as the header has columns, got 3: quote"),
        ("x,caf\udce9\n", 1, "0xe9 is not: convert the file, if it is WINDOWS-1252 with `iconv"),
    ],
)
def test_an_unreadable_row_affects_no_other(bad: str, lines: int, fault: str) -> None:
    data = f"id,text\n1,a\n{bad}2,b\n".encode(errors="surrogateescape")
    first, odd, last = rows_of(data)
    assert (first.cells, last.cells, last.line) == (["1", "a"], ["2", "b"], 3 + lines)
    assert (odd.line, "".join(odd.lines), len(odd.lines)) == (3, bad, lines)
    assert fault in str(odd.fault)
    message = re.escape("a.csv, row 2 (line 3): ") + ".*" + re.escape(fault)
    with pytest.raises(CorpusError, match=message):
        table_rows(data, "a.csv")


@pytest.mark.parametrize(
    ("longest", "rest", "fault"),
    [
        (100, "2,b\n" * 50, "longer than 100 characters, is a quote not closed?"),
        (1000, "2,b\n" * 50, "a quote opens here that is not closed"),
        (1000, '2,b\n2,"b"\n' * 2, "',' expected after '\"'"),
    ],
)
def test_an_unclosed_quote_affects_no_other_line(
    longest: int, rest: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LONGEST_ROW", longest)
    for end in ("", '3,"c'):  # another one, in the last line
        open_quote, *rows = rows_of(f'id,text\n1,"a\n{rest}{end}'.encode())
        assert fault in str(open_quote.fault) or end
        assert open_quote.fault
        assert open_quote.lines == ('1,"a\n',)
        sound = [row for row in rows if not row.fault]
        assert [row.cells for row in sound] == [["2", "b"]] * rest.count("2")
        assert [row.line for row in rows] == list(range(3, 3 + len(rows)))
        assert [row.lines for row in rows if row.fault] == ([(end,)] if end else [])


def test_rows_are_those_that_were_written() -> None:
    rng = random.Random(0)
    table = [
        ["".join(rng.choices('ab ,;"\n\r\té', k=rng.randrange(8))) for _ in range(3)]
        for _ in range(300)
    ]
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([["x", "y", "z"], *table])
    assert [row.cells for row in rows_of(text.getvalue().encode())] == table


@pytest.mark.parametrize(
    ("data", "source", "message"),
    [
        ("text;label\na;b\n", "a.csv", "a.csv, line 1: wanted names of columns separated by commas"
         ", got none of these but ';': convert it with `csv.writer(open('a.commas.csv', 'w', "),
        ('"text";"label"\n"a";"b"\n', "a.csv", "got none of these but ';': convert it with `csv.w"),
        ("text\tlabel\na\tb\n", "a.csv", "got none of these but '\\t': name the file .tsv"),
        ("text,label\na,b\n", "a.tsv.bz2", "separated by tabs, got none of these but ',': name the "
         "file .csv"),
        ("\n\ufefft\udcffxt,label\n", "a.csv", "wanted UTF-8, byte 0xff is not: convert "
         "the file, if it is UTF-16 with `iconv -f UTF-16 -t UTF-8`, or leave it out"),
        ('a,"b', "a.csv", "a.csv, line 1: wanted a row of .csv, it cannot be read (a quote opens"),
    ],
)  # fmt: skip
def test_invalid_headers_are_explained(data: str, source: str, message: str) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        rows_of(data.encode(errors="surrogateescape"), source)


def test_one_column_of_texts_is_a_table() -> None:
    assert table_rows(b"text\na; b\n\nc\n", "a.csv") == [{"text": "a; b"}, {"text": "c"}]


def hugging_face(features: dict[str, Any], **columns: list[Any]) -> bytes:
    """Parquet as the `datasets` library writes it."""
    table = pa.table(columns)
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(about), sink)
    return sink.getvalue()


CLASSES = {"names": ["neg", "pos"], "_type": "ClassLabel"}
OLDER = {"num_classes": 2, "names_file": None, "id": None} | CLASSES


@pytest.mark.parametrize("feature", [CLASSES, OLDER])
def test_a_class_label_of_hugging_face_is_its_name(feature: dict[str, Any]) -> None:
    data = hugging_face({"label": feature, "text": {"dtype": "string"}}, text=["a"], label=[1])
    [row] = labelled(table_rows(data, "a.parquet"), (TextInput, OneLabel), {}, "a")
    assert row == {"text": "a", "label": "pos"}


@pytest.mark.parametrize(
    "feature",
    [
        {"feature": CLASSES, "_type": "List"},
        {"feature": CLASSES, "length": -1, "_type": "LargeList"},
        {"feature": OLDER, "length": -1, "id": None, "_type": "Sequence"},
        [CLASSES],
    ],
)
def test_lists_of_class_labels_are_lists_of_names(feature: Any) -> None:
    data = hugging_face({"labels": feature}, text=["a", "b"], labels=[[1, 0], []])
    rows = labelled(table_rows(data, "a.parquet"), (TextInput, SeveralLabels), {}, "a")
    assert [row["labels"] for row in rows] == [["pos", "neg"], []]
    data = hugging_face({"ner_tags": feature}, tokens=[["a", "b"]], ner_tags=[[0, 1]])
    columns = {"tags": "ner_tags"}
    [row] = labelled(table_rows(data, "a.parquet"), TokenClassification.shapes(), columns, "a")
    assert row["tags"] == ["neg", "pos"]


def test_where_a_number_is_wanted_a_class_label_is_its_number() -> None:
    feature = {"label": {"names": ["A", "B"], "_type": "ClassLabel"}}
    data = hugging_face(feature, text=["a"], choices=[["x", "y"]], label=[1])
    [row] = labelled(table_rows(data, "a.parquet"), MultipleChoice.shapes(), {}, "a")
    assert row["label"] == 1
    columns = {"score": "label"}
    [row] = labelled(table_rows(data, "a.parquet"), (TextInput, Score), columns, "a")
    assert row["score"] == 1.0


def test_a_test_set_without_labels_is_distinguished_from_a_labelled_one() -> None:
    data = hugging_face({"label": CLASSES}, text=["a", "b"], label=[0, -1])
    message = (
        "a, row 2: wanted text in the column 'label', got a number (-1), which marks rows "
        "without a label in Hugging Face's data sets: give a split with labels"
    )
    with pytest.raises(CorpusError, match=re.escape(message)):
        labelled(table_rows(data, "a.parquet"), (TextInput, OneLabel), {}, "a")
    plain = hugging_face({"label": {"dtype": "int64"}}, text=["a", "b"], label=[1, -1])
    rows = labelled(table_rows(plain, "a.parquet"), (TextInput, OneLabel), {}, "a")
    assert [row["label"] for row in rows] == ["1", "-1"]  # where they are the labels


@pytest.mark.parametrize("about", [b"{", b"[]", b'{"info": {"features": {"label": 3}}}', b"{}"])
def test_metadata_of_another_shape_are_no_names(about: bytes) -> None:
    sink = io.BytesIO()
    table = pa.table({"label": [1]}).replace_schema_metadata({"huggingface": about})
    pq.write_table(table, sink)
    assert table_rows(sink.getvalue(), "a.parquet") == [{"label": 1}]


@pytest.mark.parametrize("name", FORMATS)
def test_parquet_is_read_as_what_it_is_whatever_the_format(name: str) -> None:
    data = hugging_face({"label": CLASSES}, sentence1=["a"], sentence2=["b"], label=[0], score=[1])
    found = labelled_records(data, "train-00000.parquet", name)
    assert [each["label"] for each in found.records] == [0]
    assert set(found.columns.values()) <= {"sentence1", "sentence2", "label", "score"}
    if name == "rte":
        [row] = labelled(found.records, (TextInput, OneLabel), found.columns, "a")
        assert row == {"text": "a", "text_pair": "b", "label": "neg"}
