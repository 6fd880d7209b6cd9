"""Bytes to labelled records, in the formats in which authors publish their sets. Pure: no files.

A record has the columns of its source under their original names; `LabelledFormat.columns` says
which of them hold the fields of a task. `bert_core.tasks.shapes` converts records for the tasks.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bert_core.data.contents import HEAD_BYTES, check_is_itself
from bert_core.data.formats import Errors, decode_utf8
from bert_core.data.json_rows import Unread, json_value
from bert_core.data.parquet import MAGIC
from bert_core.data.tables import check_header, not_utf8_in, parquet_rows, table_rows
from bert_core.errors import ConfigError, CorpusError
from bert_core.wording import one_of, shown

Record = Mapping[str, Any]
CONLLU_COLUMNS = (
    "id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc",
)  # fmt: skip


class Comment(str):
    """A line that was taken for a comment, in a format that does not say how they are marked."""

    __slots__ = ()


Line = Record | Comment | Unread | None
Reader = Callable[[bytes, str], Sequence[Line]]


@dataclass(frozen=True, kw_only=True)
class LabelledFormat:
    """How to read one kind of file."""

    read: Reader
    """Bytes and their source's name → records, those that cannot be read, and the comments among
    them; None stands for a broken line, in sets that are published with such lines.
    Raises: CorpusError for a file that is not of this kind."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Field of the task → the column that holds it, if that has another name."""
    source: str
    """Who publishes it."""


@dataclass(frozen=True, kw_only=True)
class LabelledFile:
    """The records of a file, and what else is in it."""

    records: Sequence[Record]
    columns: dict[str, str]
    """Field of the task → the column that holds it, if that has another name."""
    numbers: Sequence[int]
    """The number of each record in the file, from 1; comments are not counted."""
    unread: Mapping[int, Unread]
    """Number → where a row that cannot be read is, and why it cannot."""
    broken: int
    """How many lines are broken as published."""
    comments: Sequence[Comment]
    """Lines that were taken for none."""

    @property
    def rows(self) -> int:
        """The number of rows in the file, including those that cannot be read or are broken."""
        return len(self.records) + len(self.unread) + self.broken


def labelled_records(data: bytes, source: str, name: str | None) -> LabelledFile:
    """Return the records of a file, and which columns hold a task's fields.

    Sets are also published as Parquet, with the original column names: such a file is read as
    Parquet, even if `name` says otherwise.

    Args:
        data: the file's contents, decompressed.
        source: the file's name.
        name: a key of `FORMATS`; None reads a table, whose kind is detected from contents and
            suffix.
    Raises: ConfigError for an unknown name; CorpusError for a file that is not of that format.
    """
    if name is None:
        rows = table_rows(data, source, keep=True)
        if len(rows) == 1 and not isinstance(rows[0], Unread):
            _check_is_rows(rows[0], source)
        return _sorted(rows, {})
    if name not in FORMATS:
        raise ConfigError(f"format: wanted {one_of(FORMATS)}, got {name!r}")
    check_is_itself(data[:HEAD_BYTES], source)
    labelled_format = FORMATS[name]
    columns = labelled_format.columns
    if data.startswith(MAGIC):
        records = parquet_rows(data, source)
        first = records[0] if records else {}
        return _sorted(
            records, {name: column for name, column in columns.items() if column in first}
        )
    return _sorted(labelled_format.read(data, source), dict(columns))


def _sorted(lines: Sequence[Line], columns: dict[str, str]) -> LabelledFile:
    """Sort the lines or rows of a file into records, comments and rows that cannot be read; None
    stands for a broken line."""
    comments = [line for line in lines if isinstance(line, Comment)]
    records: list[Record] = []
    numbers: list[int] = []
    unread: dict[int, Unread] = {}
    for number, line in enumerate((line for line in lines if not isinstance(line, Comment)), 1):
        if isinstance(line, Unread):
            unread[number] = line
        elif line is not None:
            records.append(line)
            numbers.append(number)
    broken = len(lines) - len(comments) - len(records) - len(unread)
    return LabelledFile(
        records=records,
        columns=columns,
        numbers=numbers,
        unread=unread,
        broken=broken,
        comments=comments,
    )


def _check_is_rows(record: Record, source: str) -> None:
    """Check that the only object of a JSON file is a row.

    Raises: CorpusError if it holds the articles of SQuAD, or several splits, as CLINC150's file.
    """
    lists = {
        name: value
        for name, value in record.items()
        if isinstance(value, list) and value and isinstance(value[0], dict | list)
    }
    if not lists or not isinstance(record, dict):
        return
    name, items = next(iter(lists.items()))
    if name == "data" and isinstance(items[0], dict) and "paragraphs" in items[0]:
        raise CorpusError(f"{source}: wanted rows, got SQuAD's articles: give format squad")
    if f"oos_{name}" in record or name.removeprefix("oos_") in ("train", "val", "test"):
        raise CorpusError(
            f"{source}: wanted rows, got the parts {', '.join(lists)}: give format clinc_train, "
            "clinc_val or clinc_test if it is CLINC150's, or write each part to a file"
        )


