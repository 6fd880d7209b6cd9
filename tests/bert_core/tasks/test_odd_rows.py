"""Rows that are not what a task wants: refused by name or counted, never a silent wrong number."""

import io
import random
import re
import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.data.tables import table_rows
from bert_core.data.windows import cut_rows
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.tasks.base import Task
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.shapes import as_row, labelled
from bert_core.tasks.text_classification import TextClassification, TextClassificationOptions
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.token_classification import TokenClassification
from tests import tiny

TOKENIZER = tiny.tokenizer()
QUESTION = {"question": "is the sea blue", "context": "the sea is blue"}


def parquet(names: list[str], columns: list[list[Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, names=names), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("data", "source"),
    [
        (b"text,label,text\na,1,b\n", "a.csv"),
        (b"\xef\xbb\xbftext\tlabel\ttext\r\na\t1\tb\r\n", "a.tsv"),
        (parquet(["text", "label", "text"], [["a"], ["1"], ["b"]]), "a.parquet"),
    ],
)
def test_a_table_with_a_duplicate_column_is_refused(data: bytes, source: str) -> None:
    with pytest.raises(CorpusError, match=rf"{source}: wanted each column once, got 'text' 2 time"):
        table_rows(data, source)


def test_columns_without_a_name_are_no_column_twice() -> None:
    assert table_rows(b"text,label,,\na,1,,\n", "a.csv")[0]["text"] == "a"


def test_an_object_with_a_duplicate_key_is_refused() -> None:
    data = b'{"text": "a", "label": "x"}\n{"text": "b", "label": "x", "label": "y"}\n'
    with pytest.raises(CorpusError, match=r"a.jsonl, line 2: wanted .* \(the name 'label' occ"):
        table_rows(data, "a.jsonl")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": "label"}, "got 'label' for text and label: name the right one for label"),
        ({"text": "a", "text_pair": "a"}, "got 'a' for text and text_pair"),
    ],
)
def test_two_fields_are_not_read_from_one_column(columns: dict[str, str], message: str) -> None:
    record = {"text": "x", "label": "y", "a": "z"}
    with pytest.raises(ConfigError, match=message):
        labelled([record], TextClassification.shapes(), columns, "a")
    # What a row may go without is not looked for in a column that another field is given.
    record = {"text_pair": "x", "label": "y"}
    (row,) = labelled([record], TextClassification.shapes(), {"text": "text_pair"}, "a")
    assert row == {"text": "x", "label": "y"}


NAN = float("nan")


@pytest.mark.parametrize(
    ("task", "record", "message"),
    [
        (TextClassification, {"text": "a", "label": None}, "in the column 'label', got nothing"),
        (TextClassification, {"text": "a", "label": ""}, "in the column 'label', got "),
        (
            TextClassification,
            {"text": "a", "label": NAN},
            "in the column 'label', got a number",
        ),
        (
            TextClassification,
            {"text": None, "label": "x"},
            "in the column 'text', got nothing",
        ),
        (
            TextClassification,
            {"text": NAN, "label": "x"},
            "in the column 'text', got a number",
        ),
        (
            TextRegression,
            {"text": "a", "score": None},
            "number in the column 'score', got noth",
        ),
        (
            TextRegression,
            {"text": "a", "score": ""},
            "a number in the column 'score', got empty text",
        ),
        (TokenClassification, {"tokens": ["a"], "tags": [NAN]}, "a list of texts in the column"),
        (
            TokenClassification,
            {"tokens": ["a"], "tags": [None]},
            "a list of texts in the column",
        ),
        (TokenClassification, {"tokens": None, "tags": ["O"]}, "a list of texts in the column"),
        (QuestionAnswering, QUESTION, "wanted a column 'answers', there are: "),
        (QuestionAnswering, QUESTION | {"answers": [{"text": "blue"}]}, "row 1: wanted answers wi"),
        (
            QuestionAnswering,
            QUESTION | {"answers": [{"text": "", "answer_start": 0}]},
            "wanted answers with a text and its answer_start, a whole number, got {'text': ''",
        ),
        (
            QuestionAnswering,
            QUESTION | {"answers": [{"text": "blue", "answer_start": "11"}]},
            "row 1: wanted answers with a text and its answer_start",
        ),
        (
            QuestionAnswering,
            QUESTION | {"answers": {"text": "blue", "answer_start": 11}},
            'a list of objects in the column \'answers\', got an object ({"text": "blue"',
        ),
        (
            QuestionAnswering,
            QUESTION | {"answers": {"text": ["blue", "sea"], "answer_start": [11]}},
            "a list of objects in the column 'answers', got an object",
        ),
        (
            QuestionAnswering,
            QUESTION | {"answers": {"text": ["blue"]}},
            "a list of objects in the column 'answers', got an object",
        ),
        (
            TokenClassification,
            {"tokens": ["a", "b"], "tags": ["O", ""]},
            "row 1: wanted a list of texts, none of them empty, in the column 'tags', got a list",
        ),
        (TextClassification, {"text": "a", "label": " "}, "in the column 'label', got "),
        (TextClassification, {"text": "a", "label": 10**400}, "text in the column 'label', got a"),
        (TextRegression, {"text": "a", "score": 10**400}, "a number in the column 'score', got a"),
        (
            TASKS["multiple-choice"],
            {"text": "a", "choices": ["b", "c"], "label": "--1"},
            "a whole number in the column 'label', got text (\"--1\")",
        ),
    ],
)
def test_a_cell_that_holds_nothing_is_named(task: type[Task], record: dict, message: str) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        labelled([record], task.shapes(), {}, "a.parquet")


