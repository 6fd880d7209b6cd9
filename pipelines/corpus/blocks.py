"""Cuts the corpus into blocks, which workers read separately, and reads the documents of a block.

Blocks are a fixed function of the files and the config, never of the cluster, and a document is in
one block only, whatever the block size. How a format is cut and read is up to `readers`.
"""

from collections.abc import Iterator

from bert_core.data.formats import text_pieces
from pipelines.corpus.readers import reader_of
from pipelines.corpus.readers.base import Block, BytesReader, Document, Extent, unchanged
from pipelines.corpus.sources import Corpus


def plan_blocks(corpus: Corpus, block_bytes: int) -> list[Block]:
    """Cut the corpus into blocks of about `block_bytes` of text, each of whole documents.

    Small files share a block. A compressed file is never cut, except a Wikipedia dump made of
    several bz2 streams.
    """
    config = corpus.config
    blocks: list[Block] = []
    extents: list[Extent] = []
    text_bytes = 0
    for file in corpus.files:
        reader = reader_of(file)
        for extent in reader.cut(file, config, block_bytes) if file.size_bytes else ():
            extents.append(extent)
            text_bytes += extent.text_bytes
            if text_bytes >= block_bytes:
                blocks.append(Block(extents=tuple(extents), corpus=config, part_bytes=block_bytes))
                extents, text_bytes = [], 0
    if extents:
        blocks.append(Block(extents=tuple(extents), corpus=config, part_bytes=block_bytes))
    return blocks


def read_block(block: Block) -> Iterator[Document]:
    """Yield the documents of a block, unprocessed.

    Raises: CorpusError naming file and place, also if a file is missing or was replaced.
    """
    for extent in block.extents:
        with unchanged(extent.file):
            yield from reader_of(extent.file).read(extent, block)


def read_pieces(extent: Extent, block: Block) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of JSONL, or the documents of text files; where each line is a
    document, yield every line.

    Each comes with its byte offset in the file. Raises: as `read_block`.
    """
    reader = reader_of(extent.file)
    assert isinstance(reader, BytesReader)
    boundary, is_text = block.corpus.document_boundary, reader.rows == "lines"
    with unchanged(extent.file):
        for offset, data in reader.pieces(extent, block):
            if is_text and boundary != "line":
                for start, piece in text_pieces(data, boundary):
                    if piece.strip():
                        yield offset + start, piece
                continue
            for line in data.splitlines(keepends=True):
                if is_text or line.strip():
                    yield offset, line
                offset += len(line)
