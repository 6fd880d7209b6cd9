"""Docstrings are read from source, never by running it."""

import inspect
import json

import numpy as np
import pytest

from bert_core.data.docstrings import docstrings_of, normalised, opening

SOURCE = b'''"""The module."""
raise SystemExit("this file was run")

class A:
    """The class.

    More:
        indented.
    """

    async def late(self):
        "The coroutine."

    x = 1
    """An attribute: not a docstring."""

def first():
    """The function."""
    def inner():
        """Inside."""

def none(): ...
def blank():
    """   """
def number():
    b"bytes are none"
'''


def test_every_docstring_comes_in_the_order_of_the_file_and_nothing_is_run() -> None:
    assert docstrings_of(SOURCE) == [
        "The module.",
        "The class.\n\nMore:\n    indented.",
        "The coroutine.",
        "The function.",
        "Inside.",
    ]


@pytest.mark.parametrize("module", [json, json.decoder, np.random])
def test_docstrings_are_what_python_itself_shows(module: object) -> None:
    path = inspect.getsourcefile(module)  # type: ignore[arg-type]
    assert path is not None
    with open(path, "rb") as file:
        found = docstrings_of(file.read())
    assert found[0] == inspect.getdoc(module)


@pytest.mark.parametrize(
    "source",
    [
        b"def broken(:",
        b'"""ok"""\nprint "python 2"',
        b"\xff\xfe\x00",
        b"a = '\x00'",
        b'"""ok"""\nx = ' + b"-" * 100_000 + b"1",
        b'"""ok"""\nx = 1' + b"+1" * 100_000,
    ],
)
def test_a_source_that_cannot_be_parsed_has_none(source: bytes) -> None:
    assert docstrings_of(source) == []


def test_an_invalid_escape_in_other_peoples_code_warns_nobody() -> None:
    assert docstrings_of(b'"""A \\d digit."""') == ["A \\d digit."]


def test_the_encoding_that_a_source_declares_is_obeyed() -> None:
    assert docstrings_of('# -*- coding: latin-1 -*-\n"""Café"""'.encode("latin-1")) == ["Café"]


def test_duplicates_differ_in_case_and_white_space_alone() -> None:
    assert normalised(" Return\n   the VALUE. ") == normalised("return the value.")
    assert normalised("Return the value.") != normalised("Return a value.")


def test_an_opening_is_one_line_cut_at_a_word() -> None:
    assert opening("First\n  line.\n\nSecond.") == "First line. Second."
    assert opening("word " * 100, longest=12) == "word word"
    assert opening("word word word", longest=14) == "word word word"
    assert len(opening("x" * 1000)) == 400
