"""Where documents and labelled rows come from, cut into blocks that workers read apart.

Blocks are a fixed function of the files and the config, never of the cluster, and a document lies
in one block whatever their size.
"""

import bz2
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import pyarrow as pa

from bert_core import files
from bert_core.data.formats import (
    BOUNDARIES,
    Boundary,
    Errors,
    column_of,
    decode_utf8,
    jsonl_rows,
    labelled_rows,
    text_documents,
)
from bert_core.data.wikitext import PAGE_END, article_text, dump_pages
from bert_core.errors import ConfigError, CorpusError
from pipelines import docstrings, hub
from pipelines.stage import INPUT, REMARK
from tracking.runs import DatasetInput

if TYPE_CHECKING:
    import pyarrow.parquet as pq

Format = Literal["text", "jsonl", "parquet", "wikipedia"]
DOCSTRINGS = "docstrings"
SCAN_BYTES = 1 << 16
# Longer than what stands between two documents in a text file.
LONGEST_SEPARATOR_BYTES = 1024
# How a bz2 stream begins, in whole bytes: a file of several can be cut there (Wikipedia's
# multistream dumps have a stream for every 100 pages).
BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
LONGEST_BZ2_STREAM_BYTES = 16 << 20
LONGEST_BZ2_BLOCK_BYTES = 1 << 20  # of what is in a stream; compression adds next to nothing
_FORMATS: dict[str, Format] = {
    "txt": "text",
    "md": "text",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
    "xml": "wikipedia",
}
# Bytes of text that a byte of a compressed file gives, about: for the number of shards only.
_EXPANSION = {None: 1, "gz": 3, "bz2": 4, "zst": 3}


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text to read, and what a document of it is."""

    source: str | tuple[str, ...] = field(default=DOCSTRINGS, metadata=INPUT)
    """Files, folders, globs or URIs of .txt, .md, .jsonl, .parquet or a Wikipedia dump's .xml, also
    .gz, .bz2 or .zst; `hf://datasets/<owner>/<name>` of the Hugging Face hub; or `docstrings`."""
    weights: tuple[float, ...] = ()
    """For every source how often its documents are used: 2 is twice, 0.5 is every second one."""
    licenses: tuple[str, ...] = field(default=(), metadata=REMARK)
    """For every source its licence, for the data card; a hub data set says its own."""
    document_boundary: Boundary = "blank_line"
    """In text files: a document ends at a `blank_line`, before a `heading`, or with its `file`."""
    text_column: str = "text"
    """In JSONL and Parquet: the column that holds a document."""
    errors: Errors = "fail"
    """What a document that cannot be read does: `fail` the run, or be counted and `skip`ped."""
    held_out_share: float = 0.02
    """Share of the documents kept out of training, to measure the model on."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("corpus.source: wanted a path, a URI or `docstrings`, got none")
        for name in ("weights", "licenses"):
            given = getattr(self, name)
            if given and len(given) != len(self.sources):
                raise ConfigError(
                    f"corpus.{name}: wanted one for each of the {len(self.sources)} sources, "
                    f"got {len(given)}"
                )
        if any(not 0.0 < weight <= 100.0 for weight in self.weights):
            raise ConfigError(
                f"corpus.weights: wanted numbers above 0 and up to 100, got {self.weights}: "
                "leave a source out instead of giving it no weight"
            )
        for name, kind in (("document_boundary", Boundary), ("errors", Errors)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"corpus.{name}: wanted one of {', '.join(get_args(kind))}, "
                    f"got {getattr(self, name)!r}"
                )
        if not 0.0 <= self.held_out_share < 1.0:
            raise ConfigError(
                f"corpus.held_out_share: wanted at least 0 and below 1, got {self.held_out_share}"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    def weight(self, source: int) -> float:
        """How often the documents of a source are used."""
        return self.weights[source] if self.weights else 1.0


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """A file of the corpus, from the root, and which of the sources named it first."""

    path: str
    source: int
    size_bytes: int
    split_column: str | None = None

    @property
    def format(self) -> Format:
        return _format_of(self.path)

    @property
    def compression(self) -> str | None:
        return files.suffixes(self.path)[1]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """A part of a file that holds whole documents: bytes, or row groups of Parquet."""

    file: CorpusFile
    start: int
    end: int
    text_bytes: int
    """Bytes of text in it, about where it is compressed."""


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


def corpus_files(config: CorpusConfig) -> list[CorpusFile]:
    """Every file of the corpus, sorted by path. Raises: CorpusError if a source names none."""
    found: dict[str, CorpusFile] = {}
    for number, source in enumerate(config.sources):
        for path in _paths_of(source):
            split_column = "split" if source == DOCSTRINGS else None
            if path not in found:
                found[path] = CorpusFile(
                    path=path,
                    source=number,
                    size_bytes=files.size_bytes(path),
                    split_column=split_column,
                )
            elif config.weight(found[path].source) != config.weight(number):
                raise ConfigError(
                    f"corpus.weights: {path} is in two sources with different weights, "
                    f"{config.sources[found[path].source]} and {source}: name it in one"
                )
    return [found[path] for path in sorted(found)]


def _paths_of(source: str) -> list[str]:
    if source == DOCSTRINGS:
        return [docstrings.corpus_file()]
    return [files.absolute(path) for path in hub.data_files(source) or files.find_files(source)]


def corpus_input(config: CorpusConfig) -> DatasetInput:
    """The corpus by name and digest: sha256 over the bytes of its files, whatever their paths.

    A file's weight counts with it.
    """
    digests = sorted(
        files.sha256_of(file.path) + (f" {config.weight(file.source)}" if config.weights else "")
        for file in corpus_files(config)
    )
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return DatasetInput("corpus", digest, ", ".join(config.sources))


def corpus_size_bytes(config: CorpusConfig) -> int:
    """Bytes of text in the corpus, about where it is compressed.

    Raises: CorpusError if all its files are empty, or Parquet lacks the column of the text.
    """
    found = corpus_files(config)
    size_bytes = sum(_text_bytes(file, config) * config.weight(file.source) for file in found)
    if size_bytes == 0:
        raise CorpusError(
            f"{', '.join(config.sources)}: wanted text, every file there is empty: "
            "check the path, or give another corpus"
        )
    return max(1, int(size_bytes))


def _text_bytes(file: CorpusFile, config: CorpusConfig) -> int:
    if file.format != "parquet" or not file.size_bytes:
        return file.size_bytes * _EXPANSION[file.compression]
    with _parquet(file.path) as parquet:
        _check_column(parquet, config.text_column, file.path)
        # NOTE: a struct before it is a column in the schema and several in a row group.
        leaves = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
        column = leaves.index(config.text_column)
        groups = (parquet.metadata.row_group(i) for i in range(parquet.num_row_groups))
        return sum(group.column(column).total_uncompressed_size for group in groups)


def _format_of(path: str) -> Format:
    suffix, _ = files.suffixes(path)
    if suffix not in _FORMATS:
        raise CorpusError(
            f"{path}: wanted a corpus file ending in {', '.join('.' + name for name in _FORMATS)}, "
            f"or one of these and .gz, .bz2 or .zst, got .{suffix}: rename it, or name the files "
            "that are meant by a glob"
        )
    return _FORMATS[suffix]


def plan_blocks(config: CorpusConfig, block_bytes: int) -> list[Block]:
    """Cut the corpus into blocks of about `block_bytes` of text, each of whole documents.

    Small files go together; a compressed file is never cut, but for a dump of Wikipedia in many
    bz2 streams.
    """
    blocks: list[Block] = []
    extents: list[Extent] = []
    text_bytes = 0
    for file in corpus_files(config):
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
        with _parquet(file.path) as parquet:
            for group in range(parquet.num_row_groups):
                size_bytes = parquet.metadata.row_group(group).total_byte_size
                yield Extent(file=file, start=group, end=group + 1, text_bytes=size_bytes)
        return
    expansion = _EXPANSION[file.compression]
    separator, longest = _separator(file, config), None
    cuts = [0]
    if file.format == "wikipedia" and file.compression == "bz2":
        separator, longest = BZ2_STREAM, LONGEST_BZ2_STREAM_BYTES
    elif file.compression or separator is None:  # read from its beginning, or one document
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
    """What stands between two documents; None where the whole file is one."""
    if file.format == "text":
        return BOUNDARIES.get(config.document_boundary)
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
        path = extent.file.path
        try:
            if (size_bytes := files.size_bytes(path)) != extent.file.size_bytes:
                raise CorpusError(
                    f"{path}: wanted the {extent.file.size_bytes:,} bytes that were there when the "
                    f"run began, got {size_bytes:,}: leave the corpus alone while it is read, and "
                    "run again"
                )
            read = _read_row_group if extent.file.format == "parquet" else _read
            yield from read(extent, block)
        except FileNotFoundError as error:
            raise CorpusError(
                f"{path}: was there when the run began, now there is no such file: put it back and "
                "run again, what is finished stays"
            ) from error


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
                    yield _of_row(row, offset, file, corpus)
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


def _of_row(row: dict | None, offset: int, file: CorpusFile, corpus: CorpusConfig) -> Document:
    line = f"{file.path}, the line at byte {offset:,}"
    if row is None:
        return Document("", file.source, dropped="unreadable")
    try:
        return Document(column_of(row, corpus.text_column, line), file.source)
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
        raise _damaged(file.path, ".bz2 file", error) from error
    yield extent.start, data


def _cut_stream(
    stream: BufferedReader, separator: re.Pattern[bytes] | None, part_bytes: int
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


def _parquet(path: str) -> "pq.ParquetFile":
    import pyarrow.parquet as pq

    opened = files.open_input(path)
    try:
        return pq.ParquetFile(opened)
    except pa.ArrowInvalid as error:
        raise _damaged(path, "Parquet file", error) from error


def _damaged(path: str, kind: str, error: Exception) -> CorpusError:
    return CorpusError(f"{path}: wanted a whole {kind}, it cannot be read ({error}): copy it again")


def _check_column(parquet: "pq.ParquetFile", name: str, path: str) -> None:
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


def _read_row_group(extent: Extent, block: Block) -> Iterator[Document]:
    file, corpus = extent.file, block.corpus
    split_column, source = file.split_column, file.source
    with _parquet(file.path) as parquet:
        _check_column(parquet, corpus.text_column, file.path)
        columns = [corpus.text_column, *([split_column] if split_column else [])]
        batches = parquet.iter_batches(1024, row_groups=[extent.start], columns=columns)
        while batch := _next_batch(batches, file.path):
            splits = batch.column(split_column).to_pylist() if split_column else None
            for index, text in enumerate(_texts_of(batch.column(corpus.text_column))):
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


def _texts_of(texts: pa.Array) -> list[bytes | None]:
    """The bytes of a column of text.

    NOTE: nothing but decoding them looks whether what Parquet calls a string is one.
    """
    texts = texts.dictionary_decode() if pa.types.is_dictionary(texts.type) else texts
    return texts.cast(pa.large_binary()).to_pylist()


def _next_batch(batches: Iterator[pa.RecordBatch], path: str) -> pa.RecordBatch | None:
    try:
        with files.reading(path):
            return next(batches, None)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(path, "Parquet file", error) from error


@dataclass(frozen=True, kw_only=True)
class LabelledConfig:
    """Which labelled rows to read."""

    source: str = field(default=DOCSTRINGS, metadata=INPUT)
    """A .csv, .tsv, .jsonl or .parquet file or URI; or `docstrings`: which library is it from."""
    text_column: str = "text"
    """The column that holds the text."""
    label_column: str = "label"
    """The column that holds the label."""


def labelled_file(config: LabelledConfig, split: Literal["train", "held_out"]) -> str:
    """The file that `config` means. Raises: CorpusError if there is none."""
    path = docstrings.labelled_file(split) if config.source == DOCSTRINGS else config.source
    if not files.exists(path):
        raise CorpusError(f"{path}: wanted a file of labelled rows, there is none: check the path")
    return path


def read_labelled(
    config: LabelledConfig, split: Literal["train", "held_out"]
) -> list[dict[str, str]]:
    """Rows `{"text", "label"}`, in the order of the file."""
    path = labelled_file(config, split)
    return labelled_rows(
        files.read_bytes(path),
        path,
        text_column=config.text_column,
        label_column=config.label_column,
    )


def labelled_input(
    name: str, config: LabelledConfig, split: Literal["train", "held_out"]
) -> DatasetInput:
    """A labelled set by name and sha256."""
    path = labelled_file(config, split)
    return DatasetInput(name, files.sha256_of(path), path)
