"""Files of the formats that people publish, and what is said of those that are damaged."""

import re
from pathlib import Path

import pytest

from bert_core.data.documents import clean
from bert_core.data.formats import (
    BOUNDARIES,
    Boundary,
    column_of,
    decode_utf8,
    text_documents,
)
from bert_core.data.json_rows import jsonl_rows
from bert_core.errors import CorpusError


def documents(data: bytes, boundary: Boundary) -> list[str]:
    """The documents that are not empty, cleaned as every reader of them cleans them."""
    texts = text_documents(data, boundary, "a.txt")
    return [clean(text) for text in texts if text and clean(text)]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_a_blank_line_ends_a_document(ending: bytes) -> None:
    data = b"one\nstill one\n\ntwo\n \t\n\n\nthree\n".replace(b"\n", ending)
    assert documents(data, "blank_line") == ["one\nstill one", "two", "three"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_a_heading_of_wikitext_begins_a_document_and_a_section_does_not(ending: bytes) -> None:
    data = (
        b" \n = Lobster = \n \n It is blue . \n \n = = Diet = = \n \n Fish . \n"
        b" = Crab = \n \n It is red , 5 = 2 + 3 . \n"
    ).replace(b"\n", ending)
    first, second = documents(data, "heading")
    assert first.startswith("= Lobster =")
    assert first.endswith("Fish .")
    assert second.startswith("= Crab =")


def test_the_first_two_levels_of_markdown_begin_a_document() -> None:
    data = b"# One\na\n### part\nb\n## Two\nc #d\n#hash\n"
    assert documents(data, "heading") == ["# One\na\n### part\nb", "## Two\nc #d\n#hash"]


def test_a_file_may_be_one_document() -> None:
    assert documents(b"one\n\n# two\n", "file") == ["one\n\n# two"]


@pytest.mark.parametrize("boundary", [*BOUNDARIES, "file"])
def test_no_byte_is_lost_between_documents(boundary: Boundary) -> None:
    data = "é\n\n# a\n\n\n = B = \n\r\n \n海".encode()
    assert "".join(map(str, text_documents(data, boundary, "a.txt"))).encode() == data


@pytest.mark.parametrize("boundary", [*BOUNDARIES, "file"])
def test_a_byte_order_mark_is_not_part_of_the_text(boundary: Boundary) -> None:
    assert documents("\ufeffone".encode(), boundary) == ["one"]


@pytest.mark.parametrize("boundary", [*BOUNDARIES, "file"])
def test_an_invalid_utf8_byte_is_reported_with_its_file_and_offset(boundary: Boundary) -> None:
    data = "é a\n\n# b\n\n".encode() + b"caf\xe9 au lait\n\nend"
    place = data.index(b"\xe9 au") + 10_000
    with pytest.raises(
        CorpusError,
        match=rf"books/a\.txt: wanted UTF-8, byte 0xe9 at offset {place:,} is not: convert the",
    ):
        list(text_documents(data, boundary, "books/a.txt", offset=10_000))


@pytest.mark.parametrize("boundary", [*BOUNDARIES, "file"])
def test_a_document_that_is_not_utf8_can_be_skipped(boundary: Boundary) -> None:
    data = "# é\n\n".encode() + b"# caf\xe9\n\n" + "# 海\n\n".encode()
    found = list(text_documents(data, boundary, "a.txt", errors="skip"))
    by_line: list[str | None] = ["# é\n", "\n", None, "\n", "# 海\n", "\n"]
    by_document: list[str | None] = ["# é\n\n", None, "# 海\n\n"]
    wanted = {"file": [None], "line": by_line}.get(boundary, by_document)
    assert [text for text in found if text != ""] == wanted


def test_a_line_that_is_not_an_object_can_be_skipped() -> None:
    lines = [b'{"n": 1}', b'{"n": ', b"[2]", b"", b'{"n": "\xff"}', b"\xff", b"3", b'{"n": 4}']
    lines[5:5] = [b'{"n": ' + b"9" * 5000 + b"}", b"[" * 200_000]  # which Python refuses to read
    found = list(jsonl_rows(b"\n".join(lines), "a.jsonl", errors="skip"))
    assert found == [{"n": 1}, None, None, None, None, None, None, None, {"n": 4}]
    assert [row for row in found if row] == list(jsonl_rows(b'{"n": 1}\n{"n": 4}', "a.jsonl"))


def test_a_character_cut_in_two_is_invalid_utf8() -> None:
    with pytest.raises(CorpusError, match="byte 0xe6 at offset 1 is not"):
        decode_utf8("a海".encode()[:-1], "a.txt")


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_jsonl_holds_an_object_a_line(ending: bytes) -> None:
    data = '\ufeff{"text": "é\\n\u2028"}\n\n  \n{"text": "b", "n": 1}'.encode().replace(
        b"\n", ending
    )
    assert list(jsonl_rows(data, "a.jsonl")) == [{"text": "é\n\u2028"}, {"text": "b", "n": 1}]


def test_a_jsonl_file_of_a_byte_order_mark_alone_has_no_rows() -> None:
    assert list(jsonl_rows("\ufeff\n".encode(), "a.jsonl")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": ',
            r"byte 114: wanted a JSON object, it is not JSON \(.*\): correct or remove it",
        ),
        (b"[1]", r"byte 114: wanted a JSON object, got a list: correct or remove it"),
        (b"3", r"byte 114: wanted a JSON object, got a number"),
        (b'{"text": "\xff"}', r"wanted UTF-8, byte 0xff at offset 124 is not"),
    ],
)
def test_a_line_that_is_not_an_object_is_named_by_its_byte(line: bytes, message: str) -> None:
    data = b'{"text": "a"}\n' + line + b"\n"
    with pytest.raises(CorpusError, match=rf"a\.jsonl, .*{message}"):
        list(jsonl_rows(data, "a.jsonl", offset=100))


def test_a_missing_column_is_named_with_the_existing_ones() -> None:
    with pytest.raises(
        CorpusError, match=r"a: wanted text in the column 'text', got nothing; there are: id, body"
    ):
        column_of({"id": 1, "body": "x"}, "text", "a")


def test_real_articles_are_found_by_their_headings(data_dir: Path) -> None:
    data = (data_dir / "wikitext2" / "valid.txt").read_bytes()
    found = documents(data, "heading")
    titles = re.findall(rb"^ = [^=\n]+ = *$", data, re.MULTILINE)
    assert len(found) == len(titles) == 60
    assert all(re.match(r"= [^=]+ =\n", text) for text in found)
