"""The formats that documents are read from: one file and one entry in `READERS` per format."""

from bert_core import files
from bert_core.errors import CorpusError
from pipelines.corpus.readers.base import Reader
from pipelines.corpus.readers.delimited import CsvReader, TsvReader
from pipelines.corpus.readers.jsonl import JsonlReader
from pipelines.corpus.readers.parquet import ParquetReader
from pipelines.corpus.readers.text import TextReader
from pipelines.corpus.readers.wikipedia import WikipediaReader

READERS: dict[str, Reader] = {
    "text": TextReader(),
    "jsonl": JsonlReader(),
    "csv": CsvReader(),
    "tsv": TsvReader(),
    "parquet": ParquetReader(),
    "wikipedia": WikipediaReader(),
}
"""Name of a format → what reads it."""

ENDINGS = {ending: reader for reader in READERS.values() for ending in reader.endings}
"""What a file's name ends in, without the dot → what reads it."""

# What sets are published in that only stages of labelled rows read, by `format`.
_PUBLISHED = ("json", "conll", "conllu")


def reader_of(path: str) -> Reader:
    """What reads a file, by its name. Raises: CorpusError if nothing does."""
    suffix, _ = files.suffixes(path)
    if suffix not in ENDINGS:
        got = f".{suffix}" if suffix else "none"
        way_out = "rename it, or name the files that are meant by a glob"
        if suffix in _PUBLISHED:
            way_out = (
                "write its rows as .jsonl or .parquet; only stages of labelled rows, such as "
                "finetune and evaluate, read the formats of `raybert list formats`"
            )
        raise CorpusError(
            f"{path}: wanted a file ending in {', '.join('.' + name for name in ENDINGS)}, "
            f"or one of these and .gz, .bz2 or .zst, got {got}: {way_out}"
        )
    return ENDINGS[suffix]
