"""`raybert.json`: what a bundle's answers depend on besides its weights, and the sha256 of its
files."""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bert_core import files
from bert_core.bundle.foreign import FOREIGN_FILES, weight_files
from bert_core.bundle.layout import (
    CONFIG,
    FORMAT_VERSION,
    GRAPHS,
    RECORD,
    WEIGHTS,
    Execution,
    digest_of,
    label_entries,
    named_labels,
    read_json,
    sha256s_of,
)
from bert_core.containment import has_file
from bert_core.errors import FormatError
from bert_core.typed import as_type
from bert_core.wording import as_json

ANSWERS = ("task", "labels", "options", "runs")
"""Entries that, with the files, decide what a bundle answers."""
_WRITTEN = {"format_version", "digest", "files"}


@dataclass(frozen=True, kw_only=True)
class _Run:
    engine: str
    precision: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """The contents of `raybert.json`."""

    format_version: int
    digest: str = ""
    """`Bundle.digest`, so that an edited record is noticed; empty before version 2."""
    task: str | None = None
    labels: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    lineage: dict[str, Any] = field(default_factory=dict)
    runs: list[_Run] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    examples: list[Any] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def executions(self) -> tuple[Execution, ...]:
        """Return how the bundle's graph may be run."""
        return tuple(Execution(run.engine, run.precision) for run in self.runs)


def read_record(folder: Path) -> Record | None:
    """Return a folder's record; None if it has none, as in a folder that transformers wrote.

    Raises: FormatError if it is damaged, was edited in an entry that decides what the bundle
        answers, or was written by newer code.
    """
    if not has_file(folder, RECORD):
        return None
    entries = read_json(folder / RECORD)
    record = _typed(folder, entries)
    sealed = record.format_version > 1 or record.digest
    if sealed and record.digest != (made := recorded_digest(entries)):
        raise FormatError(
            f"{folder / RECORD}: wanted the digest {record.digest[:12] or 'of the bundle'}, its "
            f"{', '.join(ANSWERS)} and files have {made[:12]}: it was edited since the bundle was "
            f"written; {_ways_out(folder)}"
        )
    return record


def _typed(folder: Path, entries: Mapping[str, Any]) -> Record:
    path = folder / RECORD
    version = entries.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{path}: wanted a format_version, got none: copy the bundle again")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: wanted format_version {FORMAT_VERSION} or older, got {version}: "
            "it was made by a newer raybert, update this one"
        )
    record: Record = as_type(Record, entries, str(path))
    if CONFIG not in record.files or record.files.keys().isdisjoint({WEIGHTS, *GRAPHS.values()}):
        raise FormatError(
            f"{path}: wanted the sha256 of at least {CONFIG} and {WEIGHTS}, or an ONNX "
            "graph, under files: copy the bundle again"
        )
    return record


def recorded_digest(entries: Mapping[str, Any]) -> str:
    """Return the digest of a bundle with this record: over its files and, since version 2,
    `ANSWERS`."""
    sha256s = dict(entries["files"])
    if entries["format_version"] > 1:
        answers = {name: entries.get(name) for name in ANSWERS}
        text = json.dumps(answers, sort_keys=True, ensure_ascii=True)
        sha256s[RECORD] = hashlib.sha256(text.encode()).hexdigest()
    return digest_of(sha256s)


def write_record(folder: Path, entries: Mapping[str, Any], names: Iterable[str]) -> None:
    """Write the record of the files in a folder.

    Args:
        entries: the fields of `Record` without `format_version`, `digest` and `files`.
        names: the files.
    """
    record = {"format_version": FORMAT_VERSION, "digest": "", **entries}
    record["files"] = sha256s_of(folder, names)
    record["digest"] = recorded_digest(record)
    files.write_json(str(folder / RECORD), record)


def verified(folder: Path) -> tuple[Record | None, dict[str, str], str]:
    """Check a bundle's files; return its record, the sha256 of each file, and the bundle's digest.

    Raises: FormatError if a file is missing or changed, or leads out of the folder.
    """
    record = read_record(folder)
    if record is None:
        names = [name for name in FOREIGN_FILES if has_file(folder, name)]
        sha256s = sha256s_of(folder, dict.fromkeys([CONFIG, *names, *weight_files(folder)]))
        return None, sha256s, digest_of(sha256s)
    sha256s = sha256s_of(folder, record.files)
    for name, sha256 in sha256s.items():
        if sha256 != record.files[name]:
            raise FormatError(
                f"{folder / name}: wanted sha256 {record.files[name][:12]}, got {sha256[:12]}: the "
                f"file has changed since the bundle was written; {_ways_out(folder)}"
            )
    labels = named_labels(read_json(folder / CONFIG), str(folder / CONFIG))
    if labels and record.task is not None and record.labels != [*labels.values()]:
        raise FormatError(
            f"{folder / RECORD}: wanted the labels in {CONFIG}, {as_json([*labels.values()])}, got "
            f"{as_json(record.labels)}: they were edited since the bundle was written; "
            f"{_ways_out(folder)}"
        )
    return record, sha256s, record.digest or digest_of(sha256s)


def renew(folder: str | Path) -> str:
    """Make a bundle valid again that was edited, and update one that an older version wrote.

    Its record is rewritten for the files as they are now. Labels that were edited in the record or
    in `config.json` are copied to the other. Returns: its new digest.
    Raises: FormatError if it has no record, a file is missing, or the labels were edited in both.
    """
    folder = Path(folder)
    entries = read_json(folder / RECORD)
    record, path = _typed(folder, entries), str(folder / CONFIG)
    config = read_json(folder / CONFIG)
    labels = [*named_labels(config, path).values()]
    if record.labels is not None and labels and record.labels != labels:
        if sha256s_of(folder, [CONFIG])[CONFIG] == record.files[CONFIG]:
            files.write_json(path, config | label_entries(record.labels))
        elif record.digest == recorded_digest(entries):
            entries["labels"] = labels
        else:
            raise FormatError(
                f"{folder}: wanted the same labels in {RECORD} and {CONFIG}, both of which were "
                f"edited, got {as_json(record.labels)} and {as_json(labels)}: write the right ones "
                "in both"
            )
    known = {name: value for name, value in entries.items() if name not in _WRITTEN}
    write_record(folder, known, record.files)
    return bundle_digest(folder)


def bundle_digest(folder: str | Path) -> str:
    """Return `Bundle.digest` without loading the model; checks every file like `load_bundle`.

    Raises: FormatError if a file is missing or changed.
    """
    return verified(Path(folder))[2]


def bundle_files(folder: str | Path) -> list[str]:
    """Return the files that make up a bundle, as sorted paths, ignoring others in its folder.

    Raises: FormatError if one is missing or changed.
    """
    record, sha256s, _ = verified(Path(folder))
    return sorted([*sha256s, *([] if record is None else [RECORD])])


def _ways_out(folder: Path) -> str:
    program = f"from bert_core.bundle.record import renew; renew({str(folder)!r})"
    return (
        "copy or write the bundle again, or accept what is there, as another model, with "
        f"python -c {shlex.quote(program)}"
    )
