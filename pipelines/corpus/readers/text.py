"""Text files, whose documents end where `corpus.document_boundary` says."""

import re
from collections.abc import Iterator

from bert_core.data.formats import BOUNDARIES, text_documents
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import BytesReader, CorpusFile, Document


class TextReader(BytesReader):
    """Plain text and Markdown."""

    endings = ("txt", "md")
    rows = "lines"

    def separator(self, config: CorpusConfig) -> re.Pattern[bytes] | None:
        return BOUNDARIES.get(config.document_boundary)

    def documents(
        self, data: bytes, offset: int, file: CorpusFile, config: CorpusConfig
    ) -> Iterator[Document]:
        for text in text_documents(
            data, config.document_boundary, file.path, offset, config.errors
        ):
            if text is None:
                yield Document("", file.source, dropped="unreadable")
            elif text.strip():  # of many blank lines, some may be a piece of their own
                yield Document(text, file.source)
