"""Values of the right type that mean something else, and all bad rows of a file in one message."""

import re
from typing import Any

import pytest

from bert_core.errors import CorpusError, InputError
from bert_core.tasks.catalog import TASKS
from bert_core.tasks.shapes import labelled, read_records
from bert_core.tasks.text_classification import TextClassification
from tests.labelled_rows import EVERY_KIND

BLUE = {"question": "is the sea blue", "context": "the sea is blue"}
CHOICES = {"text": "a", "choices": ["b", "c"]}
PAIR = {"text": "a", "text_pair": "b"}


@pytest.mark.parametrize(("task", "kind"), EVERY_KIND)
def test_the_rows_of_every_kind_are_read_as_they_are(task: Any, kind: Any) -> None:
    rows = [dict(row) for row in kind.rows]
    assert task.checked(rows, task.options_of(kind.options)) == rows


@pytest.mark.parametrize(
    ("name", "options", "row", "message"),
    [
        (
            "text-classification", {"multi_label": True}, {"text": "a", "labels": ["x", "y", "x"]},
            "wanted each label once, got 'x' 2 times",
        ),
        ("multiple-choice", {}, CHOICES | {"label": 2}, "wanted a label from 0 to 1, the index"),
        ("multiple-choice", {}, CHOICES | {"label": -1}, "wanted a label from 0 to 1, the index"),
        ("token-classification", {}, {"tokens": ["a"], "tags": ["O", "O"]}, "one tag per word"),
        (
            "question-answering", {}, BLUE | {"answers": [{"text": "red", "answer_start": 0}]},
            "wanted an answer that is in the passage, got 'red'",
        ),
        ("text-ranking", {}, PAIR | {"score": -1.0}, "wanted a score of at least 0"),
        ("text-ranking", {"highest_score": 3}, PAIR | {"score": 4.0}, "a score of at most 3"),
        ("feature-extraction", {"highest_score": 5}, PAIR | {"score": 6.0}, "from -5 to 5"),
        ("feature-extraction", {"highest_score": 5}, PAIR | {"score": -6.0}, "from -5 to 5"),
        (
            "feature-extraction", {}, PAIR | {"score": 1.0, "negatives": ["c"]},
            "wanted a score or negatives, got both",
        ),
        ("next-sentence-prediction", {}, PAIR | {"label": "1"}, "the label IsNext or NotNext"),
        (
            "sentence-similarity", {},
            {"source_sentence": "a", "sentences": ["b", "c"], "scores": [1.0]},
            "wanted a score for each of 2 sentences, got 1",
        ),
    ],
)  # fmt: skip
def test_a_row_with_another_meaning_is_named(
    name: str, options: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    task = TASKS[name]
    several = options.get("multi_label", False)
    kind = next(kind for kind in task.kinds if kind.options.get("multi_label", False) == several)
    good = kind.rows[-1]
    before, fault, after = task.checked([good, row, good], task.options_of(options))
    assert (before, after) == (good, good)
    assert isinstance(fault, InputError)
    assert message in str(fault)


@pytest.mark.parametrize(
    "labels",
    [
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],  # setfit#337
        [[1, 0], [0, 1], [1, 0]],
        [["1", "0"], ["0", "0"], ["0", "1"]],
        [[True, False], [False, True], [False, False]],
    ],
)
def test_a_column_per_class_is_not_names_of_labels(labels: list[list[Any]]) -> None:
    options = TextClassification.options(multi_label=True)
    records = [{"text": "a", "labels": each} for each in labels]
    rows = labelled(records, TextClassification.shapes(options), {}, "a.jsonl")
    with pytest.raises(CorpusError, match="which look like a column per label: write the names"):
        TextClassification.checked(rows, options)
    # The remedy, and numbers of labels, in sets of other sizes.
    for named in ([["a"], ["b"], []], [["1", "0"], ["0"], ["1"]]):
        rows = [{"text": "a", "labels": each} for each in named]
        assert TextClassification.checked(rows, options) == rows


def test_choices_counted_from_1_are_not_misread() -> None:
    task = TASKS["multiple-choice"]
    with pytest.raises(CorpusError, match="so they count from 1: subtract 1 from every label"):
        task.checked([CHOICES | {"label": 1}, CHOICES | {"label": 2}])
    some = task.checked([CHOICES | {"label": 0}, CHOICES | {"label": 2}])
    assert isinstance(some[1], InputError), "one wrong row alone"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["1", 1.0], 'got text (row 1: "1") and a number (row 2: 1.0) that read alike'),
        ([3, "x", " 3"], 'got a number (row 1: 3) and text (row 3: " 3") that read alike'),
        ([True, "true"], 'true or false (row 1: true) and text (row 2: "true")'),
    ],
)
def test_labels_of_two_types_that_read_alike_are_refused(labels: list[Any], message: str) -> None:
    records = [{"text": "a", "label": label} for label in labels]
    with pytest.raises(CorpusError, match=re.escape(message)):
        labelled(records, TextClassification.shapes(), {}, "a.jsonl")


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ([3, "x"], 'a number (row 1: 3) and text (row 2: "x")'),
        ([1, True], "a number (row 1: 1) and true or false (row 2: true)"),
        ([1, 1.0, 2.5], ""),
        (["1", "x"], ""),
    ],
)
def test_labels_of_several_types_are_reported(labels: list[Any], told: str) -> None:
    records = [{"text": "a", "label": label} for label in labels]
    assert read_records(records, TextClassification.shapes(), {}, "a.jsonl").types == told


