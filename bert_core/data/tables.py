"""Bytes to table rows: CSV and TSV row by row, JSON and Parquet at once. Pure: no files here."""

import csv
import io
import json
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from bert_core import files
from bert_core.data.contents import HEAD_BYTES, format_of, to_convert
from bert_core.data.formats import not_utf8
from bert_core.data.json_rows import Unread, json_rows
from bert_core.data.parquet import ParquetTable
from bert_core.errors import CorpusError

Stream = io.BytesIO | io.BufferedReader
LONGEST_ROW = 1 << 24
"""Characters: a longer row of a CSV file is assumed to have an unclosed quote."""
DIVIDERS = {"csv": ",", "tsv": "\t"}
_OTHER_DIVIDERS = ",;\t|"
_NUMBER = re.compile(r"-?[0-9]{1,9}")


Quotes = Literal["csv", "literal"]
"""Whether quotes enclose cells, as RFC 4180 has it, or are part of the text."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """A row of a CSV or TSV file."""

    line: int
    """The number of its first line, from 1."""
    lines: tuple[str, ...]
    """As written, with line ends; bytes that are not UTF-8 are kept by `surrogateescape`."""
    cells: list[str]
    """Empty for a blank line, and for lines that cannot be parsed as a row."""
    fault: str | None = None
    """The message about it, with the way out; None if it is sound."""

    @property
    def size_bytes(self) -> int:
        return sum(len(line.encode(errors="surrogateescape")) for line in self.lines)


class TextTable:
    """A CSV or TSV file as a stream of rows. Memory is bounded by its longest row.

    CSV follows RFC 4180: cells with commas, quotes or line breaks are in quotes. TSV follows GLUE:
    quotes are literal, so no cell holds a tab or a line break.
    """

    def __init__(
        self,
        stream: Stream,
        source: str,
        columns: Sequence[str] = (),
        line: int = 1,
        quotes: Quotes | None = None,
    ) -> None:
        """Read the header, which is the first line that is not blank.

        Args:
            source: names the file; its suffix distinguishes CSV from TSV.
            columns: the header's names, if the stream begins after it.
            line: the number of the stream's first line.
            quotes: how quotes are read; None follows the suffix.
        Raises: CorpusError if the header cannot be read or has a name twice.
        """
        csv.field_size_limit(2**31 - 1)  # the default, 131,072, is too short for long passages
        self._source, self._suffix = source, files.suffixes(source)[0]
        self._divider = DIVIDERS[self._suffix]
        self._lines = _Lines(stream, line)
        literal = self._suffix == "tsv" if quotes is None else quotes == "literal"
        self._reader = (
            csv.reader(self._lines, delimiter=self._divider, quoting=csv.QUOTE_NONE)
            if literal
            else csv.reader(self._lines, delimiter=self._divider, strict=True)
        )
        self.columns = tuple(columns)
        self.header_bytes = 0
        if not columns:
            self._read_header()

    @property
    def next_line(self) -> int:
        """The number of the line after those read so far."""
        return self._lines.next_line

    def rows(self) -> Iterator[TextRow]:
        """Yield the rows after the header, including faulty and blank rows.

        Every line after the header belongs to exactly one row.
        """
        while (row := self._next()) is not None:
            yield row

    def _read_header(self) -> None:
        while (row := self._next()) is not None:
            self.header_bytes += row.size_bytes
            if row.cells or row.fault:
                break
        else:
            return
        where = f"{self._source}, line {row.line}"
        if self._divider not in row.lines[0]:
            divider = next((mark for mark in _OTHER_DIVIDERS if mark in row.lines[0]), None)
            if divider is not None:
                raise CorpusError(f"{where}: {self._wrong_divider(divider, row.lines[0])}")
        if row.fault:
            raise CorpusError(f"{where}: {row.fault}")
        self.columns = tuple(row.cells)
        check_header(self.columns, self._source)

    def _wrong_divider(self, mark: str, header: str) -> str:
        ours = {"csv": "commas", "tsv": "tabs"}
        # Renaming the file is enough, unless it has quotes, which are literal in .tsv.
        suffix = next((name for name, divider in DIVIDERS.items() if divider == mark), None)
        do = f"name the file .{suffix}"
        if suffix is None or (suffix == "tsv" and '"' in header):
            do = as_csv(self._source, mark)
        return (
            f"wanted names of columns separated by {ours[self._suffix]}, got none of these but "
            f"{mark!r}: {do}"
        )

    def _next(self) -> TextRow | None:
        lines = self._lines
        lines.of_row = []
        first = lines.next_line
        cells: list[str] = []
        try:
            cells = next(self._reader)
        except StopIteration:
            return None
        except csv.Error as error:
            fault: str | None = self._unreadable(str(error))
            lines.give_back()
        else:
            fault = not_utf8_in(lines.of_row) or self._other_cells(cells)
        return TextRow(first, tuple(lines.of_row), cells, fault)

    def _unreadable(self, error: str) -> str:
        reason = "a quote opens here that is not closed" if "end of data" in error else error
        return (
            f"wanted a row of .{self._suffix}, it cannot be read ({reason}): quote cells that "
            "hold commas, quotes or line breaks, and double the quotes inside them"
        )

    def _other_cells(self, cells: Sequence[str]) -> str | None:
        if not cells or not self.columns or len(cells) == len(self.columns):
            return None
        way_out = (
            "quote cells that hold commas, and leave cells without a value empty"
            if self._suffix == "csv"
            else "correct the line; if a cell must contain a tab or a line break, which .tsv does "
            "not allow, write the table as .csv"
        )
        return (
            f"wanted {len(self.columns)} cells, as many as the header has columns, "
            f"got {len(cells)}: {way_out}"
        )


class _Lines:
    """Iterates over the lines of a file, counts them, and keeps those of the current row."""

    def __init__(self, stream: Stream, line: int) -> None:
        self._lines = io.TextIOWrapper(
            stream, encoding="utf-8", errors="surrogateescape", newline=""
        )
        self.next_line = line
        self.of_row: list[str] = []
        self._given_back: deque[str] = deque()
        self._characters = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._given_back.popleft() if self._given_back else next(self._lines)
        self._characters = len(line) + (self._characters if self.of_row else 0)
        self.of_row.append(line)
        self.next_line += 1
        if self._characters > LONGEST_ROW:
            raise csv.Error(f"longer than {LONGEST_ROW:,} characters, is a quote not closed?")
        return line.removeprefix("\ufeff") if self.next_line == 2 else line

    def give_back(self) -> None:
        """Put back the lines after the row's first, to be read again: they may be valid rows."""
        lines = self.of_row[1:]
        self._given_back.extendleft(reversed(lines))
        self.next_line -= len(lines)
        del self.of_row[1:]


