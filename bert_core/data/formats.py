"""Bytes to documents, and the messages about damaged ones. Pure: no files here."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from bert_core.errors import CorpusError
from bert_core.wording import shown

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
    """Decode `data`, which begins at byte `offset` of `source`.

    Raises: CorpusError naming `source` and the offset of the first byte that is not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f" at offset {offset + error.start:,}"
        raise CorpusError(f"{source}: {not_utf8(data[error.start], where)}") from error


def not_utf8(byte: int, where: str = "") -> str:
    """Return the message about a text that is not UTF-8 because of `byte`, with the way out.

    UTF-16 begins with 0xff or 0xfe, which are rare letters in the encoding of older Windows files.
    """
    encoding = "UTF-16" if byte in (0xFE, 0xFF) else "WINDOWS-1252"
    return (
        f"wanted UTF-8, byte 0x{byte:02x}{where} is not: convert the file, if it is {encoding} "
        f"with `iconv -f {encoding} -t UTF-8`, or leave it out"
    )


def damaged(path: str, kind: str, error: Exception) -> CorpusError:
    """Return the error for a file of this kind that cannot be read to its end."""
    return CorpusError(f"{path}: wanted a whole {kind}, it cannot be read ({error}): copy it again")


def text_documents(
    data: bytes, boundary: Boundary, source: str, offset: int = 0, errors: Errors = "fail"
) -> Iterator[str | None]:
    """Yield the documents of a text file, or of a part of it that begins at byte `offset`.

    If `errors` is "skip", None stands for a document that is not UTF-8.
    Raises: CorpusError naming the byte if `errors` is "fail".
    """
    for piece_offset, piece in text_pieces(data, boundary):
        try:
            yield decode_utf8(piece, source, offset + piece_offset)
        except CorpusError:
            if errors == "fail":
                raise
            yield None


def text_pieces(data: bytes, boundary: Boundary) -> Iterator[tuple[int, bytes]]:
    """Yield the byte offset and the bytes of each document of a text file, unchanged and with its
    separator."""
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


def column_of(row: dict, column: str, source: str) -> str:
    """Return the text in `column`. Raises: CorpusError listing the row's columns if it has no text
    there."""
    text = row.get(column)
    if not isinstance(text, str):
        raise CorpusError(
            f"{source}: wanted text in the column {column!r}, got {shown(text)}; there are: "
            f"{', '.join(map(str, row))}: correct the row, or name the right column with "
            "corpus.text_column"
        )
    return text
