"""The corpus cut into blocks that workers read apart, and the documents in a block.

Blocks are a fixed function of the files and the config, never of the cluster, and a document lies
in one block whatever their size.
"""

import bz2
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa

from bert_core import files
from bert_core.data.formats import (
    BOUNDARIES,
    column_of,
    damaged,
    decode_utf8,
    jsonl_rows,
    text_documents,
    text_pieces,
)
from bert_core.data.tables import DIVIDERS, Stream, TextRow, TextTable
from bert_core.data.wikitext import PAGE_END, article_text, dump_pages
from bert_core.errors import CorpusError
from pipelines.corpus import parquet
from pipelines.corpus.sources import Corpus, CorpusConfig, CorpusFile, unchanged

SCAN_BYTES = 1 << 16
# Longer than what stands between two documents in a text file.
LONGEST_SEPARATOR_BYTES = 1024
# How a bz2 stream begins, in whole bytes: a file of several can be cut there (Wikipedia's
# multistream dumps have a stream for every 100 pages).
BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
LONGEST_BZ2_STREAM_BYTES = 16 << 20
LONGEST_BZ2_BLOCK_BYTES = 1 << 20  # of what is in a stream; compression adds next to nothing


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A part of a file that holds whole documents: bytes, or row groups of Parquet."""

    file: CorpusFile
    start: int
    end: int
    text_bytes: int
    """Bytes of text in it, about where it is compressed."""
    columns: tuple[str, ...] = ()
    """Of a part of a CSV or TSV file that begins behind the header: what the header says."""
    line: int = 1
    """Of the same: the number of its first line."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is read as one piece of work: a part of a large file, or several small files."""

    extents: tuple[Extent, ...]
    corpus: CorpusConfig
    part_bytes: int
    """How much is read at once where a file can only be read from its beginning."""


@dataclass(frozen=True)
class Document:
    """A document as it was read, and the number of its source.

    `split` is set where the corpus itself says it; `dropped` says why there is no text.
    """

    text: str
    source: int
    split: str | None = None
    dropped: Literal["unreadable", "no_text"] | None = None


def plan_blocks(corpus: Corpus, block_bytes: int) -> list[Block]:
    """Cut the corpus into blocks of about `block_bytes` of text, each of whole documents.

    Small files go together; a compressed file is never cut, but for a dump of Wikipedia in many
    bz2 streams.
    """
    config = corpus.config
    blocks: list[Block] = []
    extents: list[Extent] = []
    text_bytes = 0
    for file in corpus.files:
        for extent in _cut(file, config, block_bytes) if file.size_bytes else ():
            extents.append(extent)
            text_bytes += extent.text_bytes
            if text_bytes >= block_bytes:
                blocks.append(Block(extents=tuple(extents), corpus=config, part_bytes=block_bytes))
                extents, text_bytes = [], 0
    if extents:
        blocks.append(Block(extents=tuple(extents), corpus=config, part_bytes=block_bytes))
    return blocks