def as_csv(source: str, mark: str) -> str:
    """Return how to convert a table with quotes and the divider `mark` to CSV in Python, for a
    message. Not with pandas: it would guess types, and read texts like "NA" as missing."""
    first = "convert it with "
    if files.suffixes(source)[1]:
        source, first = source.rpartition(".")[0], "decompress it, and convert it with "
    target = f"{source.rpartition('.')[0]}.commas.csv"
    return (
        f"{first}`csv.writer(open({target!r}, 'w', newline='', encoding='utf-8')).writerows("
        f"csv.reader(open({source!r}, newline='', encoding='utf-8-sig'), delimiter={mark!r}))`"
    )


def not_utf8_in(lines: Sequence[str]) -> str | None:
    """Return the message about the first text that is not UTF-8; None if all are. The texts were
    decoded with `surrogateescape`."""
    for line in lines:
        try:
            line.encode()
        except UnicodeEncodeError as error:
            return not_utf8(ord(line[error.start]) - 0xDC00)  # as `surrogateescape` encodes it
    return None


def check_header(names: Sequence[str], source: str) -> None:
    """Check the column names. Raises: CorpusError if a name occurs twice: one of its columns would
    be lost."""
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        raise CorpusError(
            f"{source}: wanted each column once, got {twice!r} {names.count(twice)} times: give "
            "the columns different names"
        )


class ClassLabel(int):
    """The number of a class in a Hugging Face data set, with the class's name."""

    name: str | None
    """None for a number without a class; a negative one means that the row has no label."""

    def __new__(cls, number: int, names: Sequence[str]) -> "ClassLabel":
        label = super().__new__(cls, number)
        label.name = names[number] if 0 <= number < len(names) else None
        return label


