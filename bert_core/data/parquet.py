"""Reads Parquet: each column when it is first used, as the plain values that other formats have.

So a column that is not used can neither make a file unreadable nor cost memory.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bert_core.data.formats import decode_utf8
from bert_core.errors import CorpusError, RaybertError

MAGIC = b"PAR1"
_SCHEMA, _NO_SCHEMA = b"ARROW:schema", b"arrow:schema"
_OUT_OF_RANGE = "<value out of range"  # what Arrow's cast makes of a date beyond the year 9999

Convert = Callable[[Any], Any]
_OF_EXTENSIONS: dict[str, Convert] = {"arrow.json": json.loads, "arrow.uuid": str}


@contextmanager
def reading_parquet(source: str) -> Iterator[None]:
    """Turn pyarrow's errors into a CorpusError naming `source`. Wrap calls of pyarrow only.

    For a damaged file it may raise almost any error: Arrow's, OSError, OverflowError, ValueError.
    """
    try:
        yield
    except (RaybertError, FileNotFoundError):
        raise
    except Exception as error:
        way_out = (
            "write it again without what is named there"
            if isinstance(error, NotImplementedError)
            else "copy or write it again"
        )
        raise CorpusError(
            f"{source}: wanted a whole Parquet file, it cannot be read "
            f"({' '.join(str(error).split())}): {way_out}"
        ) from error


def open_parquet(opened: Any, source: str) -> pq.ParquetFile:
    """Open a Parquet file, given as a seekable file or a buffer. Raises: CorpusError naming
    `source`."""
    with reading_parquet(source):
        try:
            return pq.ParquetFile(opened)
        except pa.ArrowNotImplementedError as error:
            # The file was written with Arrow types that pyarrow lacks, such as integers of 128
            # bits: without Arrow's schema a column has the type that Parquet stores.
            if (metadata := _without_arrow_schema(opened)) is None:
                raise error
            return pq.ParquetFile(opened, metadata=metadata)


def _without_arrow_schema(opened: Any) -> pq.FileMetaData | None:
    stored = pa.BufferReader(opened) if isinstance(opened, pa.Buffer) else opened
    size = stored.seek(0, io.SEEK_END)
    stored.seek(size - 8)
    length = int.from_bytes(stored.read(4), "little")
    stored.seek(max(0, size - 8 - length))
    footer = stored.read(length)
    if _SCHEMA not in footer:
        return None
    footer = footer.replace(_SCHEMA, _NO_SCHEMA)
    return pq.read_metadata(pa.BufferReader(MAGIC + footer + length.to_bytes(4, "little") + MAGIC))


class ParquetTable:
    """A Parquet file in memory."""

    def __init__(self, data: bytes, source: str) -> None:
        """Raises: CorpusError if the file cannot be opened."""
        self._source, self._columns = source, dict[str, list[Any]]()
        self._file = open_parquet(pa.py_buffer(data), source)
        self.schema: pa.Schema = self._file.schema_arrow
        self._names = frozenset(self.schema.names)
        self._length = self._file.metadata.num_rows

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows, each a mapping from column names to values."""
        return [_Row(self, place) for place in range(self._length)]

    def has(self, name: object) -> bool:
        """Whether there is a column of that name, without reading it."""
        return name in self._names

    def column(self, name: str) -> list[Any]:
        """Return the values of a column, which is read once. Raises: KeyError if there is none of
        that name; CorpusError if it cannot be read."""
        if name not in self._columns:
            if name not in self._names:
                raise KeyError(name)
            with reading_parquet(f"{self._source}, column {name!r}"):
                stored = self._file.read(columns=[name]).column(name)
                if len(stored) != self._length:
                    raise ValueError(f"it has {len(stored):,} values for {self._length:,} rows")
            self._columns[name] = plain_values(stored, f"{self._source}, column {name!r}")
        return self._columns[name]


class _Row(Mapping[str, Any]):
    """A row of a table, which reads a column when it is first used."""

    __slots__ = ("_place", "_table")

    def __init__(self, table: ParquetTable, place: int) -> None:
        self._table, self._place = table, place

    def __getitem__(self, name: str) -> Any:
        return self._table.column(name)[self._place]

    def __contains__(self, name: object) -> bool:
        return self._table.has(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.schema.names)

    def __len__(self) -> int:
        return len(self._table.schema.names)


def may_hold_text(kind: pa.DataType) -> bool:
    """Whether a column of that type may hold text, directly or within lists and objects."""
    if isinstance(kind, pa.BaseExtensionType):
        return bool(kind.extension_name == "arrow.json")
    if pa.types.is_dictionary(kind):
        return may_hold_text(kind.value_type)
    if pa.types.is_nested(kind):
        return any(may_hold_text(kind.field(place).type) for place in range(kind.num_fields))
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in is_text)


def plain_values(column: pa.Array | pa.ChunkedArray, where: str) -> list[Any]:
    """Return the values of a column as JSON has them: decimals become numbers; dates and times, ISO
    text; bytes, text; dictionary-encoded values are decoded; JSON (`arrow.json`) is parsed.

    Raises: CorpusError naming `where` if a value has no such form, or a text is not UTF-8.
    """
    _check_utf8(column, where)
    with reading_parquet(where):
        plain = _plain_type(column.type)
        values = (column if plain == column.type else column.cast(plain)).to_pylist()
        if (convert := _converter(column.type, where)) is not None:
            values = [None if value is None else convert(value) for value in values]
    return values


def _check_utf8(column: pa.Array | pa.ChunkedArray, where: str) -> None:
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for row, text in enumerate(column.cast(pa.large_binary()).to_pylist(), 1):
            if text is not None:
                decode_utf8(text, f"{where}, row {row:,}")


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type that values of a type are cast to before they are read."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_plain_type(each.type)) for each in kind.fields])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind))
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind))
    return kind


def _plain_field(kind: pa.DataType) -> pa.Field:
    return kind.value_field.with_type(_plain_type(kind.value_type))


def _converter(kind: pa.DataType, where: str) -> Convert | None:
    """Return the function that makes values of a type plain; None if they already are."""
    if pa.types.is_dictionary(kind):
        return _converter(kind.value_type, where)
    if pa.types.is_decimal(kind):
        return int if kind.scale <= 0 else float
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return lambda text: _in_range(text, kind, where)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        # Some writers do not mark text as such.
        return lambda data: decode_utf8(data, where)
    if isinstance(kind, pa.BaseExtensionType):
        return _OF_EXTENSIONS.get(kind.extension_name)
    if pa.types.is_struct(kind):
        inner = {each.name: _converter(each.type, where) for each in kind.fields}
        changed = {name: convert for name, convert in inner.items() if convert is not None}
        if not changed:
            return None
        return lambda fields: (
            fields
            | {
                name: convert(fields[name])
                for name, convert in changed.items()
                if fields[name] is not None
            }
        )
    is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(check(kind) for check in is_list):
        convert = _converter(kind.value_type, where)
        if convert is None:
            return None
        return lambda items: [None if each is None else convert(each) for each in items]
    return None


def _in_range(text: str, kind: pa.DataType, where: str) -> str:
    if text.startswith(_OUT_OF_RANGE):
        raise CorpusError(
            f"{where}: wanted a {kind} up to the year 9999, got one beyond "
            f"({text.removeprefix(_OUT_OF_RANGE).strip(': >')}): write the column as text"
        )
    return text
