"""Text files; `corpus.document_boundary` says where their documents end."""

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
            elif text.strip():  # a run of blank lines may give blank pieces
                yield Document(text, file.source)
