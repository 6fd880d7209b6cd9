"""Reads JSON objects: one per line, in a list, or over several lines. Pure: no files here.

All three are read as lines, so that a bad object does not make others unreadable. In JSON, line
ends within an object are white space, so an object may be put on a single line unchanged.
"""

import codecs
import io
import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from bert_core import files
from bert_core.data.formats import Errors, decode_utf8
from bert_core.errors import CorpusError

CHUNK_BYTES = 1 << 22
# A bracket outside strings, or the beginning of a string that does not end in the buffer.
_MARK = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+(["\[\]{}])', re.DOTALL)
_LINE_ENDS = bytes.maketrans(b"\r\n", b"  ")
_BLANK = b" \t\r\n"
_OTHERWISE = re.compile(rb"\s*+(?:\[|\{[ \t\r]*+\n)")
_PLAUSIBLE = re.compile(rb'\s*+(?:\[\s*+\{|\{\s*+(?:"|\}))')


def looks_like_json(head: bytes) -> bool:
    """Whether contents that begin with `head` are JSON objects, or a list of them."""
    return _PLAUSIBLE.match(head.removeprefix(codecs.BOM_UTF8)) is not None


def is_of_lines(head: bytes) -> bool:
    """Whether contents that begin with `head` have one object per line: they are not a list, and
    the first line is more than an opening brace."""
    return _OTHERWISE.match(head.removeprefix(codecs.BOM_UTF8)) is None


def as_lines(stream: io.BufferedIOBase, source: str) -> Iterator[tuple[int, bytes]]:
    """Yield the byte offset of each object of a list, or of objects over several lines, and the
    object on a single line.

    Text between objects is yielded too, unless it is commas and white space: it is not JSON. Memory
    is bounded by the longest object and `CHUNK_BYTES`.
    Raises: CorpusError if the list or an object is not closed.
    """
    buffer, base, at = b"", 0, 0  # the bytes in memory, their offset, and how far they are read
    depth, begins, in_list = 0, 0, False
    while chunk := stream.read(max(CHUNK_BYTES, len(buffer))):
        buffer += chunk
        while match := _MARK.match(buffer, at):
            mark, start, at = match[1], match.start(1), match.end()
            if mark == b'"':
                at = start
                break
            outside = depth == in_list
            if mark == b"[" and not depth:
                in_list, depth = True, 1
                begins = at
            elif mark in (b"{", b"["):
                if outside:
                    yield from _between(buffer, begins, start, base)
                    begins = start
                depth += 1
            elif mark in (b"}", b"]"):
                if outside:
                    yield from _between(buffer, begins, start, base)
                    if not depth:
                        yield base + start, mark  # closes nothing: not JSON
                elif depth == 1 + in_list:
                    yield base + begins, buffer[begins:at].translate(_LINE_ENDS)
                depth = max(0, depth - 1)
                in_list = in_list and depth > 0
                if depth <= in_list:
                    begins = at
        else:
            at = len(buffer)
        kept = min(begins, at)
        buffer, base = buffer[kept:], base + kept
        begins, at = begins - kept, at - kept
    if depth or b'"' in buffer[at : at + 1]:
        raise CorpusError(
            f"{source}: wanted whole JSON, it ends within {'a list' if in_list else 'an object'}: "
            "copy or download it again"
        )
    yield from _between(buffer, begins, len(buffer), base)


def _between(buffer: bytes, start: int, end: int, base: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and text between two objects, if it is more than commas and white space."""
    text = buffer[start:end].strip(b"," + _BLANK)
    if text and text != codecs.BOM_UTF8:
        yield base + start, text.translate(_LINE_ENDS)


class Unread(str):
    """The message about a row that cannot be read: where it is, and what is wrong with it."""

    __slots__ = ()


def json_rows(data: bytes, source: str, *, keep: bool = False) -> list[Any]:
    """Return the objects of a file.

    Args:
        keep: whether to return an `Unread` in place of an object that cannot be read.
    Raises: CorpusError naming the line, or the number of the object in a list, unless `keep`.
    """
    if is_of_lines(data):
        lines = enumerate(data.splitlines(), 1)
        named = [
            (f"line {number:,}", line)
            for number, line in lines
            if line.removeprefix(codecs.BOM_UTF8).strip()
        ]
    else:
        objects = enumerate(as_lines(io.BytesIO(data), source), 1)
        named = [(f"object {number:,}", line) for number, (_, line) in objects]
    rows: list[Any] = []
    for where, line in named:
        try:
            rows.append(json_object(line, source, where))
        except CorpusError as error:
            if not keep:
                raise
            rows.append(Unread(str(error).removeprefix(f"{source}, ")))
    return rows


def jsonl_rows(
    data: bytes, source: str, offset: int = 0, errors: Errors = "fail"
) -> Iterator[dict | None]:
    """Yield the JSON object on each line; empty lines and a byte order mark are skipped.

    If `errors` is "skip", None stands for a line that is not an object.
    Raises: CorpusError naming the byte at which such a line begins if `errors` is "fail".
    """
    for line in data.splitlines(keepends=True):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            try:
                yield json_object(line, source, f"the line at byte {offset:,}", offset)
            except CorpusError:
                if errors == "fail":
                    raise
                yield None
        offset += len(line)


def json_object(line: bytes, source: str, place: str, offset: int = 0) -> dict[str, Any]:
    """Return the object on a line that begins at byte `offset`.

    Raises: CorpusError naming file and place if the line is not a JSON object, or if it is a whole
        table as pandas writes it.
    """
    where = f"{source}, {place}"
    text = decode_utf8(line, where, offset).removeprefix("\ufeff")
    value = json_value(text, f"{where}: wanted a JSON object")
    if not isinstance(value, dict):
        raise CorpusError(
            f"{where}: wanted a JSON object, got {_NAMES.get(type(value), 'a value')}: correct or "
            "remove it"
        )
    if (made := _of_pandas(value)) is not None:
        orient, frame = made
        raise CorpusError(
            f"{where}: wanted an object per row, got a whole table, as pandas' to_json writes it "
            f"with orient={orient!r}: write it with orient='records', lines=True, or "
            f"{_to_rows(frame, source)}"
        )
    return value


def _of_pandas(value: dict[str, Any]) -> tuple[str, str] | None:
    """Return the `orient` with which pandas' `to_json` wrote a table, and a Python expression that
    reads it back, with `{}` for the parsed JSON; None if it is not such a table.

    Source: pandas 3.1, `DataFrame.to_json`. The orients "columns" and "index" are recognised if
    rows are numbered.
    """
    if [*value] == ["columns", "index", "data"]:
        return "split", "pandas.DataFrame(**{})"
    if [*value] == ["schema", "data"]:
        schema = value["schema"]
        if isinstance(schema, dict) and "pandas_version" in schema:
            return "table", "pandas.DataFrame({}['data'])"
    cells = value.values()
    if not value or not all(isinstance(each, dict) and each for each in cells):
        return None
    if len({tuple(each) for each in cells}) > 1:
        return None
    if all(name.isdecimal() for name in next(iter(cells))):
        return "columns", "pandas.DataFrame({})"
    if all(name.isdecimal() for name in value):
        return "index", "pandas.DataFrame({}.values())"
    return None


def _to_rows(frame: str, source: str) -> str:
    first = "convert it with"
    if files.suffixes(source)[1]:
        source, first = source.rpartition(".")[0], f"decompress it, and {first}"
    frame = frame.format(f"json.load(open({source!r}, encoding='utf-8'))")
    target = f"{source.removesuffix('.json')}.rows.jsonl"
    return (
        f"{first} `{frame}.to_json({target!r}, orient='records', lines=True, double_precision=15)`"
    )


_NAMES: dict[type, str] = {
    list: "a list", str: "text", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def json_value(text: str, wanted: str, way_out: str = "correct or remove it") -> Any:
    """Return a JSON value. Raises: CorpusError if the text is not JSON, or an object in it has the
    same name twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        reason = str(error)
        if isinstance(error, json.JSONDecodeError) and "\n" not in text.rstrip():
            reason = f"{error.msg}, after {error.pos:,} characters"
        raise CorpusError(f"{wanted}, it is not JSON ({reason}): {way_out}") from error


def check_finite(value: Any, where: str) -> None:
    """Check that a value contains no number that JSON cannot hold.

    Raises: CorpusError for NaN, and for a number as large as 1e400, which Python reads as Infinity.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_finite(item, f"{where}, {name!r}")
    elif isinstance(value, list):
        for item in value:
            check_finite(item, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise CorpusError(
            f"{where}: wanted a number up to {sys.float_info.max:.2g}, got {value}: write null, or "
            "the number as text"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises: JSONDecodeError if a name occurs twice: `json` would
    silently keep the last value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise json.JSONDecodeError(f"the name {twice!r} occurs twice", "", 0)
    return fields
