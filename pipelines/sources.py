"""Where documents and labelled rows come from, cut into blocks that workers read apart.

Blocks are a fixed function of the files and the config, never of the cluster, and a document lies
in one block whatever their size.
"""

import bz2
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
class Block:
    """A part of one file that holds whole documents: bytes, or row groups of Parquet."""

    file: CorpusFile
    start: int
    end: int
    corpus: CorpusConfig
    part_bytes: int
    """How much is read at once where the file can only be read from its beginning."""


@dataclass(frozen=True)
class Document:
    """A document as it was read.

    `split` is set where the corpus itself says it; `dropped` says why there is no text.
    """

    text: str
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
    """Cut the corpus into blocks of about `block_bytes`, each of whole documents.

    A compressed file is one block, but for a dump of Wikipedia in many bz2 streams.
    """
    blocks: list[Block] = []
    for file in corpus_files(config):
        whole = Block(
            file=file, start=0, end=file.size_bytes, corpus=config, part_bytes=block_bytes
        )
        blocks.extend(_cut(whole, block_bytes) if whole.end else [])
    return blocks


def _cut(whole: Block, block_bytes: int) -> Iterator[Block]:
    file = whole.file
    if file.format == "parquet":
        with _parquet(file.path) as parquet:
            groups = parquet.num_row_groups
        yield from (replace(whole, start=group, end=group + 1) for group in range(groups))
        return
    separator, longest = _separator(file, whole.corpus), None
    if file.format == "wikipedia" and file.compression == "bz2":
        separator, longest = BZ2_STREAM, LONGEST_BZ2_STREAM_BYTES
    elif file.compression or separator is None:
        yield whole  # read from its beginning, or one document
        return
    cuts = [0]
    with files.open_input(file.path) as opened, files.reading(file.path):
        while cuts[-1] < whole.end:
            cuts.append(
                _next_boundary(opened, cuts[-1] + block_bytes, whole.end, separator, longest)
            )
        if longest and (
            max(np.diff(cuts)) > block_bytes + longest or not _begins_a_page(opened, cuts[1])
        ):
            cuts = [0, whole.end]  # streams, if there are several, that were cut anywhere
    yield from (replace(whole, start=start, end=end) for start, end in pairwise(cuts))


def _begins_a_page(file: pa.NativeFile, position: int) -> bool:
    """Whether a bz2 stream, if there is one at `position`, begins with a page of Wikipedia."""
    file.seek(position)
    data = file.read(LONGEST_BZ2_BLOCK_BYTES)
    begins = bz2.BZ2Decompressor().decompress(data, max_length=100) if data else b"</mediawiki>"
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

    Raises: CorpusError naming file and place, also if the file is gone or was replaced.
    """
    path = block.file.path
    try:
        if (size_bytes := files.size_bytes(path)) != block.file.size_bytes:
            raise CorpusError(
                f"{path}: wanted the {block.file.size_bytes:,} bytes that were there when the run "
                f"began, got {size_bytes:,}: leave the corpus alone while it is read, and run again"
            )
        yield from _read_row_group(block) if block.file.format == "parquet" else _read(block)
    except FileNotFoundError as error:
        raise CorpusError(
            f"{path}: was there when the run began, now there is no such file: put it back and run "
            "again, what is finished stays"
        ) from error


def _read(block: Block) -> Iterator[Document]:
    path, corpus = block.file.path, block.corpus
    for offset, data in _pieces(block):
        if block.file.format == "text":
            for text in text_documents(data, corpus.document_boundary, path, offset, corpus.errors):
                if text is None:
                    yield Document("", dropped="unreadable")
                elif not text.isspace():  # of many blank lines, some may be a piece of their own
                    yield Document(text)
        elif block.file.format == "wikipedia":
            yield from _articles(data, offset, block)
        else:
            for row in jsonl_rows(data, path, offset, corpus.errors):
                yield _of_row(row, block)


def _articles(data: bytes, offset: int, block: Block) -> Iterator[Document]:
    start = 0
    ends = [match.end() for match in PAGE_END.finditer(data)]
    for end in [*ends, len(data)]:
        page = data[start:end]
        try:
            if (b"<page>" in page) != (b"</page>" in page):
                raise CorpusError(
                    f"{block.file.path}: wanted whole pages, what is at byte {offset + start:,} "
                    "begins or ends within one: download the dump again, or decompress it"
                )
            articles = list(dump_pages(page, block.file.path, offset + start))
        except CorpusError:
            if block.corpus.errors == "fail":
                raise
            yield Document("", dropped="unreadable")
        else:
            yield from (Document(article_text(*article)) for article in articles)
        start = end


def _of_row(row: dict | None, block: Block) -> Document:
    if row is None:
        return Document("", dropped="unreadable")
    try:
        return Document(column_of(row, block.corpus.text_column, block.file.path))
    except CorpusError:
        if block.corpus.errors == "fail":
            raise
        return Document("", dropped="no_text")


def _pieces(block: Block) -> Iterator[tuple[int, bytes]]:
    """The bytes of a block in pieces of whole documents, and where each begins."""
    file = block.file
    if file.compression and (block.start, block.end) == (0, file.size_bytes):
        with files.open_stream(file.path) as stream:
            yield from _cut_stream(stream, _separator(file, block.corpus), block.part_bytes)
        return
    with files.open_input(file.path) as opened, files.reading(file.path):
        opened.seek(block.start)
        data = opened.read(block.end - block.start)
    try:
        data = bz2.decompress(data) if file.compression else data
    except (OSError, ValueError) as error:  # damaged, broken off
        raise _damaged(file.path, ".bz2 file", error) from error
    yield block.start, data


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
    return CorpusError(
        f"{path}: wanted a whole {kind}, it cannot be read ({error}): copy it again"
    )


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


def _read_row_group(block: Block) -> Iterator[Document]:
    split_column, corpus = block.file.split_column, block.corpus
    with _parquet(block.file.path) as parquet:
        _check_column(parquet, corpus.text_column, block.file.path)
        columns = [corpus.text_column, *([split_column] if split_column else [])]
        batches = parquet.iter_batches(1024, row_groups=[block.start], columns=columns)
        while batch := _next_batch(batches, block.file.path):
            splits = batch.column(split_column).to_pylist() if split_column else None
            for index, document in enumerate(_of_column(batch.column(corpus.text_column), block)):
                yield replace(document, split=splits[index]) if splits else document


def _of_column(texts: pa.Array, block: Block) -> Iterator[Document]:
    texts = texts.dictionary_decode() if pa.types.is_dictionary(texts.type) else texts
    # NOTE: nothing but this looks whether what Parquet calls a string is one.
    for data in texts.cast(pa.large_binary()).to_pylist():
        try:
            if data is None:
                yield Document("", dropped="no_text")
            else:
                yield Document(decode_utf8(data, f"{block.file.path}, row group {block.start}"))
        except CorpusError:
            if block.corpus.errors == "fail":
                raise
            yield Document("", dropped="unreadable")


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