def _cut(file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
    if file.format == "parquet":
        with parquet.open_parquet(file.path) as opened:
            for group in range(opened.num_row_groups):
                size_bytes = opened.metadata.row_group(group).total_byte_size
                yield Extent(file=file, start=group, end=group + 1, text_bytes=size_bytes)
        return
    if file.format in DIVIDERS and not file.compression and file.size_bytes > block_bytes:
        yield from _cut_table(file, block_bytes)
        return
    expansion = file.expansion
    separator, longest = _separator(file, config), None
    cuts = [0]
    if file.format == "wikipedia" and file.compression == "bz2":
        separator, longest = BZ2_STREAM, LONGEST_BZ2_STREAM_BYTES
    elif file.compression or separator is None:  # read from its beginning, or not cut
        cuts.append(file.size_bytes)
    with files.open_input(file.path) as opened, files.reading(file.path):
        while cuts[-1] < file.size_bytes:
            wanted = cuts[-1] + max(1, block_bytes // expansion)
            assert separator is not None
            cuts.append(_next_boundary(opened, wanted, file.size_bytes, separator, longest))
        if longest and len(cuts) > 2:
            too_long = max(np.diff(cuts)) > block_bytes + longest
            if too_long or not _begins_a_page(opened, cuts[1]):
                cuts = [0, file.size_bytes]  # as `pbzip2` writes them, say, cut anywhere
    for start, end in pairwise(cuts):
        yield Extent(file=file, start=start, end=end, text_bytes=(end - start) * expansion)


def _cut_table(file: CorpusFile, block_bytes: int) -> Iterator[Extent]:
    """Parts of a CSV or TSV file. It is read to its end: line breaks may stand within quotes."""
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


def _begins_a_page(file: pa.NativeFile, position: int) -> bool:
    """Whether the bz2 stream at `position` begins with a page of Wikipedia."""
    file.seek(position)
    data = file.read(LONGEST_BZ2_BLOCK_BYTES)
    try:
        begins = bz2.BZ2Decompressor().decompress(data, max_length=100)
    except OSError:  # damaged: who reads it will say so
        return False
    return begins.lstrip().startswith((b"<page>", b"</mediawiki>"))


def _separator(file: CorpusFile, config: CorpusConfig) -> re.Pattern[bytes] | None:
    """What stands between two documents; None where none is looked for."""
    if file.format == "text":
        return BOUNDARIES.get(config.document_boundary)
    if file.format in DIVIDERS:
        return None
    return PAGE_END if file.format == "wikipedia" else re.compile(rb"\n")


def _next_boundary(
    file: pa.NativeFile,
    position: int,
    size_bytes: int,
    separator: re.Pattern[bytes],
    longest_bytes: int | None,
) -> int:
    """Where the first document begins that starts after `position`; the end if none is found.

    Args:
        longest_bytes: how far is looked; without it to the end.
    """
    overlap = b""
    last = size_bytes if longest_bytes is None else min(size_bytes, position + longest_bytes)
    while position < last:
        file.seek(position)
        window = overlap + file.read(SCAN_BYTES)
        if len(window) == len(overlap):
            break  # it became shorter: who reads the block will say so
        if match := separator.search(window):
            at = match.start() if separator is BZ2_STREAM else match.end()
            return position - len(overlap) + at
        # A separator may straddle two windows.
        position += len(window) - len(overlap)
        overlap = window[-LONGEST_SEPARATOR_BYTES:]
    return size_bytes


def read_block(block: Block) -> Iterator[Document]:
    """The documents of a block, as they are written.

    Raises: CorpusError naming file and place, also if a file is gone or was replaced.
    """
    for extent in block.extents:
        with unchanged(extent.file):
            if extent.file.format == "parquet":
                yield from _read_row_group(extent, block)
            elif extent.file.format in DIVIDERS:
                yield from _read_table(extent, block)
            else:
                yield from _read(extent, block)


def read_pieces(extent: Extent, block: Block) -> Iterator[tuple[int, bytes]]:
    """The lines of JSONL and documents of text that are not blank, and all lines of text.

    Each comes with its byte in the file. Raises: as `read_block`.
    """
    boundary, is_text = block.corpus.document_boundary, extent.file.format == "text"
    with unchanged(extent.file):
        for offset, data in _pieces(extent, block):
            if is_text and boundary != "line":
                for start, piece in text_pieces(data, boundary):
                    if piece.strip():
                        yield offset + start, piece
                continue
            for line in data.splitlines(keepends=True):
                if is_text or line.strip():
                    yield offset, line
                offset += len(line)


def read_text_rows(extent: Extent) -> Iterator[tuple[TextRow, dict[str, str]]]:
    """The rows of CSV or TSV, blank lines and those with a fault too, and what each holds by
    column: nothing of such.

    Raises: as `read_block`, and CorpusError if the file has no header.
    """
    file = extent.file
    with unchanged(file), _opened(extent) as stream:
        table = TextTable(stream, file.path, extent.columns, extent.line)
        for row in table.rows():
            sound = row.cells and not row.fault
            yield row, dict(zip(table.columns, row.cells, strict=True)) if sound else {}


def _opened(extent: Extent) -> Stream:
    """A part of a file as a stream, or the whole of one, decompressed."""
    file = extent.file
    if (extent.start, extent.end) == (0, file.size_bytes):
        return files.open_stream(file.path)
    with files.open_input(file.path) as opened, files.reading(file.path):
        opened.seek(extent.start)
        return io.BytesIO(opened.read(extent.end - extent.start))


def read_row_groups(block: Block) -> Iterator[tuple[str, pa.Table]]:
    """The row groups of a block's Parquet files, and where each stands, for a message.

    Raises: as `read_block`.
    """
    for extent in block.extents:
        path = extent.file.path
        with unchanged(extent.file), parquet.open_parquet(path) as opened:
            try:
                table = opened.read_row_group(extent.start)
            except (pa.ArrowInvalid, OSError) as error:
                raise damaged(path, "Parquet file", error) from error
            yield f"{path}, row group {extent.start}", table


def _read(extent: Extent, block: Block) -> Iterator[Document]:
    file, corpus = extent.file, block.corpus
    path, source = file.path, file.source
    for offset, data in _pieces(extent, block):
        if file.format == "text":
            for text in text_documents(data, corpus.document_boundary, path, offset, corpus.errors):
                if text is None:
                    yield Document("", source, dropped="unreadable")
                elif text.strip():  # of many blank lines, some may be a piece of their own
                    yield Document(text, source)
        elif file.format == "wikipedia":
            yield from _articles(data, offset, file, corpus)
        else:
            for line in data.splitlines(keepends=True):
                for row in jsonl_rows(line, path, offset, corpus.errors):
                    yield _of_row(row, f"{path}, the line at byte {offset:,}", file, corpus)
                offset += len(line)


def _articles(
    data: bytes, offset: int, file: CorpusFile, corpus: CorpusConfig
) -> Iterator[Document]:
    start = 0
    ends = [match.end() for match in PAGE_END.finditer(data)]
    for end in [*ends, len(data)]:
        page = data[start:end]
        try:
            if (b"<page>" in page) != (b"</page>" in page):
                raise CorpusError(
                    f"{file.path}: wanted whole pages, what is at byte {offset + start:,} "
                    "begins or ends within one: download the dump again, or decompress it"
                )
            articles = list(dump_pages(page, file.path, offset + start))
        except CorpusError:
            if corpus.errors == "fail":
                raise
            yield Document("", file.source, dropped="unreadable")
        else:
            yield from (Document(article_text(*article), file.source) for article in articles)
        start = end


def _read_table(extent: Extent, block: Block) -> Iterator[Document]:
    file, corpus = extent.file, block.corpus
    for row, columns in read_text_rows(extent):
        where = f"{file.path}, line {row.line:,}"
        if row.fault and corpus.errors == "fail":
            raise CorpusError(f"{where}: {row.fault}")
        if columns or row.fault:
            yield _of_row(columns or None, where, file, corpus)


def _of_row(row: dict | None, where: str, file: CorpusFile, corpus: CorpusConfig) -> Document:
    if row is None:
        return Document("", file.source, dropped="unreadable")
    try:
        return Document(column_of(row, corpus.text_column, where), file.source)
    except CorpusError:
        if corpus.errors == "fail":
            raise
        return Document("", file.source, dropped="no_text")


def _pieces(extent: Extent, block: Block) -> Iterator[tuple[int, bytes]]:
    """The bytes of an extent in pieces of whole documents, and where each begins."""
    file = extent.file
    if file.compression and (extent.start, extent.end) == (0, file.size_bytes):
        with files.open_stream(file.path) as stream:
            yield from _cut_stream(stream, _separator(file, block.corpus), block.part_bytes)
        return
    with files.open_input(file.path) as opened, files.reading(file.path):
        opened.seek(extent.start)
        data = opened.read(extent.end - extent.start)
    try:
        data = bz2.decompress(data) if file.compression else data
    except (OSError, ValueError) as error:  # damaged, broken off
        raise damaged(file.path, ".bz2 file", error) from error
    yield extent.start, data


def _cut_stream(
    stream: io.BufferedReader, separator: re.Pattern[bytes] | None, part_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """A stream in pieces of about `part_bytes`, each of whole documents."""
    offset, kept = 0, b""
    while chunk := stream.read(part_bytes):
        searched = max(0, len(kept) - LONGEST_SEPARATOR_BYTES)
        kept += chunk
        end = 0
        for match in separator.finditer(kept, searched) if separator else ():
            end = match.end()
        if end:
            yield offset, kept[:end]
            offset, kept = offset + end, kept[end:]
    if kept:
        yield offset, kept


def _read_row_group(extent: Extent, block: Block) -> Iterator[Document]:
    file, corpus = extent.file, block.corpus
    split_column, source = file.split_column, file.source
    with parquet.open_parquet(file.path) as opened:
        parquet.check_text_column(opened, corpus.text_column, file.path)
        columns = [corpus.text_column, *([split_column] if split_column else [])]
        batches = opened.iter_batches(1024, row_groups=[extent.start], columns=columns)
        while batch := parquet.next_batch(batches, file.path):
            splits = batch.column(split_column).to_pylist() if split_column else None
            for index, text in enumerate(parquet.texts_of(batch.column(corpus.text_column))):
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
