"""Long texts in one line of a message, and values as it shows them."""

import json

from bert_core.wording import as_json, error_in_one_line, first_line, in_one_line, last_line

TRACEBACK = "\nTraceback:\n  File one\n\nValueError: two\n"


def test_the_first_and_the_last_line_are_those_with_text() -> None:
    assert first_line(TRACEBACK) == "Traceback:"
    assert last_line(TRACEBACK) == "ValueError: two"
    assert first_line(" \n") == last_line("") == ""


def test_a_text_in_one_line_keeps_its_words() -> None:
    assert in_one_line(TRACEBACK) == "Traceback: File one ValueError: two"


def test_an_error_in_one_line_has_its_class_and_the_first_line_of_its_message() -> None:
    assert error_in_one_line(KeyError()) == "KeyError"
    assert error_in_one_line(OSError("no route\nto host")) == "OSError: no route"


def test_a_message_shows_half_a_surrogate_pair_in_a_form_that_can_be_written() -> None:
    value = {"é": "a \ud800"}
    assert as_json(value) == '{"é": "a \\ud800"}'
    assert json.loads(as_json(value)) == value