@pytest.mark.parametrize("name", TASKS)
def test_a_file_without_rows_is_refused_for_every_task(name: str) -> None:
    with pytest.raises(CorpusError, match="a: wanted labelled rows, the file holds none: give ano"):
        labelled([], TASKS[name].shapes(), {}, "a")


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        (TextClassification, [{"text": "a", "label": "x"}] * 3, "two labels, found 1 (x)"),
        (TextRegression, [{"text": "a", "score": 1.0}] * 3, "two different scores, found 3 rows"),
        (TokenClassification, [{"tokens": ["a"], "tags": ["O"]}] * 3, "two tags, found 1 (O)"),
    ],
)
def test_a_single_class_is_refused(task: type[Task], rows: list[dict], message: str) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        task.from_rows(rows)


def test_held_out_rows_of_one_class_have_finite_metrics() -> None:
    for task, rows, answers in (
        (
            TextClassification(["x", "y"]),
            [{"text": "a", "label": "x"}] * 3,
            [[{"label": label, "score": 1.0}] for label in "xyx"],
        ),
        (
            TextRegression(),
            [{"text": "a", "score": 2.0}] * 3,
            [{"score": score} for score in (1.0, 2.0, 3.0)],
        ),
        (
            TokenClassification(["B-x", "O"]),
            [{"tokens": ["a"], "tags": ["O"]}] * 3,
            [[], [], [{"entity_group": "x", "start": 0, "end": 1, "score": 1.0}]],
        ),
    ):
        metrics = task.metrics(task.compare(rows, answers))
        assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        (
            TextClassification(["x", "y"], TextClassificationOptions(multi_label=True)),
            {"text": "a", "labels": ["x", "z"]},
            "row 1: its label 'z' is not one of the model's, which are x, y: remove the row, or "
            "train the model on such rows first",
        ),
        (
            TokenClassification(["B-x", "O"]),
            {"tokens": ["a", "b"], "tags": ["O"]},
            "row 1: wanted one tag per word, got 1 tags for 2 words: correct the row",
        ),
        (
            TASKS["multiple-choice"](),
            {"text": "a", "choices": ["b", "c"], "label": 2},
            "row 1: wanted a label from 0 to 1, the index of a choice, got 2",
        ),
        (
            TASKS["next-sentence-prediction"](),
            {"text": "a", "text_pair": "b", "label": "1"},
            "row 1: wanted the label IsNext or NotNext, got '1'",
        ),
        (
            QuestionAnswering(),
            QUESTION | {"answers": [{"text": "red", "answer_start": 0}]},
            "row 1: wanted an answer that is in the passage, got 'red'",
        ),
    ],
)
def test_missing_parts_of_training_rows_are_named(task: Task, row: dict, message: str) -> None:
    with pytest.raises(CorpusError, match=re.escape(message)):
        task.encode([row], TOKENIZER, 32, labelled=True)


def test_a_list_of_labels_has_no_empty_label() -> None:
    shapes = TextClassification.shapes(TextClassificationOptions(multi_label=True))
    with pytest.raises(CorpusError, match="wanted a list of texts, none of them empty, in the col"):
        labelled([{"text": "a", "labels": ["x", ""]}], shapes, {}, "a")
    assert labelled([{"text": "a", "labels": []}], shapes, {}, "a")[0]["labels"] == []


def test_an_answer_before_the_passage_is_not_where_it_is_said_to_be() -> None:
    row = QUESTION | {"answers": [{"text": "blue", "answer_start": -4}]}
    assert QuestionAnswering().remarks([row])["answers_not_where_they_are_said_to_be"] == 1


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("labels", [["B-x", "O"], ["NOUN", "VERB"]])
def test_tags_of_other_words_are_not_scored(number: int, labels: list[str]) -> None:
    tags = [labels[0]] * number
    with pytest.raises(CorpusError, match=rf"row 2: wanted one tag per word, got {number} tags"):
        TokenClassification(labels).compare(
            [{"tokens": ["a"], "tags": labels[:1]}, {"tokens": ["a", "b"], "tags": tags}], [[], []]
        )


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("text-classification", [{"text": "", "label": "x"}, {"text": " \n\u3000", "label": "x"}]),
        ("text-classification", [{"text": "a", "text_pair": " ", "label": "x"}] * 2),
        ("text-regression", [{"text": "", "score": 1.0}, {"text": " ", "score": 1.0}]),
        ("token-classification", [{"tokens": [], "tags": []}, {"tokens": [" "], "tags": ["O"]}]),
        ("question-answering", [QUESTION | {"context": "", "answers": []}] * 2),
        ("question-answering", [QUESTION | {"question": " ", "answers": []}] * 2),
        ("multiple-choice", [{"text": "", "choices": ["a", "b"], "label": 0}] * 2),
        ("multiple-choice", [{"text": "a", "choices": ["", " "], "label": 0}] * 2),
    ],
)
def test_empty_rows_are_accepted_and_counted(name: str, rows: list[dict]) -> None:
    task = TASKS[name](["x", "O"])
    assert task.remarks(rows)["rows_with_empty_text"] == 2
    windows = task.encode(rows, TOKENIZER, 16, labelled=True)
    assert {window.row for window in windows} == {0, 1}


