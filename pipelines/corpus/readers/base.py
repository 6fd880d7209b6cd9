"""What every reader of a format is, and how files of bytes are cut at what divides documents."""

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import pyarrow as pa

from bert_core import files
from bert_core.data.formats import column_of
from bert_core.errors import CorpusError
from pipelines.corpus.config import CorpusConfig

SCAN_BYTES = 1 << 16
# Longer than what stands between two documents in a text file.
LONGEST_SEPARATOR_BYTES = 1024
# Bytes of text that a byte of a compressed file gives, about: for the sizes of blocks and shards.
_EXPANSION = {None: 1, "gz": 3, "bz2": 4, "zst": 3}

Rows = Literal["lines", "objects", "cells", "table"]
"""As what rows are read from a format, for a model to answer: texts, JSON objects, the cells of CSV
and TSV, or an Arrow table."""


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file of the corpus, from the root, and which of the sources named it first."""

    path: str
    source: int
    size_bytes: int
    split_column: str | None = None

    @property
    def compression(self) -> str | None:
        return files.suffixes(self.path)[1]

    @property
    def expansion(self) -> int:
        """Bytes of text that a byte of the file gives, about."""
        return _EXPANSION[self.compression]


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


class Reader(ABC):
    """How files of one format are cut into extents, and the documents of an extent are read."""

    endings: ClassVar[tuple[str, ...]]
    """What the files' names end in, without the dot, and without .gz, .bz2 or .zst after it."""
    rows: ClassVar[Rows | None] = None
    """As what rows are read from it; None where a model is not asked about its documents."""

    def text_bytes(self, file: CorpusFile, config: CorpusConfig) -> int:
        """Bytes of text in a file, about where it is compressed."""
        return file.size_bytes * file.expansion

    @abstractmethod
    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        """Extents of about `block_bytes` of text, or less, each of whole documents."""

    @abstractmethod
    def read(self, extent: Extent, block: Block) -> Iterator[Document]:
        """The documents of an extent, in their order."""


class BytesReader(Reader):
    """A format whose documents are divided by bytes that a pattern finds."""

    def separator(self, config: CorpusConfig) -> re.Pattern[bytes] | None:
        """What stands between two documents; None where a file is never cut."""
        raise NotImplementedError

    def documents(
        self, data: bytes, offset: int, file: CorpusFile, config: CorpusConfig
    ) -> Iterator[Document]:
        """The documents in whole pieces of a file that begin at a byte of it."""
        raise NotImplementedError

    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        separator = self.separator(config)
        if file.compression or separator is None:  # read from its beginning, or not cut
            cuts = [0, file.size_bytes]
        else:
            cuts = cuts_of(file, block_bytes, separator)
        yield from extents_between(cuts, file)

    def read(self, extent: Extent, block: Block) -> Iterator[Document]:
        for offset, data in self.pieces(extent, block):
            yield from self.documents(data, offset, extent.file, block.corpus)

    def pieces(self, extent: Extent, block: Block) -> Iterator[tuple[int, bytes]]:
        """The bytes of an extent in pieces of whole documents, and where each begins."""
        file = extent.file
        if file.compression:
            with files.open_stream(file.path) as stream:
                yield from _cut_stream(stream, self.separator(block.corpus), block.part_bytes)
            return
        yield extent.start, bytes_of(extent)


def cuts_of(
    file: CorpusFile,
    block_bytes: int,
    separator: re.Pattern[bytes],
    longest_bytes: int | None = None,
    *,
    at_start: bool = False,
) -> list[int]:
    """Where a file is cut, its beginning and end included: `next_boundary` after every
    `block_bytes`."""
    cuts = [0]
    with files.open_input(file.path) as opened, files.reading(file.path):
        while cuts[-1] < file.size_bytes:
            wanted = cuts[-1] + max(1, block_bytes // file.expansion)
            cuts.append(
                next_boundary(
                    opened, wanted, file.size_bytes, separator, longest_bytes, at_start=at_start
                )
            )
    return cuts


def extents_between(cuts: list[int], file: CorpusFile) -> Iterator[Extent]:
    """The extents that a file is cut into."""
    for start, end in pairwise(cuts):
        yield Extent(file=file, start=start, end=end, text_bytes=(end - start) * file.expansion)


def bytes_of(extent: Extent) -> bytes:
    """The bytes of an extent, as they lie in the file."""
    path = extent.file.path
    with files.open_input(path) as opened, files.reading(path):
        opened.seek(extent.start)
        return opened.read(extent.end - extent.start)


@contextmanager
def unchanged(file: CorpusFile) -> Iterator[None]:
    """Read the file that was there when the run began.

    Raises: CorpusError if it is gone or has another size.
    """
    try:
        if (size_bytes := files.size_bytes(file.path)) != file.size_bytes:
            raise CorpusError(
                f"{file.path}: wanted the {file.size_bytes:,} bytes that were there when the run "
                f"began, got {size_bytes:,}: leave the corpus alone while it is read, and run again"
            )
        yield
    except FileNotFoundError as error:
        raise CorpusError(
            f"{file.path}: was there when the run began, now there is no such file: put it back "
            "and run again, what is finished stays"
        ) from error


def next_boundary(
    file: pa.NativeFile,
    position: int,
    size_bytes: int,
    separator: re.Pattern[bytes],
    longest_bytes: int | None = None,
    *,
    at_start: bool = False,
) -> int:
    """Where the first document begins that starts after `position`; the end if none is found.

    Args:
        longest_bytes: how far is looked; without it to the end.
        at_start: whether a document begins with the separator, instead of after it.
    """
    overlap = b""
    last = size_bytes if longest_bytes is None else min(size_bytes, position + longest_bytes)
    while position < last:
        file.seek(position)
        window = overlap + file.read(SCAN_BYTES)
        if len(window) == len(overlap):
            break  # it became shorter: who reads the block will say so
        if match := separator.search(window):
            cut = match.start() if at_start else match.end()
            return position - len(overlap) + cut
        # A separator may straddle two windows.
        position += len(window) - len(overlap)
        overlap = window[-LONGEST_SEPARATOR_BYTES:]
    return size_bytes


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


def document_of_row(
    row: dict | None, where: str, file: CorpusFile, config: CorpusConfig
) -> Document:
    """The document in a row's column of text; None is a row that cannot be read.

    Raises: CorpusError if it has no text, unless that is to be skipped.
    """
    if row is None:
        return Document("", file.source, dropped="unreadable")
    try:
        return Document(column_of(row, config.text_column, where), file.source)
    except CorpusError:
        if config.errors == "fail":
            raise
        return Document("", file.source, dropped="no_text")
