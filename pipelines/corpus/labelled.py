"""Finds the files of labelled rows, and reads them into the fields of a task."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from bert_core import files
from bert_core.data.labelled_formats import FORMATS, LabelledFile, labelled_records
from bert_core.data.tables import Quotes, with_classes
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.tasks.label_columns import holds_ticks, with_lists, with_names
from bert_core.tasks.shapes import (
    BadRow,
    LabelledRows,
    Row,
    kinds_of_bad,
    label_fields,
    labelled,
    read_records,
    told_of,
    unused_fields,
)
from bert_core.wording import as_json
from pipelines.corpus import docstrings, hub
from pipelines.corpus.annotated import (
    Checked,
    checking_names,
    in_characters,
    label_names,
    say_unused,
    with_chosen_annotators,
    with_label_names,
)
from pipelines.corpus.config import DOCSTRINGS
from pipelines.corpus.retrieval_sets import (
    RetrievalFiles,
    read_retrieval_set,
    retrieval_files,
)
from pipelines.runtime.progress import counted, say
from pipelines.runtime.stage_config import INPUT, INPUT_OR_WORD
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.bundle.format import Bundle
    from bert_core.tasks.base import Remarks

Split = Literal["train", "held_out"]
BadRows = Literal["refuse", "skip"]
Columns = Mapping[str, list[str] | str]
"""Field of a task → its column, or the names of its labels."""
Found = dict[str, tuple[LabelledFile, list[BadRow]]]
"""Path → its records, and the rows that cannot be read."""
BAD, STRIPPED = "rows_left_out_as_bad", "labels_with_spaces_removed"
TYPES = "labels_of_several_types"
"""Remarks: how many rows were skipped, how many labels had white space at their ends, and types of
labels that are all read as text."""
SPLITS_FOR: dict[Split, tuple[str, ...]] = {"train": ("train",), "held_out": ("test", "validation")}
"""Purpose → names of splits, in order of preference."""


@dataclass(frozen=True, kw_only=True)
class LabelledConfig:
    """Which labelled rows to read."""

    source: str = field(default="", metadata=INPUT_OR_WORD)
    """Required. A file, folder, glob or URI, optionally compressed (.gz, .bz2, .zst, .xz);
    `hf://datasets/<owner>/<name>` on the Hugging Face hub; or `docstrings`: which library a
    docstring is from."""
    split: str | None = None
    """Split to read from a folder or data set that has several; by default `train` to train on, and
    `test`, or else `validation`, to measure on."""
    format: str | None = None
    """Format of the file, as listed by `raybert list formats`; by default a table: .csv, .tsv,
    .jsonl, .json or .parquet."""
    columns: dict[str, list[str] | str] = field(default_factory=dict)
    """Field of the task → its column, if that has another name:
    `{text = "sentence1", text_pair = "sentence2"}`; the numbers of columns, from 0, if a CSV or TSV
    file has no header: `{text = "0", label = "1"}`. For a column per label, which holds 0 or 1, or
    for lists of these, the names of all labels in order: `{labels = ["toxic", "insult"]}`. By
    default as in training, if the file has these columns."""
    bad_rows: BadRows = "refuse"
    """How to treat rows that do not fit the task, such as broken lines and rows without a label
    or with one that the model does not know: `refuse` them all in one message, or `skip` them,
    counted by what is wrong with them."""
    label_separator: str | None = None
    """What separates several labels in a cell of a table, such as "," or ";"; by default such
    labels are lists."""
    label_names: str = field(default="", metadata=INPUT)
    """A file with the name of a label per line, if the rows have their numbers, from 0."""
    quotes: Quotes | None = None
    """How quotes in a CSV or TSV file are read: as RFC 4180 has it (`csv`), or as text
    (`literal`); by default `csv` for .csv, and `literal` for .tsv, as in GLUE."""
    annotators: str | None = None
    """Whose labels to take where several annotators labelled the same text: `each` as a row, what
    the `majority` of them says, or the name of one. Must be given if a text has several."""


@dataclass(frozen=True, kw_only=True)
class Unlabelled:
    """The labels of unlabelled rows: no fields."""


def retrieval_files_of(config: LabelledConfig, split: Split) -> RetrievalFiles | None:
    """Return the files of the retrieval set that `config` names; None if it names rows, as with a
    format."""
    if config.source == DOCSTRINGS or config.format is not None:
        return None
    splits = SPLITS_FOR[split] if config.split is None else (config.split,)
    return retrieval_files(config.source, splits, named=config.split is not None)


def labelled_files(config: LabelledConfig, split: Split) -> list[str]:
    """Return the files that `config` names, sorted; for a folder with several splits, those of one
    split; all files of a retrieval set, for one split of its judgements.

    Raises: CorpusError if there are none; ConfigError if `config` has a split but names its files.
    """
    found = retrieval_files_of(config, split)
    return _row_files(config, split) if found is None else found.paths


def _row_files(config: LabelledConfig, split: Split) -> list[str]:
    source = config.source
    if source == DOCSTRINGS:
        return [docstrings.labelled_file(split)]
    splits = SPLITS_FOR[split] if config.split is None else (config.split,)
    kind = _kind_of(config.format)
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
    return hub.found(source)


def _kind_of(name: str | None) -> hub.Kind:
    """Return the kind of the files of a format; of a table if `name` is None."""
    if name is None:
        return hub.TABLES
    known = FORMATS.get(name)
    if known is None or not known.suffix:
        return hub.ANY
    return hub.of_suffix(known.suffix, known.beside_of if known.beside else None)


def _beside(path: str, name: str | None) -> str | None:
    """Return the path of the file that belongs to a file of a format, if the format has one."""
    known = None if name is None else FORMATS.get(name)
    return (known.beside_of(path) or None) if known else None


@dataclass(frozen=True)
class RowsRead:
    """The labelled rows of a source."""

    rows: list[dict[str, Any]]
    """In the order of the files."""
    broken: int
    """Lines that are broken in the published set, and were left out."""
    remarks: "Remarks"
    """Rows that were skipped, and what was changed in others."""


def labelled_rows(
    config: LabelledConfig,
    split: Split,
    shapes: tuple[type, type],
    checked: Checked | None = None,
    usual: Columns | None = None,
    setting: str | None = None,
) -> RowsRead:
    """Read rows into the fields of a task's shapes, and let the task check them.

    Reports what is left out: lines that are broken in the published set and, if `config` says so,
    rows that do not fit.

    Args:
        shapes: the classes of the task's input and labels.
        checked: the task's check; returns each row as the task reads it, or an InputError.
        usual: the columns used before, as in training, for fields without a column in `config`.
        setting: what the user calls `config`, if that is not the name of the split.
    Raises: CorpusError naming a column that is missing, or all rows that do not fit.
    """
    if (retrieval := retrieval_files_of(config, split)) is not None:
        return _pairs_of(retrieval, config, split, shapes[0], checked)
    paths, classes = _row_files(config, split), hub.class_names(config.source)
    names_of_labels = label_names(config.label_names)
    if config.source != DOCSTRINGS and paths != [config.source]:
        names = [path.rpartition("/")[2] for path in paths]
        more = f" and {len(names) - 3:,} more files" if len(names) > 3 else ""
        say(f"{config.source} ({split}): {', '.join(names[:3])}{more}")
    setting = f"--{setting or split}.columns"
    found: Found = {}
    columns_of: dict[str, dict[str, str]] = {}
    for path in paths:
        of_file, columns_of[path] = _with_columns(path, config, shapes, usual or {}, setting)
        found[path] = of_file, _unread(of_file, path)
        if of_file.unread and not of_file.records:
            raise CorpusError(f"{told_of(found[path][1], of_file.rows)}: none is left")
    taken, agreed = with_chosen_annotators(
        {path: of_file for path, (of_file, _) in found.items()},
        columns_of,
        config.source,
        config.annotators,
    )
    found = {path: (taken[path], unread) for path, (_, unread) in found.items()}
    say_unused(config.source, taken.values())
    some = {path: both for path, both in found.items() if both[0].records or both[0].unread}
    found = some or found  # without files of which every row is left out
    paths = [*found]
    # A column that is empty in all files is assumed to be for other tasks.
    unused = set.intersection(
        *(unused_fields(found[path][0].records, shapes, columns_of[path]) for path in paths)
    )
    read = {
        path: _in_file(
            of_file,
            unread,
            partial(
                read_records,
                with_classes(
                    of_file.records,
                    with_label_names(classes, names_of_labels, shapes[1], columns_of[path]),
                ),
                shapes,
                columns_of[path],
                path,
                unused,
                setting,
            ),
        )
        for path, (of_file, unread) in found.items()
    }
    if names_of_labels:
        checked = checking_names(
            names_of_labels, label_fields(shapes[1]), config.label_names, checked
        )
    rows, bad = _checked(read, config.source, checked)
    total = len(rows) + len(bad)
    if bad and config.bad_rows == "refuse":
        raise CorpusError(
            f'{told_of(bad, total)} (bad_rows = "skip" beside the source leaves such rows out)'
        )
    if bad and not rows:
        raise CorpusError(f"{told_of(bad, total)}: none is left")
    for path in read:
        if faulty := [row for row in bad if row.source == path]:
            say(f"{path}: left out {counted(len(faulty), 'row')}: {kinds_of_bad(faulty)}")
    stripped = sum(part.stripped for part in read.values())
    types = "; ".join(part.types for part in read.values() if part.types)
    broken = sum(of_file.broken for of_file, _ in found.values())
    remarks: Remarks = {BAD: len(bad), STRIPPED: stripped, TYPES: types, **agreed}
    return RowsRead(rows, broken, remarks)


def _with_columns(
    path: str, config: LabelledConfig, shapes: tuple[type, type], usual: Columns, setting: str
) -> tuple[LabelledFile, dict[str, str]]:
    """Read a file, and return it with the column of each field that has one: its labels under their
    names or in lists, its spans in characters."""
    of_file = _read(path, config)
    if of_file.broken:
        say(f"{path}: left out {counted(of_file.broken, 'broken line')}")
    kept = _kept(usual, config.columns, shapes, of_file.records)
    if kept:
        listed = ", ".join(f"{name} = {as_json(column)}" for name, column in kept.items())
        say(f"{path}: columns {{{listed}}}, as in training, since others are not given")
    columns: dict[str, str] = {}
    for name, column in {**of_file.columns, **kept, **config.columns}.items():
        if isinstance(column, str):
            columns[name] = column
        else:
            of_file = with_names(of_file, path, shapes[1], name, column, setting)
    if config.label_separator:
        for name in label_fields(shapes[1]):
            of_file = with_lists(of_file, columns.get(name, name), config.label_separator)
    return in_characters(of_file, path, shapes, columns), columns


def _pairs_of(
    found: RetrievalFiles,
    config: LabelledConfig,
    split: Split,
    inputs: type,
    checked: Checked | None,
) -> RowsRead:
    """Return the queries of a retrieval set with each of their relevant documents, as rows of two
    texts.

    Raises: CorpusError if the task's rows are not pairs of texts.
    """
    names = {field.name for field in fields(inputs)}
    if not {"text", "text_pair"} <= names:
        raise CorpusError(
            f"{found.source}: wanted rows with {', '.join(sorted(names))}, got a retrieval set (a "
            "corpus, queries and qrels), which gives pairs of texts: give a file of such rows"
        )
    read = read_retrieval_set(found, skip=config.bad_rows == "skip")
    rows: list[dict[str, Any]] = read.pairs
    if checked is not None:
        with rows_of(config.source):
            taken = checked(rows)
        if fault := next((row for row in taken if isinstance(row, InputError)), None):
            raise CorpusError(f"{found.source}: a query with its document does not fit: {fault}")
        rows = [dict(row) for row in taken if not isinstance(row, InputError)]
    if split == "held_out":
        say(
            f"{found.source}: {counted(len(rows), 'pair')}, each to be found among the documents "
            "of all pairs; `raybert evaluate` searches all documents of the set"
        )
    return RowsRead(rows, 0, read.remarks)


def _in_file(
    of_file: LabelledFile, unread: Sequence[BadRow], read: Callable[[], LabelledRows]
) -> LabelledRows:
    """Read a file's rows and number them as in the file; add the rows that could not be parsed to
    `bad`."""
    try:
        part = read()
    except CorpusError as error:  # unreadable rows may be the reason that columns do not fit
        if unread:
            raise CorpusError(told_of(unread, of_file.rows)) from error
        raise
    bad = [replace(row, number=of_file.numbers[row.number - 1]) for row in part.bad]
    numbers = [of_file.numbers[number - 1] for number in part.numbers]
    return replace(part, numbers=numbers, bad=[*bad, *unread])


def _kept(
    usual: Columns, given: Columns, shapes: tuple[type, type], records: Sequence[Row]
) -> dict[str, list[str] | str]:
    """Return the usual columns of the fields that have no given column, if the records have those
    columns."""
    names = {field.name for shape in shapes for field in fields(shape)} - given.keys()
    taken = {name for column in given.values() for name in _listed(column)}
    return {
        name: column
        for name, column in usual.items()
        if name in names
        and taken.isdisjoint(_listed(column))
        and (
            any(all(one in record for one in _listed(column)) for record in records)
            or (isinstance(column, list) and holds_ticks(records, name, column))
        )
    }


def _listed(column: list[str] | str) -> list[str]:
    return [column] if isinstance(column, str) else column


def usual_columns(bundle: "Bundle", task: str) -> dict[str, list[str] | str]:
    """Return the `columns` setting that a bundle was trained on this task with; empty if it was
    not."""
    lineage: Mapping[str, Any] = bundle.lineage
    if bundle.task is None or bundle.task.name != task:
        return {}
    while lineage:
        train = lineage.get("config", {}).get("train")
        if isinstance(train, Mapping) and lineage.get("stage") != "export":
            return dict(train.get("columns") or {})
        lineage = lineage.get("parent_lineage") or {}
    return {}


def _checked(
    read: dict[str, LabelledRows], source: str, checked: Checked | None
) -> tuple[list[dict[str, Any]], list[BadRow]]:
    """Return the rows of all files as the task reads them, and the rows that it rejects, sorted by
    file."""
    rows = [row for part in read.values() for row in part.rows]
    taken: Sequence[Row | InputError] = rows
    if checked is not None:
        with rows_of(source):
            taken = checked(rows)
    places = [(path, number) for path, part in read.items() for number in part.numbers]
    bad = [
        *(row for part in read.values() for row in part.bad),
        *(
            BadRow(path, number, str(row))
            for (path, number), row in zip(places, taken, strict=True)
            if isinstance(row, InputError)
        ),
    ]
    order = {path: place for place, path in enumerate(read)}
    bad.sort(key=lambda row: (order[row.source], row.number))
    return [dict(row) for row in taken if not isinstance(row, InputError)], bad


def _read(path: str, config: LabelledConfig) -> LabelledFile:
    """Read a file, and report its comments, and what is not used of it."""
    beside = _beside(path, config.format)
    if beside is not None and not files.exists(beside):
        raise CorpusError(
            f"{path}: wanted the file that belongs to it beside it, {beside}, there is none: put "
            "it there, or leave the file out"
        )
    text = None if beside is None else files.read_contents(beside)
    # No column of a file with a header is called by a number.
    given = [column for column in config.columns.values() if isinstance(column, str)]
    header = not given or not all(column.isdecimal() for column in given)
    data = files.read_contents(path)
    found = labelled_records(data, path, config.format, text, header=header, quotes=config.quotes)
    if found.comments:
        told = f"{counted(len(found.comments), 'comment')} ({found.comments[0][:60]}, …)"
        say(f"{path}: passed over {told}")
    return found


def _unread(of_file: LabelledFile, path: str) -> list[BadRow]:
    """Return the rows of a file that cannot be read."""
    unread = []
    for number, why in of_file.unread.items():
        place, _, fault = why.partition(": ")
        unread.append(BadRow(path, number, fault, place))
    return unread


@contextmanager
def rows_of(source: str) -> Iterator[None]:
    """Prefix errors about a row with the file or data set that it is from."""
    try:
        yield
    except CorpusError as error:
        raise CorpusError(f"{source}, {error}") from error


@contextmanager
def rows_after(before: int) -> Iterator[None]:
    """Shift the row numbers in errors by `before`, the number of rows that precede these."""
    try:
        yield
    except CorpusError as error:
        text = re.sub(r"^row (\d+)", lambda found: f"row {before + int(found[1])}", str(error))
        raise CorpusError(text) from error


def read_unlabelled(config: LabelledConfig, shape: type) -> list[dict[str, Any]]:
    """Read rows with the fields of a task's input, one per line of a test file, in order.

    Raises: CorpusError as `labelled_rows` does, and if a line is broken; ConfigError if a field has
        a list of labels instead of a column.
    """
    path, named = config.source, dict[str, str]()
    for name, column in config.columns.items():
        if not isinstance(column, str):
            raise ConfigError(
                f"columns.{name}: wanted the name of a column, got {as_json(column)}: rows without "
                "labels have no columns of labels, leave it out"
            )
        named[name] = column
    if not files.exists(path):
        raise CorpusError(f"{path}: wanted a file of rows, there is none: check the path")
    found = _read(path, config)
    if found.unread:
        raise CorpusError(told_of(_unread(found, path), found.rows))
    if found.broken:
        raise CorpusError(
            f"{path}: wanted as many columns in every line as in the header, "
            f"{found.broken:,} lines have more or fewer: copy the file again"
        )
    names = {field.name for field in fields(shape)}
    columns = {name: column for name, column in found.columns.items() if name in names}
    return labelled(found.records, (shape, Unlabelled), columns | named, path)


def labelled_input(name: str, config: LabelledConfig, split: Split) -> DatasetInput:
    """Return a labelled set as an input: its name, and the sha256 of its file. With several files,
    the digest is the sha256 of their digests, one per line, and of the names of classes if the data
    set's card states them.

    Raises: ConfigError without a source.
    """
    if not config.source:
        raise ConfigError(
            f"{name}.source: wanted labelled rows, got none: give --{name}.source with a file, a "
            f"folder, hf://datasets/<owner>/<name>, or `{DOCSTRINGS}` for those of the quickstart"
        )
    paths, classes = labelled_files(config, split), hub.class_names(config.source)
    texts = (_beside(path, config.format) for path in paths)
    read = [*paths, *(text for text in texts if text is not None and files.exists(text))]
    digests = [files.sha256_of(path) for path in [*read, *filter(None, [config.label_names])]]
    if classes:
        digests.append(hashlib.sha256(json.dumps(sorted(classes.items())).encode()).hexdigest())
    digest = digests[0]
    if len(digests) > 1:
        digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
    return DatasetInput(name, digest, paths[0] if len(paths) == 1 else config.source)
