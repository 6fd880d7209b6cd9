"""Dumps of Wikipedia: a document per article, without its markup."""

import bz2
import re
from collections.abc import Iterator
from itertools import pairwise

from bert_core import files
from bert_core.compression import decompress
from bert_core.data.formats import damaged
from bert_core.data.wikitext import PAGE_END, article_text, dump_pages
from bert_core.errors import CorpusError
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers.base import (
    Block,
    BytesReader,
    CorpusFile,
    Document,
    Extent,
    bytes_of,
    cuts_of,
    extents_between,
)

# First bytes of a bz2 stream: a file of several streams can be cut there (Wikipedia's multistream
# dumps have one stream per 100 pages).
BZ2_STREAM = re.compile(rb"BZh[1-9]1AY&SY")
LONGEST_BZ2_STREAM_BYTES = 16 << 20
LONGEST_BZ2_BLOCK_BYTES = 1 << 20  # of content; compressed, it is slightly larger at most


class WikipediaReader(BytesReader):
    """Pages of an XML dump. A dump of several bz2 streams is cut between the streams."""

    endings = ("xml",)

    def separator(self, config: CorpusConfig) -> re.Pattern[bytes]:
        return PAGE_END

    def cut(self, file: CorpusFile, config: CorpusConfig, block_bytes: int) -> Iterator[Extent]:
        if file.compression != "bz2":
            yield from super().cut(file, config, block_bytes)
            return
        longest = LONGEST_BZ2_STREAM_BYTES
        cuts = cuts_of(file, block_bytes, BZ2_STREAM, longest, at_start=True)
        if len(cuts) > 2:
            too_long = max(end - start for start, end in pairwise(cuts)) > block_bytes + longest
            if too_long or not _begins_a_page(file, cuts[1]):
                cuts = [0, file.size_bytes]  # streams end within pages, as from `pbzip2`
        yield from extents_between(cuts, file)

    def pieces(self, extent: Extent, block: Block) -> Iterator[tuple[int, bytes]]:
        file = extent.file
        if not file.compression or (extent.start, extent.end) == (0, file.size_bytes):
            yield from super().pieces(extent, block)
            return
        data = bytes_of(extent)
        try:
            data = decompress(data, "bz2")
        except (OSError, ValueError, EOFError) as error:  # damaged or truncated
            raise damaged(file.path, ".bz2 file", error) from error
        yield extent.start, data

    def documents(
        self, data: bytes, offset: int, file: CorpusFile, config: CorpusConfig
    ) -> Iterator[Document]:
        start = 0
        ends = [match.end() for match in PAGE_END.finditer(data)]
        for end in [*ends, len(data)]:
            page = data[start:end]
            try:
                if (b"<page>" in page) != (b"</page>" in page):
                    raise CorpusError(
                        f"{file.path}: wanted whole pages, the piece at byte {offset + start:,} "
                        "begins or ends within one: download the dump again, or decompress it"
                    )
                articles = list(dump_pages(page, file.path, offset + start))
            except CorpusError:
                if config.errors == "fail":
                    raise
                yield Document("", file.source, dropped="unreadable")
            else:
                yield from (Document(article_text(*article), file.source) for article in articles)
            start = end


def _begins_a_page(file: CorpusFile, position: int) -> bool:
    """Whether the bz2 stream at `position` begins with a page of Wikipedia."""
    with files.open_input(file.path) as opened, files.reading(file.path):
        opened.seek(position)
        data = opened.read(LONGEST_BZ2_BLOCK_BYTES)
    try:
        begins = bz2.BZ2Decompressor().decompress(data, max_length=100)
    except OSError:  # damaged: reading the block will report it
        return False
    return begins.lstrip().startswith((b"<page>", b"</mediawiki>"))
