"""Columns of text in Parquet files: opened, checked and read, with errors that name the file."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from bert_core import files
from bert_core.data.formats import damaged
from bert_core.errors import CorpusError

if TYPE_CHECKING:
    import pyarrow.parquet as pq


def open_parquet(path: str) -> "pq.ParquetFile":
    """Raises: CorpusError naming `path` if it is no whole Parquet file."""
    import pyarrow.parquet as pq

    opened = files.open_input(path)
    try:
        return pq.ParquetFile(opened)
    except pa.ArrowInvalid as error:
        raise damaged(path, "Parquet file", error) from error


def check_text_column(parquet: "pq.ParquetFile", name: str, path: str) -> None:
    """Raises: CorpusError listing the columns there are if `name` is none, or holds no text."""
    schema = parquet.schema_arrow
    if name not in schema.names:
        raise CorpusError(
            f"{path}: wanted a column {name!r}, there are: {', '.join(schema.names)}: "
            "set corpus.text_column"
        )
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise CorpusError(
            f"{path}: wanted text in the column {name!r}, it is {kind}; there are: "
            f"{', '.join(schema.names)}: set corpus.text_column"
        )


def text_bytes(path: str, column: str) -> int:
    """Bytes of the text in a column, before compression. Raises: as `check_text_column`."""
    with open_parquet(path) as parquet:
        check_text_column(parquet, column, path)
        # NOTE: a struct before it is a column in the schema and several in a row group.
        leaves = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
        number = leaves.index(column)
        groups = (parquet.metadata.row_group(i) for i in range(parquet.num_row_groups))
        return sum(group.column(number).total_uncompressed_size for group in groups)


def texts_of(texts: pa.Array) -> list[bytes | None]:
    """The bytes of a column of text.

    NOTE: nothing but decoding them looks whether what Parquet calls a string is one.
    """
    texts = texts.dictionary_decode() if pa.types.is_dictionary(texts.type) else texts
    return texts.cast(pa.large_binary()).to_pylist()


def next_batch(batches: Iterator[pa.RecordBatch], path: str) -> pa.RecordBatch | None:
    """The next rows; None at the end. Raises: CorpusError naming `path` if it is damaged."""
    try:
        with files.reading(path):
            return next(batches, None)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(path, "Parquet file", error) from error
