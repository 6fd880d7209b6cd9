"""The formats of documents: one file and one entry in `READERS` per format."""

from bert_core import files
from bert_core.data.contents import HEAD_BYTES, to_convert
from bert_core.errors import CorpusError
from pipelines.corpus.readers.base import CorpusFile, Reader
from pipelines.corpus.readers.delimited import CsvReader, TsvReader
from pipelines.corpus.readers.jsonl import JsonlReader, JsonReader
from pipelines.corpus.readers.parquet import ParquetReader
from pipelines.corpus.readers.text import TextReader
from pipelines.corpus.readers.wikipedia import WikipediaReader

READERS: dict[str, Reader] = {
    "text": TextReader(),
    "jsonl": JsonlReader(),
    "json": JsonReader(),
    "csv": CsvReader(),
    "tsv": TsvReader(),
    "parquet": ParquetReader(),
    "wikipedia": WikipediaReader(),
}
"""Name of a format → its reader."""

ENDINGS = {ending: reader for reader in READERS.values() for ending in reader.endings}
"""Suffix of a file's name, without the dot → its reader."""

# Suffixes of published sets: only stages that read labelled rows accept them, with a `format`.
_PUBLISHED = ("conll", "conllu")


def reader_of(file: CorpusFile) -> Reader:
    """Return the reader of a file. Raises: CorpusError if no reader knows its format."""
    if file.format in ENDINGS:
        return ENDINGS[file.format]
    way_out = "rename it, or give the files as a glob"
    if file.format in _PUBLISHED:
        way_out = (
            "write its rows as .jsonl or .parquet; only stages of labelled rows, such as "
            "finetune and evaluate, read the formats of `raybert list formats`"
        )
    elif file.size_bytes:
        head, _ = files.look_into(file.path, HEAD_BYTES)
        way_out = to_convert(head, file.path) or way_out
    raise CorpusError(
        f"{file.path}: wanted a file ending in {', '.join(f'.{name}' for name in ENDINGS)}, "
        f"or one of these followed by .gz, .bz2, .zst or .xz, got "
        f"{f'.{file.format}' if file.format else 'none'}: {way_out}"
    )
