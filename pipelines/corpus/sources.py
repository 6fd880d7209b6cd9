"""Which files a corpus has, and how large they are.

How it is hashed is for `digest`, how it is cut into blocks and read for `blocks`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from bert_core import files
from bert_core.data.formats import Boundary, Errors
from bert_core.errors import ConfigError, CorpusError
from pipelines.corpus import docstrings, hub, parquet
from pipelines.runtime.stage import INPUT, REMARK

Format = Literal["text", "jsonl", "csv", "tsv", "parquet", "wikipedia"]
DOCSTRINGS = "docstrings"
_FORMATS: dict[str, Format] = {
    "txt": "text",
    "md": "text",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "csv": "csv",
    "tsv": "tsv",
    "parquet": "parquet",
    "xml": "wikipedia",
}
# What sets are published in that only stages of labelled rows read, by `format`.
_PUBLISHED = ("json", "conll", "conllu")
# Bytes of text that a byte of a compressed file gives, about: for the sizes of blocks and shards.
_EXPANSION = {None: 1, "gz": 3, "bz2": 4, "zst": 3}


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Which text to read, and what a document of it is."""

    source: str | tuple[str, ...] = field(default=DOCSTRINGS, metadata=INPUT)
    """Files, folders, globs or URIs of .txt, .md, .jsonl, .csv, .tsv, .parquet or a Wikipedia
    dump's .xml, also .gz, .bz2 or .zst; `hf://datasets/<owner>/<name>` of the Hugging Face hub; or
    `docstrings`."""
    weights: tuple[float, ...] = ()
    """For every source how often its documents are used: 2 is twice, 0.5 is every second one."""
    licenses: tuple[str, ...] = field(default=(), metadata=REMARK)
    """For every source its licence, for the data card; a hub data set says its own."""
    document_boundary: Boundary = "blank_line"
    """In text files: a document ends at a `blank_line`, with its `line` or its `file`, or before a
    `heading`."""
    text_column: str = "text"
    """In JSONL, CSV, TSV and Parquet: the column that holds a document."""
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

    @property
    def expansion(self) -> int:
        """Bytes of text that a byte of the file gives, about."""
        return _EXPANSION[self.compression]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files of a corpus as they were when the run began.

    It is listed once: what is hashed is what is cut into blocks and described by the data card.
    """

    config: CorpusConfig
    files: tuple[CorpusFile, ...]
    """Sorted by path."""

    @property
    def name(self) -> str:
        """Its sources, for messages and records."""
        return ", ".join(self.config.sources)


def list_corpus(config: CorpusConfig) -> Corpus:
    """Find the files of a corpus. Raises: CorpusError if a source names none."""
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
    return Corpus(config=config, files=tuple(found[path] for path in sorted(found)))


def _paths_of(source: str) -> list[str]:
    if source == DOCSTRINGS:
        return [docstrings.corpus_file()]
    return [files.absolute(path) for path in hub.data_files(source) or files.find_files(source)]


@contextmanager
def unchanged(file: CorpusFile) -> Iterator[None]:
    """Read the file that was there when the run began.

    Raises: CorpusError if it is gone or has another size.
    """
    try:
        if (size_bytes := files.size_bytes(file.path)) != file.size_bytes:
            raise CorpusError(
                f"{file.path}: wanted the {file.size_bytes:,} bytes that were there when the run "
                f"began, got {size_bytes:,}: leave the corpus alone while it is read, and run again"
            )
        yield
    except FileNotFoundError as error:
        raise CorpusError(
            f"{file.path}: was there when the run began, now there is no such file: put it back "
            "and run again, what is finished stays"
        ) from error


def corpus_size_bytes(corpus: Corpus) -> int:
    """Bytes of text in the corpus, about where it is compressed.

    Raises: CorpusError if all its files are empty, or Parquet lacks the column of the text.
    """
    config = corpus.config
    sizes = (_text_bytes(file, config) * config.weight(file.source) for file in corpus.files)
    size_bytes = sum(sizes)
    if size_bytes == 0:
        raise CorpusError(
            f"{corpus.name}: wanted text, every file there is empty: check the path, or give "
            "another corpus"
        )
    return max(1, int(size_bytes))


def _text_bytes(file: CorpusFile, config: CorpusConfig) -> int:
    if file.format == "parquet" and file.size_bytes:
        return parquet.text_bytes(file.path, config.text_column)
    return file.size_bytes * file.expansion


def _format_of(path: str) -> Format:
    suffix, _ = files.suffixes(path)
    if suffix not in _FORMATS:
        got = f".{suffix}" if suffix else "none"
        way_out = "rename it, or name the files that are meant by a glob"
        if suffix in _PUBLISHED:
            way_out = (
                "write its rows as .jsonl or .parquet; only stages of labelled rows, such as "
                "finetune and evaluate, read the formats of `raybert list formats`"
            )
        raise CorpusError(
            f"{path}: wanted a file ending in {', '.join('.' + name for name in _FORMATS)}, "
            f"or one of these and .gz, .bz2 or .zst, got {got}: {way_out}"
        )
    return _FORMATS[suffix]
