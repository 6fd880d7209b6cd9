"""CSV and TSV with a header: a document per row, in the column `corpus.text_column`."""

import io
from collections.abc import Iterator
from itertools import pairwise

from bert_core import files
from bert_core.data.tables import Stream, TextRow, TextTable
from bert_core.errors import CorpusError
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import (
    Block,
    CorpusFile,
    Document,
    Extent,
    Reader,
    bytes_of,
    document_of_row,
    unchanged,
)


class DelimitedReader(Reader):
    """Rows of cells. Quotes may contain line ends, so cutting a file means reading all of it."""

    rows = "cells"

    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        if file.compression or file.size_bytes <= block_bytes:
            size_bytes = self.text_bytes(file, config)
            yield Extent(file=file, start=0, end=file.size_bytes, text_bytes=size_bytes)
        else:
            yield from _cut(file, block_bytes)

    def read(self, extent: Extent, block: Block) -> Iterator[Document]:
        file, corpus = extent.file, block.corpus
        for row, columns in _rows(extent):
            where = f"{file.path}, line {row.line:,}"
            if row.fault and corpus.errors == "fail":
                raise CorpusError(f"{where}: {row.fault}")
            if columns or row.fault:
                yield document_of_row(columns or None, where, file, corpus)


class CsvReader(DelimitedReader):
    """Cells between commas."""

    endings = ("csv",)


class TsvReader(DelimitedReader):
    """Cells between tabs."""

    endings = ("tsv",)


def _cut(file: CorpusFile, block_bytes: int) -> Iterator[Extent]:
    with files.open_stream(file.path) as stream:
        table = TextTable(stream, file.path)
        cuts, lines = [table.header_bytes], [table.next_line]
        end = cuts[0]
        for row in table.rows():
            end += row.size_bytes
            if end - cuts[-1] >= block_bytes:
                cuts.append(end)
                lines.append(table.next_line)
    if end > cuts[-1]:
        cuts.append(end)
    for (start, end), line in zip(pairwise(cuts), lines, strict=False):
        size_bytes = end - start
        yield Extent(
            file=file, start=start, end=end, text_bytes=size_bytes, columns=table.columns, line=line
        )


def read_cells(extent: Extent) -> Iterator[tuple[TextRow, dict[str, str]]]:
    """Yield the rows of CSV or TSV, each with its cells by column. Blank lines and faulty rows are
    included, without cells.

    Raises: CorpusError naming file and place, also if the file has no header, is missing or was
        replaced.
    """
    with unchanged(extent.file):
        yield from _rows(extent)


def _rows(extent: Extent) -> Iterator[tuple[TextRow, dict[str, str]]]:
    with _opened(extent) as stream:
        table = TextTable(stream, extent.file.path, extent.columns, extent.line)
        for row in table.rows():
            sound = row.cells and not row.fault
            yield row, dict(zip(table.columns, row.cells, strict=True)) if sound else {}


def _opened(extent: Extent) -> Stream:
    """Open a part of a file, or a whole decompressed file, as a stream."""
    if (extent.start, extent.end) == (0, extent.file.size_bytes):
        return files.open_stream(extent.file.path)
    return io.BytesIO(bytes_of(extent))
