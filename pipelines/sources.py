"""Where documents and labelled rows come from, cut into blocks that workers read apart.

Blocks are a fixed function of the files and the config, never of the cluster, and a document lies
in one block whatever their size.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from bert_core import files
from bert_core.data.formats import (
    BOUNDARIES,
    Boundary,
    column_of,
    jsonl_rows,
    labelled_rows,
    text_documents,
)
from bert_core.errors import ConfigError, CorpusError
from pipelines import docstrings
from pipelines.stage import INPUT
from tracking.runs import DatasetInput

Format = Literal["text", "jsonl", "parquet"]
DOCSTRINGS = "docstrings"
SCAN_BYTES = 1 << 16
_FORMATS: dict[str, Format] = {
    "txt": "text",
    "md": "text",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "parquet": "parquet",
}


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text to read, and what a document of it is."""

    source: str | tuple[str, ...] = field(default=DOCSTRINGS, metadata=INPUT)
    """Files, folders, globs or URIs of .txt, .md, .jsonl and .parquet; or `docstrings`."""
    document_boundary: Boundary = "blank_line"
    """In text files: a document ends at a `blank_line`, before a `heading`, or with its `file`."""
    text_column: str = "text"
    """In JSONL and Parquet: the column that holds a document."""
    held_out_share: float = 0.02
    """Share of the documents kept out of training, to measure the model on."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("corpus.source: wanted a path, a URI or `docstrings`, got none")
        if self.document_boundary not in get_args(Boundary):
            raise ConfigError(
                f"corpus.document_boundary: wanted one of {', '.join(get_args(Boundary))}, "
                f"got {self.document_boundary!r}"
            )
        if not 0.0 <= self.held_out_share < 1.0:
            raise ConfigError(
                f"corpus.held_out_share: wanted at least 0 and below 1, got {self.held_out_share}"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of one file that holds whole documents: bytes, or row groups of Parquet."""

    path: str
    format: Format
    start: int
    end: int
    document_boundary: Boundary
    text_column: str
    split_column: str | None = None


@dataclass(frozen=True)
class Document:
    """A document as it was read; `split` is set where the corpus itself says it."""

    text: str
    split: str | None = None


def corpus_files(config: CorpusConfig) -> list[str]:
    """Every file of the corpus, sorted. Raises: CorpusError if a source names none."""
    return [path for path, _ in _located(config)]


def _located(config: CorpusConfig) -> list[tuple[str, str | None]]:
    """Every file, from the root, with the column that names a document's split if it has one."""
    found: dict[str, str | None] = {}
    for source in config.sources:
        if source == DOCSTRINGS:
            found[docstrings.corpus_file()] = "split"
        else:
            found.update((files.absolute(path), None) for path in files.find_files(source))
    return sorted(found.items())


def corpus_input(config: CorpusConfig) -> DatasetInput:
    """The corpus by name and digest: sha256 over the bytes of its files, whatever their paths."""
    digests = sorted(files.sha256_of(path) for path in corpus_files(config))
    digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return DatasetInput("corpus", digest, ", ".join(config.sources))


def corpus_size_bytes(config: CorpusConfig) -> int:
    """Bytes of the corpus's files. Raises: CorpusError if they are all empty."""
    size_bytes = sum(files.size_bytes(path) for path in corpus_files(config))
    if size_bytes == 0:
        raise CorpusError(
            f"{', '.join(config.sources)}: wanted text, every file there is empty: "
            "check the path, or give another corpus"
        )
    return size_bytes


def plan_blocks(config: CorpusConfig, block_bytes: int) -> list[Block]:
    """Cut the corpus into blocks of about `block_bytes`, each of whole documents."""
    blocks: list[Block] = []
    for path, split_column in _located(config):
        whole = Block(
            path=path,
            format=_format_of(path),
            start=0,
            end=files.size_bytes(path),
            document_boundary=config.document_boundary,
            text_column=config.text_column,
            split_column=split_column,
        )
        blocks.extend(_cut(whole, block_bytes) if whole.end else [])
    return blocks


def _format_of(path: str) -> Format:
    suffix = path.rsplit(".", 1)[-1].lower()
    if suffix not in _FORMATS:
        raise CorpusError(
            f"{path}: wanted a corpus file ending in {', '.join('.' + name for name in _FORMATS)}, "
            f"got .{suffix}: rename it, or name the files that are meant by a glob"
        )
    return _FORMATS[suffix]


def _cut(whole: Block, block_bytes: int) -> Iterator[Block]:
    if whole.format == "parquet":
        import pyarrow.parquet as pq

        with files.open_input(whole.path) as file:
            groups = pq.ParquetFile(file).num_row_groups
        yield from (replace(whole, start=group, end=group + 1) for group in range(groups))
        return
    separator = BOUNDARIES.get(whole.document_boundary) if whole.format == "text" else None
    if whole.format == "text" and separator is None:
        yield whole  # a file is one document
        return
    start = 0
    with files.open_input(whole.path) as file:
        while start < whole.end:
            end = _next_boundary(file, start + block_bytes, whole.end, separator)
            yield replace(whole, start=start, end=end)
            start = end


def _next_boundary(file, position: int, size_bytes: int, separator) -> int:  # type: ignore[no-untyped-def]
    """Where the first document begins that starts after `position`; a line, without a separator."""
    overlap = b""
    while position < size_bytes:
        file.seek(position)
        window = overlap + file.read(SCAN_BYTES)
        if separator is None:
            at = window.find(b"\n") + 1
        else:
            match = separator.search(window)
            at = match.end() if match else 0
        if at:
            return position - len(overlap) + at
        # A separator may straddle two windows; no document boundary is longer than this.
        position += len(window) - len(overlap)
        overlap = window[-1024:]
    return size_bytes


def read_block(block: Block) -> Iterator[Document]:
    """The documents of a block, as they are written. Raises: CorpusError naming file and place."""
    if block.format == "parquet":
        yield from _read_row_group(block)
        return
    with files.open_input(block.path) as file:
        file.seek(block.start)
        data = file.read(block.end - block.start)
    if block.format == "text":
        for text in text_documents(data, block.document_boundary, block.path, block.start):
            yield Document(text)
    else:
        for row in jsonl_rows(data, block.path, block.start):
            yield Document(column_of(row, block.text_column, block.path))


def _read_row_group(block: Block) -> Iterator[Document]:
    import pyarrow.parquet as pq

    with files.open_input(block.path) as file:
        parquet = pq.ParquetFile(file)
        names = parquet.schema_arrow.names
        if block.text_column not in names:
            raise CorpusError(
                f"{block.path}: wanted a column {block.text_column!r}, there are: "
                f"{', '.join(names)}: set corpus.text_column"
            )
        columns = [block.text_column, *([block.split_column] if block.split_column else [])]
        table = parquet.read_row_group(block.start, columns=columns)
    splits = table.column(block.split_column).to_pylist() if block.split_column else None
    for index, text in enumerate(table.column(block.text_column).to_pylist()):
        if text is not None:
            yield Document(text, splits[index] if splits else None)


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
