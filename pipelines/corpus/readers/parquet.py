"""Parquet: a document per row, in the column `corpus.text_column`; errors name the file."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from bert_core import files
from bert_core.data import parquet
from bert_core.data.formats import decode_utf8
from bert_core.data.parquet import plain_values, reading_parquet
from bert_core.errors import CorpusError
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import Block, CorpusFile, Document, Extent, Reader, unchanged


class ParquetReader(Reader):
    """Row groups of a table; a row group is never cut."""

    endings = ("parquet",)
    rows = "table"

    def text_bytes(self, file: CorpusFile, config: CorpusConfig) -> int:
        return text_bytes(file.path, config.text_column) if file.size_bytes else 0

    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        with open_parquet(file.path) as opened:
            for group in range(opened.num_row_groups):
                size_bytes = opened.metadata.row_group(group).total_byte_size
                yield Extent(file=file, start=group, end=group + 1, text_bytes=size_bytes)

    def read(self, extent: Extent, block: Block) -> Iterator[Document]:
        file, corpus = extent.file, block.corpus
        split_column, source = file.split_column, file.source
        with open_parquet(file.path) as opened:
            check_text_column(opened, corpus.text_column, file.path)
            columns = [corpus.text_column, *([split_column] if split_column else [])]
            with reading_parquet(file.path):
                batches = opened.iter_batches(1024, row_groups=[extent.start], columns=columns)
            while batch := next_batch(batches, file.path):
                splits = batch.column(split_column).to_pylist() if split_column else None
                for index, text in enumerate(texts_of(batch.column(corpus.text_column), file.path)):
                    split = splits[index] if splits else None
                    if text is None:
                        yield Document("", source, split, dropped="no_text")
                        continue
                    try:
                        where = f"{file.path}, row group {extent.start}"
                        yield Document(decode_utf8(text, where), source, split)
                    except CorpusError:
                        if corpus.errors == "fail":
                            raise
                        yield Document("", source, split, dropped="unreadable")


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a Parquet file. Raises: CorpusError naming `path` if it is not complete."""
    return parquet.open_parquet(files.open_input(path), path)


def check_text_column(opened: pq.ParquetFile, name: str, path: str) -> None:
    """Raise CorpusError listing the columns if none is called `name`, or if it does not hold
    text."""
    schema = opened.schema_arrow
    if name not in schema.names:
        raise CorpusError(
            f"{path}: wanted a column {name!r}, there are: {', '.join(schema.names)}: "
            "set corpus.text_column"
        )
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not is_json(kind) and not any(
        is_text(kind)
        for is_text in (
            *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
            *(pa.types.is_binary, pa.types.is_large_binary),  # some writers do not mark text
        )
    ):
        raise CorpusError(
            f"{path}: wanted text in the column {name!r}, it is {kind}; there are: "
            f"{', '.join(schema.names)}: set corpus.text_column"
        )


def text_bytes(path: str, column: str) -> int:
    """Return the bytes of the text in a column, before compression. Raises: as
    `check_text_column`."""
    with open_parquet(path) as opened:
        check_text_column(opened, column, path)
        # NOTE: a struct before it is one column in the schema but several in a row group.
        leaves = [opened.schema.column(i).path for i in range(len(opened.schema))]
        number = leaves.index(column)
        groups = (opened.metadata.row_group(i) for i in range(opened.num_row_groups))
        return sum(group.column(number).total_uncompressed_size for group in groups)


def is_json(kind: pa.DataType) -> bool:
    """Whether the texts of a column are JSON, as `datasets` stores values of any type."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def texts_of(texts: pa.Array, path: str) -> list[bytes | None]:
    """Return the bytes of each text in a column; None for JSON that is not text.

    NOTE: only decoding them checks that what Parquet calls a string is valid UTF-8.
    """
    texts = texts.dictionary_decode() if pa.types.is_dictionary(texts.type) else texts
    if is_json(texts.type):
        values = plain_values(texts, path)
        return [value.encode() if isinstance(value, str) else None for value in values]
    return texts.cast(pa.large_binary()).to_pylist()


def next_batch(batches: Iterator[pa.RecordBatch], path: str) -> pa.RecordBatch | None:
    """Return the next rows; None at the end. Raises: CorpusError naming `path` if it is damaged."""
    with reading_parquet(path), files.reading(path):
        return next(batches, None)


def read_row_groups(block: Block) -> Iterator[tuple[str, pa.Table]]:
    """Yield the row groups of a block's Parquet files, each with its place for messages.

    Raises: CorpusError naming file and place, also if a file is missing or was replaced.
    """
    for extent in block.extents:
        path = extent.file.path
        with unchanged(extent.file), open_parquet(path) as opened:
            with reading_parquet(path):
                table = _without_views(opened.read_row_group(extent.start))
            yield f"{path}, row group {extent.start}", table


def _without_views(table: pa.Table) -> pa.Table:
    """Return the table with text views, as Polars writes them, converted to strings: Arrow can
    neither take nor filter views."""
    fields = [
        each.with_type(pa.string()) if pa.types.is_string_view(each.type) else each
        for each in table.schema
    ]
    return table.cast(pa.schema(fields, table.schema.metadata))
