"""Labelled rows: which files hold them, and reading them with the fields of a task."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from bert_core import files
from bert_core.data.labelled_formats import labelled_records
from bert_core.data.tables import with_classes
from bert_core.errors import ConfigError, CorpusError
from bert_core.tasks.shapes import labelled
from pipelines.corpus import docstrings, hub
from pipelines.corpus.config import DOCSTRINGS
from pipelines.runtime.progress import counted, say
from pipelines.runtime.stage import INPUT
from tracking.runs import DatasetInput

Split = Literal["train", "held_out"]
SPLITS_FOR: dict[Split, tuple[str, ...]] = {"train": ("train",), "held_out": ("test", "validation")}
"""Names of splits by what they are for, the first one first."""


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
