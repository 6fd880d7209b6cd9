"""Labelled rows: which files hold them, and how they are read into the fields of a task."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from bert_core import files
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.tables import with_classes
from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.shapes import labelled, unused_fields
from pipelines.corpus import docstrings, hub
from pipelines.corpus.config import DOCSTRINGS
from pipelines.runtime.progress import counted, say
from pipelines.runtime.stage import INPUT
from tracking.runs import DatasetInput

Split = Literal["train", "held_out"]
SPLITS_FOR: dict[Split, tuple[str, ...]] = {"train": ("train",), "held_out": ("test", "validation")}
"""Purpose → names of splits, in order of preference."""


@dataclass(frozen=True, kw_only=True)
class LabelledConfig:
    """Which labelled rows to read."""

    source: str = field(default=DOCSTRINGS, metadata=INPUT)
    """A file, folder, glob or URI, optionally compressed (.gz, .bz2, .zst);
    `hf://datasets/<owner>/<name>` on the Hugging Face hub; or `docstrings`: which library a
    docstring is from."""
    split: str | None = None
    """Split to read from a folder or data set that has several; by default `train` to train on, and
    `test`, or else `validation`, to measure on."""
    format: str | None = None
    """Format of the file, as listed by `raybert list formats`; by default a .csv, .tsv, .jsonl or
    .parquet table, by its suffix."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field of the task → its column, if that has another name:
    `{text = "sentence1", text_pair = "sentence2"}`."""


@dataclass(frozen=True, kw_only=True)
class Unlabelled:
    """The labels of unlabelled rows: no fields."""


def labelled_files(config: LabelledConfig, split: Split) -> list[str]:
    """The files that `config` names, sorted; of a folder with several splits, those of one split.

    Raises: CorpusError if there are none; ConfigError if `config` has a split but names its files.
    """
    source = config.source
    if source == DOCSTRINGS:
        return [docstrings.labelled_file(split)]
    splits = SPLITS_FOR[split] if config.split is None else (config.split,)
    kind = hub.TABLES if config.format is None else hub.ANY
    names_split = config.split is not None
    paths = hub.data_files(source, splits, kind)
    if paths is None:
        paths = hub.folder_files(source, splits, kind, required=names_split)
    if paths is not None:
        return paths
    if names_split:
        raise ConfigError(
            f"split: wanted a folder or data set with several splits, since {source} already names "
            f"its files, got {config.split!r}: leave split out, or give the folder"
        )
    return files.find_files(source)


def read_labelled(
    config: LabelledConfig, split: Split, shapes: tuple[type, type]
) -> list[dict[str, Any]]:
    """Rows with the fields of a task's shapes, in the order of the files.

    Lines that are broken in the published set are left out, and reported.

    Raises: CorpusError naming a column that is missing or a row that does not fit.
    """
    return labelled_rows(config, split, shapes)[0]


def labelled_rows(
    config: LabelledConfig, split: Split, shapes: tuple[type, type]
) -> tuple[list[dict[str, Any]], int]:
    """The rows of `read_labelled`, and how many broken lines were left out."""
    tables: list[tuple[str, list[dict[str, Any]], dict[str, str]]] = []
    broken = 0
    paths, classes = labelled_files(config, split), hub.class_names(config.source)
    if config.source != DOCSTRINGS and paths != [config.source]:
        names = [path.rpartition("/")[2] for path in paths]
        more = f" and {len(names) - 3:,} more files" if len(names) > 3 else ""
        say(f"{config.source} ({split}): {', '.join(names[:3])}{more}")
    for path in paths:
        lines, columns = labelled_records(files.read_contents(path), path, config.format)
        records = [record for record in lines if record is not None]
        records = with_classes(records, classes) if classes else records
        if len(records) < len(lines):
            broken += len(lines) - len(records)
            say(f"{path}: left out {counted(len(lines) - len(records), 'broken line')}")
        tables.append((path, records, columns | config.columns))
    # A column is meant for other tasks if it is empty in all files.
    unused = set.intersection(
        *(unused_fields(records, shapes, columns) for _, records, columns in tables)
    )
    rows = [
        row
        for path, records, columns in tables
        for row in labelled(records, shapes, columns, path, unused)
    ]
    return rows, broken


@contextmanager
def rows_of(source: str) -> Iterator[None]:
    """Prefix errors about a row with the file or set that it is from."""
    try:
        yield
    except CorpusError as error:
        raise CorpusError(f"{source}, {error}") from error


@contextmanager
def rows_after(before: int) -> Iterator[None]:
    """Correct row numbers in errors: the rows at hand come after `before` others."""
    try:
        yield
    except CorpusError as error:
        text = re.sub(r"^row (\d+)", lambda found: f"row {before + int(found[1])}", str(error))
        raise CorpusError(text) from error


def read_unlabelled(config: LabelledConfig, shape: type) -> list[dict[str, Any]]:
    """Rows with the fields of a task's input, one per line of a test file, in order.

    Raises: CorpusError as `read_labelled` does, and if a line is broken.
    """
    path = config.source
    if not files.exists(path):
        raise CorpusError(f"{path}: wanted a file of rows, there is none: check the path")
    lines, columns = labelled_records(files.read_contents(path), path, config.format)
    records = [record for record in lines if record is not None]
    if len(records) < len(lines):
        raise CorpusError(
            f"{path}: wanted as many columns in every line as in the header, "
            f"{len(lines) - len(records):,} lines have more or fewer: copy the file again"
        )
    names = {field.name for field in fields(shape)}
    columns = {name: column for name, column in columns.items() if name in names}
    return labelled(records, (shape, Unlabelled), columns | config.columns, path)


def labelled_input(name: str, config: LabelledConfig, split: Split) -> DatasetInput:
    """A labelled set by name and sha256; for several files the sha256 over theirs, one per line,
    and over the names of classes if the data set's card states them."""
    paths, classes = labelled_files(config, split), hub.class_names(config.source)
    digests = [files.sha256_of(path) for path in paths]
    if classes:
        digests.append(hashlib.sha256(json.dumps(sorted(classes.items())).encode()).hexdigest())
    digest = digests[0]
    if len(digests) > 1:
        digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return DatasetInput(name, digest, paths[0] if len(paths) == 1 else config.source)
