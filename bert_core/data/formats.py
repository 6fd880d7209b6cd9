"""Bytes to documents and labelled rows, in the formats that people publish. Pure: no files here."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

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
    pieces = [data] if boundary == "file" else _split(data, BOUNDARIES[boundary])
    for piece_offset, piece in _with_offsets(pieces, data):
        try:
            yield decode_utf8(piece, source, offset + piece_offset)
        except CorpusError:
            if errors == "fail":
                raise
            yield None


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
        row = json.loads(decode_utf8(line, source, offset).removeprefix("\ufeff"))
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


def column_of(row: dict, column: str, source: str) -> str:
    """The text in `column`. Raises: CorpusError listing the columns there are."""
    if not isinstance(row.get(column), str):
        raise CorpusError(
            f"{source}: wanted text in the column {column!r}, "
            f"got {type(row.get(column)).__name__}; there are: {', '.join(map(str, row))}"
        )
    return row[column]


def table_rows(data: bytes, source: str) -> list[dict]:
    """Rows of a CSV, TSV, JSONL or Parquet file, told apart by its name, values by column.

    TSV is GLUE's: a header, no quoting. Raises: CorpusError naming the file.
    """
    suffix = source.rsplit(".", 1)[-1].lower()
    if suffix in ("jsonl", "ndjson"):
        return [row for row in jsonl_rows(data, source) if row is not None]
    try:
        if suffix == "parquet":
            return pq.read_table(pa.BufferReader(data)).to_pylist()
        if suffix in ("csv", "tsv"):
            text = io.StringIO(decode_utf8(data, source).removeprefix("\ufeff"), newline="")
            reader = (
                csv.DictReader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
                if suffix == "tsv"
                else csv.DictReader(text)
            )
            rows: list[dict[Any, Any]] = list(reader)
            for number, row in enumerate(rows, 1):
                if None in row:
                    raise CorpusError(
                        f"{source}, row {number}: wanted {len(row) - 1} cells, as many as the "
                        f"header has columns, got {len(row) - 1 + len(row[None])}: quote what "
                        "holds the divider"
                    )
            return rows
    except (csv.Error, pa.ArrowInvalid) as error:
        raise CorpusError(
            f"{source}: wanted a .{suffix} file, it cannot be read ({error}): write it again"
        ) from error
    raise CorpusError(
        f"{source}: wanted .csv, .tsv, .jsonl or .parquet, got .{suffix}: convert or rename it"
    )
