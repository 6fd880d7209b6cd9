"""JSON Lines: a document per line, in the column `corpus.text_column`."""

import re
from collections.abc import Iterator

from bert_core.data.formats import jsonl_rows
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import BytesReader, CorpusFile, Document, document_of_row

LINE_END = re.compile(rb"\n")


class JsonlReader(BytesReader):
    """A JSON object per line."""

    endings = ("jsonl", "ndjson")
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
