"""JSON objects, one per line or in a list: a document each, in the column
`corpus.text_column`."""

import re
from collections.abc import Iterator
from typing import ClassVar

from bert_core import files
from bert_core.data.json_rows import as_lines, jsonl_rows
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import (
    Block,
    BytesReader,
    CorpusFile,
    Document,
    Extent,
    document_of_row,
    extents_between,
)

LINE_END = re.compile(rb"\n")


class JsonlReader(BytesReader):
    """A JSON object per line."""

    endings: ClassVar[tuple[str, ...]] = ("jsonl", "ndjson")
    rows = "objects"

    def separator(self, config: CorpusConfig) -> re.Pattern[bytes]:
        return LINE_END

    def documents(
        self, data: bytes, offset: int, file: CorpusFile, config: CorpusConfig
    ) -> Iterator[Document]:
        for line in data.splitlines(keepends=True):
            where = f"{file.path}, the line at byte {offset:,}"
            for row in jsonl_rows(line, file.path, offset, config.errors):
                yield document_of_row(row, where, file, config)
            offset += len(line)


class JsonReader(JsonlReader):
    """A list of objects, or objects that span several lines; read as one line each, and never
    cut."""

    endings: ClassVar[tuple[str, ...]] = ("json",)

    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        yield from extents_between([0, file.size_bytes], file)

    def pieces(self, extent: Extent, block: Block) -> Iterator[tuple[int, bytes]]:
        path = extent.file.path
        with files.open_stream(path) as stream:
            for offset, line in as_lines(stream, path):
                yield offset, line + b"\n"