def _tsv(*names: str, errors: Errors = "fail") -> Reader:
    """Return a reader of tab-separated lines with literal quotes; the header is `names`, or the
    first line if there are none.

    A first line that begins with `index` is always a header: GLUE's test files have one. If
    `errors` is "skip", None stands for a line with a different number of columns.
    """

    def read(data: bytes, source: str) -> list[Line]:
        rows = [
            (number, line.rstrip("\r").split("\t"))
            for number, line in enumerate(_lines_of(data), 1)
            if line.strip(" \t\r")
        ]
        named = bool(names) and not (rows and rows[0][1][0] == "index")
        header = list(names) if named else (rows.pop(0)[1] if rows else [])
        if fault := not_utf8_in(header):
            raise CorpusError(f"{source}, line 1: {fault}")
        check_header(header, source)
        records: list[Line] = []
        for number, row in rows:
            # Files without a header may have more columns than are named.
            fits = len(row) >= len(header) if named else len(row) == len(header)
            if fault := not_utf8_in(row):
                records.append(Unread(f"line {number:,}: {fault}"))
            elif fits:
                records.append(dict(zip(header, row, strict=False)))
            elif errors == "skip":
                records.append(None)
            else:
                fault = (
                    f"wanted {len(header)} columns separated by tabs ({', '.join(header)}), "
                    f"got {len(row)}: correct or remove the line"
                )
                records.append(Unread(f"line {number:,}: {fault}"))
        return records

    return read


# Blanks and tabs separate columns, and nothing else does: a no-break space is part of a token.
_BLANK = " \t\r"
_BLANKS = re.compile(" +")
_BOUNDARY = re.compile(r"-DOCSTART-|#\s*(?:begin|end) document\b")
_COMMENT = re.compile(r"#(?:[ \t]|$)")
_ASSIGNMENT = re.compile(r"#[ \t]*[\w.:-]+[ \t]*=")
_COLUMNS = re.compile(r"#[ \t]*global\.columns[ \t]*=[ \t]*(.+)", re.IGNORECASE)


def _conll(data: bytes, source: str) -> list[Line]:
    """Read sentences between blank lines, one token per line; columns `0`, `1`, … and `-1`, the
    last.

    The number of columns is that of most lines. A line with `#` and a blank at the beginning of a
    sentence is a comment (`# id 5239d808`, `# s1`), unless it looks like a token: it has that many
    columns, and another token has the same value in the last column.
    """
    lines = _lines_of(data)
    sound = [row for row in map(_cells, lines) if row and not _COMMENT.match(row[0])]
    usual = Counter(map(len, sound)).most_common(1)
    columns = max(2, usual[0][0]) if usual else 2
    tags = {row[-1] for row in sound}

    def is_comment(line: str) -> bool:
        row = _cells(line)
        is_token = len(row) == columns and row[-1] in tags and not _ASSIGNMENT.match(line)
        return bool(_COMMENT.match(line)) and not is_token

    records: list[Line] = []
    for sentence in _sentences(lines, columns, is_comment):
        if isinstance(sentence, Comment | Unread):
            records.append(sentence)
            continue
        cells = [list(column) for column in zip(*sentence, strict=True)]
        record = {str(place): column for place, column in enumerate(cells)}
        records.append(record | {"-1": cells[-1]})
    return records


def _conllu(data: bytes, source: str) -> list[Line]:
    """Read sentences of CoNLL-U by column name, without ranges (`1-2`) and empty nodes (`8.1`).

    CoNLL-U Plus names its columns in the first line (`# global.columns = ID FORM …`), in any order,
    and may have no ids.
    """
    lines = _lines_of(data)
    named = _COLUMNS.match(lines[0])
    names = tuple(named[1].lower().split()) if named else CONLLU_COLUMNS
    if fault := not_utf8_in(names):
        raise CorpusError(f"{source}, line 1: {fault}")
    check_header(names, source)
    place = names.index("id") if "id" in names else None
    records: list[Line] = []
    for sentence in _sentences(lines, len(names), lambda line: line.startswith("#"), names):
        if isinstance(sentence, Unread):
            records.append(sentence)
        elif isinstance(sentence, Comment):
            continue
        elif words := [row for row in sentence if place is None or row[place].isdecimal()]:
            columns = zip(*words, strict=True)
            records.append(
                {name: list(column) for name, column in zip(names, columns, strict=True)}
            )
    return records


def _lines_of(data: bytes) -> list[str]:
    """Return the lines. Bytes that are not UTF-8 are kept as surrogates, so that they make only
    their own line unreadable."""
    return data.decode(errors="surrogateescape").removeprefix("\ufeff").split("\n")


