"""Where documents and labelled rows come from: which files there are, and how large.

How a corpus is hashed is for `pipelines.corpus.digest`, how it is cut into blocks and read for
`pipelines.corpus.blocks`.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from bert_core import files
from bert_core.data.formats import Boundary, Errors
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.tables import with_classes
from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.rows import labelled
from pipelines.corpus import docstrings, hub, parquet
from pipelines.runtime.progress import counted, say
from pipelines.runtime.stage import INPUT, REMARK
from tracking.runs import DatasetInput

Format = Literal["text", "jsonl", "csv", "tsv", "parquet", "wikipedia"]
Split = Literal["train", "held_out"]
DOCSTRINGS = "docstrings"
SPLITS_FOR: dict[Split, tuple[str, ...]] = {"train": ("train",), "held_out": ("test", "validation")}
"""Names of splits by what they are for, the first one first."""
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


@dataclass(frozen=True, kw_only=True)
class LabelledConfig:
    """Which labelled rows to read."""

    source: str = field(default=DOCSTRINGS, metadata=INPUT)
    """A file, a folder, a glob or a URI of them, also .gz, .bz2 or .zst;
    `hf://datasets/<owner>/<name>` of the Hugging Face hub; or `docstrings`: which library is it
    from."""
    split: str | None = None
    """Of a folder or data set that has several: `train` to train on and `test`, or `validation`
    where there is no test, to measure on, where this is not given."""
    format: str | None = None
    """As whom the file is written: `raybert list formats` shows those there are; a .csv, .tsv,
    .jsonl or .parquet table by its ending where this is not given."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field of the task → the column that holds it, where that has another name:
    `{text = "sentence1", text_pair = "sentence2"}`."""


@dataclass(frozen=True, kw_only=True)
class Unlabelled:
    """What is right of rows that nobody has labelled: nothing is known."""


def labelled_files(config: LabelledConfig, split: Split) -> list[str]:
    """The files that `config` means, sorted; of a folder those of a split, where it has several.

    Raises: CorpusError if there is none; ConfigError if a split is wanted of files that are named.
    """
    source = config.source
    if source == DOCSTRINGS:
        return [docstrings.labelled_file(split)]
    splits = SPLITS_FOR[split] if config.split is None else (config.split,)
    kind = hub.TABLES if config.format is None else hub.ANY
    asked = config.split is not None
    found = hub.data_files(source, splits, kind)
    if found is None:
        found = hub.folder_files(source, splits, kind, asked=asked)
    if found is not None:
        return found
    if asked:
        raise ConfigError(
            f"split: wanted a folder or data set with several splits in {source}, which names its "
            f"files, got {config.split!r}: leave it out, or name the folder"
        )
    return files.find_files(source)


def read_labelled(
    config: LabelledConfig, split: Split, shapes: tuple[type, type]
) -> list[dict[str, Any]]:
    """Rows with the fields of a task's shapes, in the order of the files.

    Lines that are broken in the set as it is published are left out, and told of.

    Raises: CorpusError naming a column that is missing or a row that does not fit.
    """
    return labelled_rows(config, split, shapes)[0]


def labelled_rows(
    config: LabelledConfig, split: Split, shapes: tuple[type, type]
) -> tuple[list[dict[str, Any]], int]:
    """What `read_labelled` gives, and how many broken lines are left out."""
    rows: list[dict[str, Any]] = []
    broken = 0
    paths, classes = labelled_files(config, split), hub.class_names(config.source)
    if config.source != DOCSTRINGS and paths != [config.source]:
        names = [path.rpartition("/")[2] for path in paths]
        more = f" and {len(names) - 3:,} more files" if len(names) > 3 else ""
        say(f"{config.source} ({split}): {', '.join(names[:3])}{more}")
    for path in paths:
        found, columns = labelled_records(files.read_contents(path), path, config.format)
        records = [record for record in found if record is not None]
        records = with_classes(records, classes) if classes else records
        if len(records) < len(found):
            broken += len(found) - len(records)
            say(f"{path}: left out {counted(len(found) - len(records), 'broken line')}")
        rows += labelled(records, shapes, columns | config.columns, path)
    return rows, broken


@contextmanager
def rows_of(source: str) -> Iterator[None]:
    """Name the file, or what is read, in an error that says what is wrong with a row of it."""
    try:
        yield
    except CorpusError as error:
        raise CorpusError(f"{source}, {error}") from error


@contextmanager
def rows_after(before: int) -> Iterator[None]:
    """Count from the first of all rows in an error that counts those after `before` others."""
    try:
        yield
    except CorpusError as error:
        text = re.sub(r"^row (\d+)", lambda found: f"row {before + int(found[1])}", str(error))
        raise CorpusError(text) from error


def read_unlabelled(config: LabelledConfig, shape: type) -> list[dict[str, Any]]:
    """Rows with the fields of a task's input, one for every line of a test file, in their order.

    Raises: CorpusError as `read_labelled` does, and if a line is broken.
    """
    path = config.source
    if not files.exists(path):
        files.check_bucket(path)
        raise CorpusError(f"{path}: wanted a file of rows, there is none: check the path")
    found, columns = labelled_records(files.read_contents(path), path, config.format)
    records = [record for record in found if record is not None]
    if len(records) < len(found):
        raise CorpusError(
            f"{path}: wanted as many columns in every line as its header has, "
            f"{len(found) - len(records):,} lines have others: copy the file again"
        )
    names = {one.name for one in fields(shape)}
    columns = {name: column for name, column in columns.items() if name in names}
    return labelled(records, (shape, Unlabelled), columns | config.columns, path)


def labelled_input(name: str, config: LabelledConfig, split: Split) -> DatasetInput:
    """A labelled set by name and sha256; of several files that over theirs, a line each."""
    paths = labelled_files(config, split)
    digests = [files.sha256_of(path) for path in paths]
    digest = digests[0]
    if len(digests) > 1:
        digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return DatasetInput(name, digest, paths[0] if len(paths) == 1 else config.source)
