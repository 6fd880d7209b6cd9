"""The base classes of readers, and how files of bytes are cut between documents."""

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
from bert_core.compression import COMPRESSIONS
from bert_core.data.contents import HEAD_BYTES, format_of, is_dump
from bert_core.data.formats import column_of
from bert_core.errors import CorpusError
from pipelines.corpus.config import CorpusConfig

SCAN_BYTES = 1 << 16
# Longer than any separator between two documents in a text file.
LONGEST_SEPARATOR_BYTES = 1024

Rows = Literal["lines", "objects", "cells", "table"]
"""The form in which rows to answer are read from a format: lines of text, JSON objects, cells of
CSV and TSV, or an Arrow table."""


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file of the corpus, by its absolute path, and the number of the first source to name it."""

    path: str
    source: int
    size_bytes: int
    format: str
    """Format of its contents, or else of its name: an ending of a reader, such as `jsonl`."""
    compression: str | None
    split_column: str | None = None

    @classmethod
    def at(cls, path: str, source: int, split_column: str | None = None) -> "CorpusFile":
        """Describe the file as it is now. Raises: CorpusError if its compressed data is damaged."""
        size_bytes = files.size_bytes(path)
        head, compression = b"", None
        if size_bytes:
            head, compression = files.look_into(path, HEAD_BYTES)
        kind = format_of(head, path)
        if kind == "xml" and head and not is_dump(head):
            raise CorpusError(
                f"{path}: wanted a Wikipedia dump, got other XML: write its texts as .txt or .jsonl"
            )
        if kind == "parquet" and compression:
            raise CorpusError(
                f"{path}: wanted Parquet that is not compressed once more, got it as "
                f".{compression}: decompress it"
            )
        return cls(
            path=path,
            source=source,
            size_bytes=size_bytes,
            format=kind,
            compression=compression,
            split_column=split_column,
        )

    @property
    def expansion(self) -> int:
        """Return the approximate bytes of text per byte of the file."""
        return COMPRESSIONS[self.compression].expansion if self.compression else 1


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A part of a file that holds whole documents: bytes, or row groups of Parquet."""

    file: CorpusFile
    start: int
    end: int
    text_bytes: int
    """Bytes of text in it; approximate if it is compressed."""
    columns: tuple[str, ...] = ()
    """For a part of a CSV or TSV file that begins after the header: the header's columns."""
    line: int = 1
    """For such a part: the number of its first line."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The unit of reading: a part of a large file, or several small files."""

    extents: tuple[Extent, ...]
    corpus: CorpusConfig
    part_bytes: int
    """How much to read at a time from a file that can only be read from its beginning."""


@dataclass(frozen=True)
class Document:
    """A document as it was read, and the number of its source.

    `split` is set if the corpus itself assigns it; `dropped` says why there is no text.
    """

    text: str
    source: int
    split: str | None = None
    dropped: Literal["unreadable", "no_text"] | None = None


class Reader(ABC):
    """Cuts files of one format into extents, and reads the documents of an extent."""

    endings: ClassVar[tuple[str, ...]]
    """Suffixes of file names, without the dot and without a following .gz, .bz2, .zst or .xz."""
    rows: ClassVar[Rows | None] = None
    """The form in which rows are read from it; None if models do not answer its documents."""

    def text_bytes(self, file: CorpusFile, config: CorpusConfig) -> int:
        """Return the bytes of text in a file; approximate if it is compressed."""
        return file.size_bytes * file.expansion

    @abstractmethod
    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        """Yield extents of up to about `block_bytes` of text, each of whole documents."""

    @abstractmethod
    def read(self, extent: Extent, block: Block) -> Iterator[Document]:
        """Yield the documents of an extent, in order."""


