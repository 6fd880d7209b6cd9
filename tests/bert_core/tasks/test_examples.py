"""The labelled rows whose inputs are shown as examples."""

from dataclasses import fields

import pytest

from bert_core.tasks.base import Kind, Task
from bert_core.tasks.examples import LONGEST, READABLE, examples_of
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.shapes import as_row
from bert_core.tasks.text_classification import TextClassification
from tests.labelled_rows import EVERY_KIND, rows_of

TASK = TextClassification(["a", "b", "c"])


@pytest.mark.parametrize(("kind_of_task", "kind"), EVERY_KIND)
def test_examples_of_every_task_are_inputs_without_the_expected_answers(
    kind_of_task: type[Task], kind: Kind
) -> None:
    options = kind_of_task.options_of(kind.options)
    rows = rows_of(kind, 8)
    task = kind_of_task.from_rows(rows, options)
    examples = examples_of(task, rows, 3)
    assert len(examples) == 3
    inputs = {one.name for one in fields(task.inputs)}
    for example in examples:
        assert as_row(task.inputs, example, "example").keys() <= inputs
        assert example in [task.request_of(row) for row in rows]


def test_every_label_is_shown_before_any_is_shown_again() -> None:
    rows = [{"text": "x" * length, "label": "a"} for length in (10, 11, 12, 13, 14)]
    rows += [{"text": "y" * 40, "label": "b"}, {"text": "z" * 30, "label": "c"}]
    shown = examples_of(TASK, rows, 4)
    assert shown == ("x" * 13, "z" * 30, "y" * 40, "x" * 12)
    assert examples_of(TASK, rows, 1) == shown[:1]
    assert examples_of(TASK, rows, 0) == ()
    assert len(examples_of(TASK, rows, 100)) == len(rows)
    assert examples_of(TASK, [], 3) == ()


def test_a_duplicate_input_is_shown_once() -> None:
    rows = [{"text": "one", "label": "a"}, {"text": "one", "label": "b"}]
    assert examples_of(TASK, rows, 3) == ("one",)


def test_inputs_that_nobody_would_read_come_last() -> None:
    rows = [{"text": "x" * length, "label": "a"} for length in (LONGEST - 2, 1700, 1500, 1600)]
    assert READABLE < 1500
    assert [len(text) for text in examples_of(TASK, rows, 2)] == [1500, 1600]


def test_inputs_that_are_too_long_are_left_out_even_if_no_other_is_left() -> None:
    lengths = (LONGEST - 2, LONGEST - 1, 100_000)  # JSON adds two quotes
    rows = [{"text": "ü" * length, "label": "a"} for length in lengths]
    assert [len(text) for text in examples_of(TASK, rows, 3)] == [LONGEST - 2]
    assert examples_of(TASK, rows[1:], 3) == ()
    long_pair = {"text": "a sea", "text_pair": "ü" * LONGEST, "label": "a"}
    assert examples_of(TASK, [long_pair, {"text": "a tree", "label": "a"}], 3) == ("a tree",)


def test_long_texts_that_are_read_in_windows_are_left_out() -> None:
    rows = [
        {"question": "Where is the sea?", "context": context, "answers": []}
        for context in ("The sea is here. " * 6000, "The sea is here.")
    ]
    short = {"question": "Where is the sea?", "context": "The sea is here."}
    assert examples_of(QuestionAnswering(), rows, 3) == (short,)


def test_examples_have_the_same_fields_and_all_that_rows_have() -> None:
    rows = [{"text": text, "label": "a"} for text in ("one", "two", "three")]
    rows.append({"text": "four", "text_pair": "five", "label": "a"})
    assert examples_of(TASK, rows, 3) == ({"text": "four", "text_pair": "five"},)
