"""Bytes to labelled records, in the formats in which authors publish their sets. Pure: no files.

A record has the columns of its source under their original names; `LabelledFormat.columns` says
which of them hold the fields of a task. What tasks make of records is left to
`bert_core.tasks.shapes`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bert_core.data.formats import Errors, decode_utf8
from bert_core.data.tables import check_header, parquet_rows, table_rows
from bert_core.errors import ConfigError, CorpusError
from bert_core.wording import one_of

Record = dict[str, Any]
Reader = Callable[[bytes, str], Sequence[Record | None]]
_PARQUET = b"PAR1"
CONLLU_COLUMNS = (
    "id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LabelledFormat:
    """How to read one kind of file."""

    read: Reader
    """Bytes and their source's name → records; None stands for a broken line, in sets that are
    published with such lines. Raises: CorpusError naming the line."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Field of the task → the column that holds it, if that has another name."""
    source: str
    """Who publishes it."""


def labelled_records(
    data: bytes, source: str, name: str | None
) -> tuple[Sequence[Record | None], dict[str, str]]:
    """The records of a file (None for a broken line), and which columns hold a task's fields.

    Sets are also published as Parquet, with the original column names: such a file is read as
    Parquet, even if `name` says otherwise.

    Args:
        data: decompressed, if `source` ends in .gz, .bz2 or .zst.
        name: of `FORMATS`; None reads a table, of the kind that the suffix of `source` names.
    Raises: ConfigError for an unknown name; CorpusError naming the bad line.
    """
    if name is None:
        return table_rows(data, source), {}
    if name not in FORMATS:
        raise ConfigError(f"format: wanted {one_of(FORMATS)}, got {name!r}")
    labelled_format = FORMATS[name]
    columns = labelled_format.columns
    if data.startswith(_PARQUET):
        records = parquet_rows(data, source)
        first = records[0] if records else {}
        return records, {name: column for name, column in columns.items() if column in first}
    return labelled_format.read(data, source), dict(columns)