@pytest.mark.parametrize("number", ["1_000", "٣", "0x10", "nan", "1,5", ""])
def test_a_cell_that_is_not_a_number_is_refused(number: str) -> None:
    shapes = TASKS["text-regression"].shapes()
    with pytest.raises(CorpusError, match="wanted a number in the column 'score'"):
        labelled([{"text": "a", "score": number}], shapes, {}, "a.csv")


def test_white_space_at_the_ends_is_no_part_of_a_label() -> None:
    records = [{"text": " a ", "label": label} for label in ("files ", " files", "files", "\xa0x")]
    read = read_records(records, TextClassification.shapes(), {}, "a.csv")
    assert [row["label"] for row in read.rows] == ["files", "files", "files", "x"]
    assert read.stripped == 3
    assert read.rows[0]["text"] == " a "
    tags = [{"tokens": [" a"], "tags": ["B-x "]}]
    read = read_records(tags, TASKS["token-classification"].shapes(), {}, "a.jsonl")
    assert (read.rows, read.stripped) == ([{"tokens": [" a"], "tags": ["B-x"]}], 1)


def test_similar_and_rare_labels_are_reported() -> None:
    labels = ["Billing", "billing", "caf\u00e9", "cafe\u0301", "log in", "login", "x", "x"]
    rows = [{"text": "a", "label": label} for label in labels]
    told = TextClassification.from_rows(rows).remarks(rows)
    alike = told["labels_that_differ_only_by_case_or_spaces"]
    assert alike == "'Billing' and 'billing'; 'cafe\u0301' and 'caf\u00e9'; 'log in' and 'login'"
    assert "'x'" not in str(told["labels_with_fewer_than_2_rows"])
    clean = [{"text": "a", "label": label} for label in ("x", "y") * 2]
    told = TextClassification.from_rows(clean).remarks(clean)
    assert not any(name.startswith("labels_") for name in told)


def test_an_empty_answer_before_the_passage_is_no_answer() -> None:
    task = TASKS["question-answering"]
    records = [BLUE | {"answers": [{"text": "", "answer_start": -1}]}]
    rows = labelled(records, task.shapes(), {}, "a.jsonl")
    assert task.checked(rows) == [BLUE | {"answers": []}]


def test_all_bad_rows_are_in_one_message() -> None:
    good = {"text": "a", "label": "x"}
    records: list[dict[str, Any]] = [
        good,
        {"text": "a", "label": None},
        {"text": 3, "label": "x"},
        *[good] * 5,
    ]
    records += [{"text": "a", "label": ""}] * 12
    with pytest.raises(CorpusError) as raised:
        labelled(records, TextClassification.shapes(), {}, "a.jsonl")
    message = str(raised.value)
    assert message.startswith("a.jsonl, row 2: wanted text in the column 'label', got nothing")
    assert "; wanted text in the column 'text' in 1 other row (row 3); the same is wrong" in message
    assert "in 12 other rows (rows 9, 10, 11, 12, 13, 14, 15, 16, 17, 18 and 2 more)" in message
    assert message.endswith("; 14 of 20 rows in all")


@pytest.mark.parametrize(
    ("name", "options", "record", "way_out"),
    [
        (
            "text-classification", {}, {"text": "a", "labels": ["x"]},
            "with a list of labels in each row, set --options.multi_label true",
        ),
        (
            "text-classification", {"multi_label": True}, {"text": "a", "label": "x"},
            "with one label in each row, leave options.multi_label out",
        ),
        (
            "token-classification", {}, {"text": "a b", "label": "x"},
            "say with columns.spans which holds the spans",
        ),
        ("text-regression", {}, {"text": "a", "value": 1.0}, "say with columns.score which"),
    ],
)  # fmt: skip
def test_rows_of_another_kind_are_refused_with_the_way_out(
    name: str, options: dict[str, Any], record: dict[str, Any], way_out: str
) -> None:
    task = TASKS[name]
    with pytest.raises(CorpusError, match=re.escape(f": {way_out}")):
        labelled([record], task.shapes(task.options_of(options)), {}, "a.jsonl")


@pytest.mark.parametrize("name", ["feature-extraction", "sparse-embedding"])
def test_a_row_of_one_text_has_nothing_to_compare_it_with(name: str) -> None:
    task, good = TASKS[name](), {"text": "a", "text_pair": "b"}
    taken, *bad = task.fitting([good, {"text": "a"}, {"text": "a", "negatives": ["b"]}])
    assert taken == good
    assert all(str(error).startswith("wanted a text_pair, the text to comp") for error in bad)
    for rows in ([{"text": "a"}], [good, {"text": "a"}]):
        number = len(rows)
        with pytest.raises(
            CorpusError, match=rf"^row {number}: wanted a text_pair, .* got none: n"
        ):
            task.baseline(rows)