def _cells(line: str) -> list[str]:
    """Return the columns of a line, split at tabs if it has any, otherwise at blanks; empty for a
    blank line or a document boundary."""
    line = line.rstrip("\r")
    if not line.strip(_BLANK) or _BOUNDARY.match(line):
        return []
    return line.split("\t") if "\t" in line else _BLANKS.split(line.strip(" "))


def _sentences(
    lines: Sequence[str],
    columns: int,
    is_comment: Callable[[str], bool],
    names: Sequence[str] = (),
) -> Iterator[list[list[str]] | Comment | Unread]:
    """Yield the sentences, as their rows between blank lines, and the comments before them. A
    sentence with a row that does not have `columns` columns is yielded as `Unread`.

    Args:
        is_comment: whether a line is a comment. It is called only for lines that begin a sentence,
            unless there are `names`: such formats have comments anywhere.
        names: names of the columns, if the format has them; its columns are separated by tabs.
    """
    rows: list[list[str]] = []
    fault: Unread | None = None
    wanted = f"{columns} columns"
    if names:
        wanted += f" between tabs ({', '.join(names)})"
    for number, line in enumerate([*lines, ""], 1):
        if not (row := _cells(line)):
            if rows:
                yield fault or rows
            rows, fault = [], None
            continue
        if (names or not rows) and is_comment(line):
            yield Comment(line.strip(_BLANK).encode(errors="replace").decode())
            continue
        rows.append(row)
        wrong = not_utf8_in(row)
        if not wrong and len(row) != columns:
            wrong = (
                f"wanted {wanted}, got {len(row)} ({line.strip(_BLANK)[:80]!r}): correct the line, "
                "or remove its sentence"
            )
        if wrong and fault is None:
            fault = Unread(f"line {number:,}: {wrong}")


def _squad(data: bytes, source: str) -> list[Line]:
    """Read the questions of SQuAD 1.1 or 2.0 with their passages, in the order of the file."""
    records: list[Line] = []
    articles = _json(data, source, "squad")
    if not isinstance(articles, dict):
        do = "correct it"
        if isinstance(articles, list):
            do = "leave the format out if each is a row with question, context and answers"
        raise CorpusError(
            f"{source}: wanted an object as SQuAD publishes it, with data → paragraphs → qas, "
            f"got {shown(articles)}: {do}"
        )
    try:
        for article in articles["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"] if paragraph["qas"] else ""
                for question in paragraph["qas"]:
                    records.append(_question(question, context, f"question {len(records) + 1:,}"))
    except KeyError as error:
        raise CorpusError(
            f"{source}: wanted SQuAD's data → paragraphs → qas, at question {len(records) + 1} "
            f"there is no {error}: give a file as published by SQuAD"
        ) from error
    except (TypeError, AttributeError) as error:
        raise CorpusError(
            f"{source}: wanted SQuAD's data → paragraphs → qas, got something else at question "
            f"{len(records) + 1} ({error}): give a file as published by SQuAD"
        ) from error
    return records


def _question(question: Any, context: Any, place: str) -> Record | Unread:
    if not isinstance(question, dict) or "question" not in question:
        return Unread(
            f"{place}: wanted an object with a question, as SQuAD publishes it, got "
            f"{shown(question)}: correct or remove it"
        )
    # Without the key it is unknown whether there is an answer: a test set.
    answers = question.get("answers", [] if question.get("is_impossible") else None)
    return {
        "id": question.get("id"),
        "question": question["question"],
        "context": context,
        "answers": answers,
    }


def _clinc(split: str) -> Reader:
    """Return a reader of one split of CLINC150's file, with its out-of-scope rows (`oos`)."""

    def read(data: bytes, source: str) -> list[Line]:
        splits = _json(data, source, f"clinc_{split}")
        if not isinstance(splits, dict) or split not in splits:
            raise CorpusError(
                f"{source}: wanted CLINC150's splits, found no {split!r}: give its data_full.json"
            )
        pairs: list[Any] = []
        for name in (split, f"oos_{split}"):
            of_split = splits.get(name, [])
            if not isinstance(of_split, list):
                raise CorpusError(
                    f"{source}: wanted a list of pairs as CLINC150's split {name!r}, got "
                    f"{shown(of_split)}: give its data_full.json"
                )
            pairs += of_split
        return [
            {"text": pair[0], "intent": pair[1]}
            if isinstance(pair, list) and len(pair) == 2
            else Unread(
                f"pair {number:,} of {split}: wanted a list of text and intent, got {shown(pair)}: "
                "correct or remove it"
            )
            for number, pair in enumerate(pairs, 1)
        ]

    return read


def _json(data: bytes, source: str, name: str) -> Any:
    text = decode_utf8(data, source).removeprefix("\ufeff")
    way_out = "copy it again" if text.lstrip()[:1] in ("{", "[") else "give its own format"
    return json_value(text, f"{source}: wanted JSON, as in the format {name}", way_out)


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
