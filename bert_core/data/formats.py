"""Bytes to documents, and to JSONL objects. Pure: no files here."""

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
    """Raises: CorpusError naming `source` and the byte if `data`, at `offset`, is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f" at offset {offset + error.start:,}"
        raise CorpusError(f"{source}: {not_utf8(data[error.start], where)}") from error


def not_utf8(byte: int, where: str = "") -> str:
    """What is wrong with text that has `byte`, and the way out.

    UTF-16 begins with 0xff or 0xfe, which are rare letters in the encoding of older Windows files.
    """
    encoding = "UTF-16" if byte in (0xFE, 0xFF) else "WINDOWS-1252"
    return (
        f"wanted UTF-8, byte 0x{byte:02x}{where} is not: convert the file, if it is {encoding} "
        f"with `iconv -f {encoding} -t UTF-8`, or leave it out"
    )


def damaged(path: str, kind: str, error: Exception) -> CorpusError:
    """The error for a file that cannot be read to its end."""
    return CorpusError(f"{path}: wanted a whole {kind}, it cannot be read ({error}): copy it again")


def text_documents(
    data: bytes, boundary: Boundary, source: str, offset: int = 0, errors: Errors = "fail"
) -> Iterator[str | None]:
    """The documents of a text file, or of a part of it that begins at byte `offset`.

    If `errors` is "skip", None stands for a document that is not UTF-8.
    Raises: CorpusError naming the byte if it is "fail".
    """
    for piece_offset, piece in text_pieces(data, boundary):
        try:
            yield decode_utf8(piece, source, offset + piece_offset)
        except CorpusError:
            if errors == "fail":
                raise
            yield None


def text_pieces(data: bytes, boundary: Boundary) -> Iterator[tuple[int, bytes]]:
    """The documents of a text file, unchanged and with separators, and the byte offset of each."""
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
    """One JSON object per line; empty lines and a byte order mark are skipped.

    If `errors` is "skip", None stands for a line that is not an object.
    Raises: CorpusError naming the byte at which such a line begins if it is "fail".
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
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise CorpusError(
            f"{source}: wanted one JSON object per line, the line at byte {offset:,} "
            f"is not JSON ({error}): {_way_out(line, offset)}"
        ) from error
    if not isinstance(row, dict):
        raise CorpusError(
            f"{source}: wanted one JSON object per line, the line at byte {offset:,} holds "
            f"a {type(row).__name__}: {_way_out(line, offset)}"
        )
    return row


def _way_out(line: bytes, offset: int) -> str:
    """What to do about a line that is no object: of a list of objects the first one begins so."""
    if offset == 0 and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return (
            "of a list, write each object as a line (pandas: read_json(…), to_json(…, "
            "orient='records', lines=True))"
        )
    return "correct or remove the line"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises: JSONDecodeError if a name occurs twice, of which `json` would keep the last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise json.JSONDecodeError(f"the name {twice!r} occurs twice", "", 0)
    return fields


def column_of(row: dict, column: str, source: str) -> str:
    """The text in `column`. Raises: CorpusError listing the row's columns."""
    if not isinstance(row.get(column), str):
        raise CorpusError(
            f"{source}: wanted text in the column {column!r}, "
            f"got {type(row.get(column)).__name__}; there are: {', '.join(map(str, row))}"
        )
    return row[column]