def with_classes(
    rows: Sequence[Mapping[str, Any]], classes: Mapping[str, Sequence[str]]
) -> Sequence[Mapping[str, Any]]:
    """Return the rows with class numbers, and lists of them, as `ClassLabel`; class names are
    unchanged.

    Args:
        classes: column → names of its classes.
    """
    return [_WithClasses(row, classes) for row in rows] if classes else rows


class _WithClasses(Mapping[str, Any]):
    """A row with class numbers as `ClassLabel`; a column is read when it is first used, as from
    Parquet."""

    __slots__ = ("_classes", "_row")

    def __init__(self, row: Mapping[str, Any], classes: Mapping[str, Sequence[str]]) -> None:
        self._row, self._classes = row, classes

    def __getitem__(self, name: str) -> Any:
        value, names = self._row[name], self._classes.get(name)
        return value if names is None else _as_class(value, names)

    def __contains__(self, name: object) -> bool:
        return name in self._row

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def _as_class(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_as_class(each, names) for each in value]
    if isinstance(value, str) and value not in names and _NUMBER.fullmatch(value):
        return ClassLabel(int(value), names)  # as a table of text stores numbers
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return ClassLabel(value, names) if is_number else value


def _classes_of(schema: pa.Schema) -> dict[str, list[str]]:
    """Return column → names of its classes, as the `datasets` library stores them with a schema;
    empty if there are none."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        classes = {name: _names_of(feature) for name, feature in features.items()}
    except (AttributeError, KeyError, TypeError, ValueError):  # none, or of another shape
        return {}
    return {name: names for name, names in classes.items() if names and name in schema.names}


def _names_of(feature: Any) -> list[str] | None:
    """Return the class names of a feature that is a class label, or a list of class labels
    (`Sequence`, `List`, `[…]`); None for other features."""
    if isinstance(feature, list):
        return _names_of(feature[0])
    if "feature" in feature:
        return _names_of(feature["feature"])
    return feature["names"] if feature.get("_type") == "ClassLabel" else None


def table_rows(
    data: bytes,
    source: str,
    *,
    keep: bool = False,
    header: bool = True,
    quotes: Quotes | None = None,
) -> Sequence[Any]:
    """Return the rows of a CSV, TSV, JSON or Parquet file, each with its values by column. The
    format is detected from the contents, or else from the name.

    Args:
        data: the file's contents, decompressed.
        source: the file's name.
        keep: whether to return an `Unread` in place of a row that cannot be read.
        header: whether the first line of a CSV or TSV file names its columns; otherwise they are
            `0`, `1`, ….
        quotes: how quotes are read in a CSV or TSV file; None follows its suffix.
    Raises: CorpusError naming the file if it cannot be read; for a bad row only unless `keep`.
    """
    head = data[:HEAD_BYTES]
    suffix = format_of(head, source)
    if suffix in ("jsonl", "json"):
        return json_rows(data, source, keep=keep)
    if suffix == "parquet":
        return parquet_rows(data, source)
    if suffix not in DIVIDERS:
        do = to_convert(head, source)
        if suffix == "txt":
            do = "write a .csv whose first line names its columns, such as text,label"
        raise CorpusError(
            f"{source}: wanted .csv, .tsv, .jsonl, .json or .parquet, also compressed, got "
            f".{suffix}: {do or 'convert or rename it'}, or give the format of a published set"
        )
    columns: Sequence[str] = ()
    if not header:
        # As many columns as the first row has.
        lines = TextTable(io.BytesIO(data), source, [""], quotes=quotes).rows()
        first = next((row for row in lines if row.cells), None)
        if first is None:
            return []
        columns = [str(place) for place in range(len(first.cells))]
    table = TextTable(io.BytesIO(data), source, columns, quotes=quotes)
    rows: list[Any] = []
    for row in table.rows():
        if row.fault and keep:
            rows.append(Unread(f"row {len(rows) + 1} (line {row.line:,}): {row.fault}"))
        elif row.fault:
            raise CorpusError(f"{source}, row {len(rows) + 1} (line {row.line:,}): {row.fault}")
        elif row.cells:
            rows.append(dict(zip(table.columns, row.cells, strict=True)))
    return rows


def parquet_rows(data: bytes, source: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a Parquet file. A column is read when it is first used; class numbers
    become `ClassLabel` if the file has the names of the classes.

    Raises: CorpusError naming the file if it cannot be read.
    """
    table = ParquetTable(data, source)
    check_header(table.schema.names, source)
    return with_classes(table.rows(), _classes_of(table.schema))