def _tsv(*names: str, errors: Errors = "fail") -> Reader:
    """Reader of tab-separated lines with literal quotes; the header is `names` or the first line.

    A first line that begins with `index` is always a header: GLUE's test files have one. If
    `errors` is "skip", None stands for a line with a different number of columns.
    """

    def read(data: bytes, source: str) -> list[Record | None]:
        lines = decode_utf8(data, source).removeprefix("\ufeff").split("\n")
        rows = [
            (number, line.rstrip("\r").split("\t"))
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        named = bool(names) and not (rows and rows[0][1][0] == "index")
        header = list(names) if named else (rows.pop(0)[1] if rows else [])
        check_header(header, source)
        records: list[Record | None] = []
        for number, row in rows:
            # Files without a header may have more columns than are named.
            if len(row) >= len(header) if named else len(row) == len(header):
                records.append(dict(zip(header, row, strict=False)))
            elif errors == "skip":
                records.append(None)
            else:
                raise CorpusError(
                    f"{source}, line {number}: wanted {len(header)} columns separated by tabs "
                    f"({', '.join(header)}), got {len(row)}: correct or remove the line"
                )
        return records

    return read


def _conll(data: bytes, source: str) -> list[Record]:
    """Sentences between blank lines, one token per line; columns `0`, `1`, … and `-1`, the last."""
    records = []
    for rows in _sentences(data, source, ends=lambda line: line.startswith("-DOCSTART-")):
        columns = list(zip(*rows, strict=True))
        record = {str(place): list(column) for place, column in enumerate(columns)}
        records.append(record | {"-1": list(columns[-1])})
    return records


def _conllu(data: bytes, source: str) -> list[Record]:
    """Sentences of CoNLL-U by column name, without ranges (`1-2`) and empty nodes (`8.1`)."""
    records = []
    for rows in _sentences(
        data, source, passes=lambda line: line.startswith("#"), columns=len(CONLLU_COLUMNS)
    ):
        words = [row for row in rows if row[0].isdecimal()]
        if words:
            columns = zip(*words, strict=True)
            records.append(
                {name: list(column) for name, column in zip(CONLLU_COLUMNS, columns, strict=True)}
            )
    return records


def _sentences(
    data: bytes,
    source: str,
    *,
    passes: Callable[[str], bool] = lambda _: False,
    ends: Callable[[str], bool] = lambda _: False,
    columns: int | None = None,
) -> Iterator[list[list[str]]]:
    """Rows between blank lines; all rows of the file have as many columns as the first one.

    Args:
        passes: whether a line is to be skipped.
        ends: whether a line ends a sentence like a blank one.
        columns: how many columns rows have; None takes the first row's number.
    """
    rows: list[list[str]] = []
    text = decode_utf8(data, source).removeprefix("\ufeff")
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if not line.strip() or ends(line):
            if rows:
                yield rows
            rows = []
        elif not passes(line):
            row = line.rstrip("\r").split("\t" if "\t" in line else None)
            columns = columns or max(2, len(row))
            if len(row) != columns:
                raise CorpusError(
                    f"{source}, line {number}: wanted {columns} columns, got "
                    f"{len(row)} ({line.strip()[:80]!r}): correct the line, or remove its sentence"
                )
            rows.append(row)


def _squad(data: bytes, source: str) -> list[Record]:
    """Questions of SQuAD 1.1 or 2.0 with their passage, in the order of the file."""
    records: list[Record] = []
    try:
        for article in _json(data, source)["data"]:
            for paragraph in article["paragraphs"]:
                records.extend(
                    {
                        "id": question.get("id"),
                        "question": question["question"],
                        "context": paragraph["context"],
                        # Without the key it is unknown whether there is one: a test set.
                        "answers": question.get(
                            "answers", [] if question.get("is_impossible") else None
                        ),
                    }
                    for question in paragraph["qas"]
                )
    except (KeyError, TypeError) as error:
        raise CorpusError(
            f"{source}: wanted SQuAD's data → paragraphs → qas, at question {len(records) + 1} "
            f"there is no {error}: give a file as published by SQuAD"
        ) from error
    return records


def _clinc(split: str) -> Reader:
    """Reader of one split of CLINC150's file, with its rows that are out of scope (`oos`)."""

    def read(data: bytes, source: str) -> list[Record]:
        splits = _json(data, source)
        if not isinstance(splits, dict) or split not in splits:
            raise CorpusError(
                f"{source}: wanted CLINC150's splits, found no {split!r}: give its data_full.json"
            )
        pairs = [*splits[split], *splits.get(f"oos_{split}", [])]
        try:
            return [{"text": text, "intent": intent} for text, intent in pairs]
        except (ValueError, TypeError) as error:
            raise CorpusError(
                f"{source}: wanted a list of text and intent in {split!r}, found something else "
                f"({error}): give CLINC150's data_full.json"
            ) from error

    return read


def _json(data: bytes, source: str) -> Any:
    try:
        return json.loads(decode_utf8(data, source).removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{source}: wanted JSON, it cannot be read ({error}): copy it again"
        ) from error


_ONE = {"text": "sentence"}
_TWO = {"text": "sentence1", "text_pair": "sentence2"}
_QUORA = {"text": "question1", "text_pair": "question2", "label": "is_duplicate"}
_MSR = {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"}
_STS = ("genre", "filename", "year", "index", "score", "sentence1", "sentence2")
_GLUE = "GLUE"

FORMATS: dict[str, LabelledFormat] = {
    "cola": LabelledFormat(
        read=_tsv("source", "label", "mark", "sentence"), columns=_ONE, source=_GLUE
    ),
    "sst2": LabelledFormat(read=_tsv(), columns=_ONE, source=_GLUE),
    "mrpc": LabelledFormat(read=_tsv(), columns=_MSR, source="Microsoft Research, GLUE"),
    "stsb": LabelledFormat(read=_tsv(), columns=_TWO, source=_GLUE),
    # NOTE: some of its questions contain a line break, which turns one row into two broken lines.
    "qqp": LabelledFormat(read=_tsv(errors="skip"), columns=_QUORA, source=_GLUE),
    "mnli": LabelledFormat(read=_tsv(), columns=_TWO | {"label": "gold_label"}, source=_GLUE),
    "qnli": LabelledFormat(
        read=_tsv(), columns={"text": "question", "text_pair": "sentence"}, source=_GLUE
    ),
    "rte": LabelledFormat(read=_tsv(), columns=_TWO, source=_GLUE),
    "wnli": LabelledFormat(read=_tsv(), columns=_TWO, source=_GLUE),
    "ax": LabelledFormat(read=_tsv(), columns=_TWO, source=_GLUE),
    "sts_benchmark": LabelledFormat(read=_tsv(*_STS), columns=_TWO, source="STS benchmark"),
    "clinc_train": LabelledFormat(
        read=_clinc("train"), columns={"label": "intent"}, source="CLINC150"
    ),
    "clinc_val": LabelledFormat(read=_clinc("val"), columns={"label": "intent"}, source="CLINC150"),
    "clinc_test": LabelledFormat(
        read=_clinc("test"), columns={"label": "intent"}, source="CLINC150"
    ),
    "conll": LabelledFormat(
        read=_conll,
        columns={"tokens": "0", "tags": "-1"},
        source="CoNLL-2003 and others",
    ),
    "conllu": LabelledFormat(
        read=_conllu,
        columns={"tokens": "form", "tags": "upos"},
        source="Universal Dependencies",
    ),
    "squad": LabelledFormat(read=_squad, source="SQuAD 1.1 and 2.0"),
}