class BytesReader(Reader):
    """A format whose documents are separated by bytes that match a pattern."""

    def separator(self, config: CorpusConfig) -> re.Pattern[bytes] | None:
        """Return the pattern that separates documents; None if a file is never cut."""
        raise NotImplementedError

    def documents(
        self, data: bytes, offset: int, file: CorpusFile, config: CorpusConfig
    ) -> Iterator[Document]:
        """Yield the documents in `data`: whole pieces of the file, beginning at byte `offset`."""
        raise NotImplementedError

    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        separator = self.separator(config)
        if file.compression or separator is None:  # read from its beginning, or never cut
            cuts = [0, file.size_bytes]
        else:
            cuts = cuts_of(file, block_bytes, separator)
        yield from extents_between(cuts, file)

    def read(self, extent: Extent, block: Block) -> Iterator[Document]:
        for offset, data in self.pieces(extent, block):
            yield from self.documents(data, offset, extent.file, block.corpus)

    def pieces(self, extent: Extent, block: Block) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes of an extent in pieces of whole documents, each with its byte offset."""
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
    """Return the offsets at which a file is cut, including its beginning and end: `next_boundary`
    after every `block_bytes`."""
    cuts = [0]
    with files.open_input(file.path) as opened, files.reading(file.path):
        while cuts[-1] < file.size_bytes:
            target = cuts[-1] + max(1, block_bytes // file.expansion)
            cuts.append(
                next_boundary(
                    opened, target, file.size_bytes, separator, longest_bytes, at_start=at_start
                )
            )
    return cuts


def extents_between(cuts: list[int], file: CorpusFile) -> Iterator[Extent]:
    """Yield the extents between these offsets of a file."""
    for start, end in pairwise(cuts):
        yield Extent(file=file, start=start, end=end, text_bytes=(end - start) * file.expansion)


def bytes_of(extent: Extent) -> bytes:
    """Return the bytes of an extent, as stored in the file."""
    path = extent.file.path
    with files.open_input(path) as opened, files.reading(path):
        opened.seek(extent.start)
        return opened.read(extent.end - extent.start)


@contextmanager
def unchanged(file: CorpusFile) -> Iterator[None]:
    """Check that a file is still the one that existed when the run began.

    Raises: CorpusError if it is missing or its size has changed.
    """
    try:
        if (size_bytes := files.size_bytes(file.path)) != file.size_bytes:
            raise CorpusError(
                f"{file.path}: wanted the {file.size_bytes:,} bytes that were there when the run "
                f"began, got {size_bytes:,}: do not change the corpus while it is read, run again"
            )
        yield
    except FileNotFoundError as error:
        raise CorpusError(
            f"{file.path}: wanted the file that existed when the run began, it is missing: put it "
            "back and run again, finished work is kept"
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
    """Return the offset of the first document that starts after `position`; the end of the file if
    none does.

    Args:
        longest_bytes: how far to search; None searches to the end.
        at_start: whether a document begins with the separator rather than after it.
    """
    overlap = b""
    last = size_bytes if longest_bytes is None else min(size_bytes, position + longest_bytes)
    while position < last:
        file.seek(position)
        window = overlap + file.read(SCAN_BYTES)
        if len(window) == len(overlap):
            break  # the file has become shorter: reading the block will report it
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
    """Yield a stream in pieces of about `part_bytes`, each made of whole documents."""
    offset, pending = 0, b""
    while chunk := stream.read(part_bytes):
        searched = max(0, len(pending) - LONGEST_SEPARATOR_BYTES)
        pending += chunk
        end = 0
        for match in separator.finditer(pending, searched) if separator else ():
            end = match.end()
        if end:
            yield offset, pending[:end]
            offset, pending = offset + end, pending[end:]
    if pending:
        yield offset, pending


def document_of_row(
    row: dict | None, where: str, file: CorpusFile, config: CorpusConfig
) -> Document:
    """Return the document in a row's text column; a row of None could not be read.

    Raises: CorpusError if it has no text, unless `config` says to skip such rows.
    """
    if row is None:
        return Document("", file.source, dropped="unreadable")
    try:
        return Document(column_of(row, config.text_column, where), file.source)
    except CorpusError:
        if config.errors == "fail":
            raise
        return Document("", file.source, dropped="no_text")