LONG = " ".join(random.Random(0).choices(tiny.WORDS, k=100_000))


@pytest.mark.drill
def test_all_of_a_hundred_thousand_words_are_tagged() -> None:
    row = {"tokens": LONG.split(), "tags": ["O"] * 99_999 + ["B-x"]}
    task = TokenClassification(["B-x", "O"])
    windows = task.encode([row], TOKENIZER, 128, labelled=True)
    labels = np.concatenate([window.labels["token_labels"] for window in windows])
    assert len(labels) == 100_000
    assert labels[-1] == 0
    assert labels.sum() == 99_999
    assert cut_rows(windows) == 0


def test_an_answer_after_a_hundred_thousand_words_is_found() -> None:
    context = f"{LONG} the blue tree"
    answer = {"text": "the blue tree", "answer_start": len(LONG) + 1}
    row = QUESTION | {"context": context, "answers": [answer]}
    windows = QuestionAnswering().encode([row], TOKENIZER, 128, labelled=True)
    with_it = [window for window in windows if window.labels["start_positions"][0]]
    assert len(windows) > 1000
    assert with_it
    second, offsets = with_it[-1].origin
    begin, end = (int(with_it[-1].labels[f"{side}_positions"][0]) for side in ("start", "end"))
    found = context[offsets[begin - second, 0] : offsets[end - second, 1]]
    assert found == "the blue tree"
    assert cut_rows(windows) == 0


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("text-classification", {"text": LONG}),
        ("text-classification", {"text": "a", "text_pair": LONG}),
        ("text-regression", {"text": LONG, "text_pair": LONG}),
        ("next-sentence-prediction", {"text": LONG, "text_pair": "a"}),
        ("multiple-choice", {"text": "a", "choices": ["b", LONG]}),
        ("fill-mask", {"text": f"[MASK] {LONG}"}),
        ("question-answering", {"question": LONG, "context": "a"}),
        ("feature-extraction", {"text": LONG}),
        ("sparse-embedding", {"text": LONG}),
        ("sentence-similarity", {"source_sentence": "a", "sentences": ["b", LONG]}),
    ],
)
def test_a_cut_text_is_counted(name: str, row: dict) -> None:
    task = TASKS[name](["x", "y"])
    short = {
        key: [value[0], "a"] if isinstance(value, list) else "a [MASK]"
        for key, value in row.items()
    }
    windows = task.encode([row, short, row], TOKENIZER, 32)
    assert cut_rows(windows) == 2
    assert max(len(ids) for window in windows for ids in window.ids) <= 32


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (None, "nothing"),
        (NAN, "a number (NaN)"),
        (3, "a number (3)"),
        (["a"], 'a list (["a"])'),
        (b"a", "(\"b'a'\")"),
    ],
)
def test_values_that_are_not_text_are_not_inputs(cell: Any, shown: str) -> None:
    with pytest.raises(InputError, match=rf"row\.text: wanted text, got .*{re.escape(shown)}"):
        as_row(TextClassification.inputs, {"text": cell}, "row")


@pytest.mark.parametrize(
    ("name", "targets", "score"),
    [
        ("feature-extraction", [{}], [[1.0], [0.0]]),
        ("text-ranking", [{"score": 1.0}, {"score": 0.0}], [1.0]),
    ],
)
def test_a_long_text_takes_no_memory_for_every_other_row(
    name: str, targets: list[dict[str, float]], score: list[Any]
) -> None:
    """At four bytes per character and row, it would be 150 MB."""
    texts = ["the sea " * 6250, *(f"text {number}" for number in range(750))]
    rows: list[dict[str, Any]] = [
        {"text": text, "text_pair": "the sea", **targets[place % len(targets)]}
        for place, text in enumerate(texts)
    ]
    task = TASKS[name].from_rows(rows)
    tracemalloc.start()
    try:
        windows = task.encode(rows, TOKENIZER, 16, labelled=True)
        answers = task.decode(rows, windows, [np.array(score)] * len(rows))
        task.metrics(task.compare(rows, answers))
        assert tracemalloc.get_traced_memory()[1] < 4e7
    finally:
        tracemalloc.stop()
