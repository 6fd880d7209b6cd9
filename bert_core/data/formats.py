"""Bytes to documents, and to the objects of JSONL. Pure: no files here."""

import codecs
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

from bert_core.errors import CorpusError

Boundary = Literal["blank_line", "line", "heading", "file"]
Errors = Literal["fail", "skip"]

# Where one document of a text file ends and the next begins; `heading` is WikiText's ` = Title = `
# and the first two levels of Markdown.
BOUNDARIES: dict[Boundary, re.Pattern[bytes]] = {
    "blank_line": re.compile(rb"\n[ \t\r]*\n"),
    "line": re.compile(rb"\n"),
    "heading": re.compile(rb"\n(?= = [^=\n][^\n]* = *\r?\n|##? )"),
}


def decode_utf8(data: bytes, source: str, offset: int = 0) -> str:
    """Raises: CorpusError naming `source` and the byte if `data`, at its `offset`, is no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{source}: wanted UTF-8, byte 0x{data[error.start]:02x} at offset "
            f"{offset + error.start:,} is not: convert the file with iconv, or leave it out"
        ) from error


def damaged(path: str, kind: str, error: Exception) -> CorpusError:
    """What to tell of a file that cannot be read to its end."""
    return CorpusError(f"{path}: wanted a whole {kind}, it cannot be read ({error}): copy it again")


def text_documents(
    data: bytes, boundary: Boundary, source: str, offset: int = 0, errors: Errors = "fail"
) -> Iterator[str | None]:
    """The documents of a text file, or of a part of it that begins at byte `offset`.

    Where `errors` is "skip", None stands for a document that is no UTF-8.
    Raises: CorpusError naming the byte where it is "fail".
    """
    for piece_offset, piece in text_pieces(data, boundary):
        try:
            yield decode_utf8(piece, source, offset + piece_offset)
        except CorpusError:
            if errors == "fail":
                raise
            yield None


def text_pieces(data: bytes, boundary: Boundary) -> Iterator[tuple[int, bytes]]:
    """The documents of a text file as they lie, with what divides them, and the byte of each."""
    pieces = [data] if boundary == "file" else _split(data, BOUNDARIES[boundary])
    return _with_offsets(pieces, data)


def _split(data: bytes, separator: re.Pattern[bytes]) -> list[bytes]:
    cuts = [0, *(match.end() for match in separator.finditer(data)), len(data)]
    return [data[start:end] for start, end in pairwise(cuts)]


def _with_offsets(pieces: list[bytes], data: bytes) -> Iterator[tuple[int, bytes]]:
    assert sum(len(piece) for piece in pieces) == len(data)
    offset = 0
    for piece in pieces:
        yield offset, piece
        offset += len(piece)


def jsonl_rows(
    data: bytes, source: str, offset: int = 0, errors: Errors = "fail"
) -> Iterator[dict | None]:
    """One JSON object a line; empty lines and a byte order mark are passed over.

    Where `errors` is "skip", None stands for a line that is no object.
    Raises: CorpusError naming the byte where such a line begins where it is "fail".
    """
    for line in data.splitlines(keepends=True):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            try:
                yield _json_object(line, source, offset)
            except CorpusError:
                if errors == "fail":
                    raise
                yield None
        offset += len(line)


def _json_object(line: bytes, source: str, offset: int) -> dict:
    try:
        text = decode_utf8(line, source, offset).removeprefix("\ufeff")
        row = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise CorpusError(
            f"{source}: wanted one JSON object a line, the line at byte {offset:,} "
            f"is not JSON ({error}): correct the line, or take it out"
        ) from error
    if not isinstance(row, dict):
        raise CorpusError(
            f"{source}: wanted one JSON object a line, the line at byte {offset:,} holds "
            f"a {type(row).__name__}: correct the line, or take it out"
        )
    return row


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises: JSONDecodeError if a name is there twice, of which `json` would keep the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise json.JSONDecodeError(f"the name {twice!r} is there twice", "", 0)
    return made


def column_of(row: dict, column: str, source: str) -> str:
    """The text in `column`. Raises: CorpusError listing the columns there are."""
    if not isinstance(row.get(column), str):
        raise CorpusError(
            f"{source}: wanted text in the column {column!r}, "
            f"got {type(row.get(column)).__name__}; there are: {', '.join(map(str, row))}"
        )
    return row[column]
