"""Bytes to labelled records, in the formats in which authors publish their sets. Pure: no files.

A record has the columns of its source under their original names; `LabelledFormat.columns` says
which of them hold the fields of a task. `bert_core.tasks.shapes` converts records for the tasks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bert_core.data.contents import HEAD_BYTES, check_is_itself
from bert_core.data.json_rows import Unread
from bert_core.data.labelled.brat import brat
from bert_core.data.labelled.conll import conll, conllu, cupt
from bert_core.data.labelled.doccano import doccano
from bert_core.data.labelled.label_studio import label_studio
from bert_core.data.labelled.lines import (
    Comment,
    LabelledFormat,
    LeftOut,
    Line,
    Record,
    Unused,
)
from bert_core.data.labelled.prodigy import prodigy
from bert_core.data.labelled.published import clinc, squad, swag
from bert_core.data.labelled.pubtator import bioc, pubtator
from bert_core.data.labelled.semeval import semeval_relations
from bert_core.data.labelled.spacy_docs import spacy_docs
from bert_core.data.labelled.tsv import tsv
from bert_core.data.labelled.uima import uima_json, uima_xmi
from bert_core.data.labelled.webanno import webanno
from bert_core.data.parquet import MAGIC
from bert_core.data.tables import Quotes, parquet_rows, table_rows
from bert_core.errors import ConfigError, CorpusError
from bert_core.wording import one_of


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
    left_out: Mapping[str, int]
    """Why its tool says that rows are not to be used, such as "rejected" → how many."""
    unused: Mapping[str, int]
    """What the file says and no task reads, such as "relations" → how many."""

    @property
    def rows(self) -> int:
        """The number of rows in the file, including those that cannot be read, are broken or left
        out."""
        return len(self.records) + len(self.unread) + self.broken + sum(self.left_out.values())


def labelled_records(
    data: bytes,
    source: str,
    name: str | None,
    beside: bytes | None = None,
    *,
    header: bool = True,
    quotes: Quotes | None = None,
) -> LabelledFile:
    """Return the records of a file, and which columns hold a task's fields.

    Sets are also published as Parquet, with the original column names: such a file is read as
    Parquet, even if `name` says otherwise.

    Args:
        data: the file's contents, decompressed.
        source: the file's name.
        name: a key of `FORMATS`; None reads a table, whose kind is detected from contents and
            suffix.
        beside: the contents of the file that belongs to it, if the format has one.
        header, quotes: how a table is read, as in `table_rows`.
    Raises: ConfigError for an unknown name; CorpusError for a file that is not of that format.
    """
    if name is None:
        rows = table_rows(data, source, keep=True, header=header, quotes=quotes)
        first = next((row for row in rows if not isinstance(row, Unread)), None)
        if first is not None:
            if len(rows) == 1:
                _check_is_rows(first, source)
            _check_is_no_export(first, source)
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
    arguments = () if beside is None else (beside,)
    return _sorted(labelled_format.read(data, source, *arguments), dict(columns))


def _sorted(lines: Sequence[Line], columns: dict[str, str]) -> LabelledFile:
    """Sort the lines or rows of a file into records, rows that cannot be read or used, and what
    else it says; None stands for a broken line."""
    comments = [line for line in lines if isinstance(line, Comment)]
    unused = Counter[str]()
    for line in lines:
        if isinstance(line, Unused):
            unused[line.what] += line.count
    records: list[Record] = []
    numbers: list[int] = []
    unread: dict[int, Unread] = {}
    left_out = Counter[str]()
    broken = 0
    rows = (line for line in lines if not isinstance(line, Comment | Unused))
    for number, line in enumerate(rows, 1):
        if isinstance(line, Unread):
            unread[number] = line
        elif isinstance(line, LeftOut):
            left_out[line] += 1
        elif line is None:
            broken += 1
        else:
            records.append(line)
            numbers.append(number)
    return LabelledFile(
        records=records,
        columns=columns,
        numbers=numbers,
        unread=unread,
        broken=broken,
        comments=comments,
        left_out=left_out,
        unused={what: count for what, count in unused.items() if count},
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


def _check_is_no_export(record: Record, source: str) -> None:
    """Check that rows are not an annotation tool's, which say in their own way what their labels
    are, and which are rejected. Raises: CorpusError naming the format to give."""
    label = record.get("label", record.get("labels"))
    triples = [isinstance(each, list) for each in label] if isinstance(label, list) else []
    looks_like = {
        "prodigy": "answer" in record and ("_task_hash" in record or "_input_hash" in record),
        "label_studio": ("annotations" in record and isinstance(record.get("data"), Mapping))
        or ("annotation_id" in record and "lead_time" in record),
        "doccano": bool(triples) and all(triples),
        "spacy": isinstance(record.get("cats"), Mapping) and label is None,
        "uima_json": "%TYPES" in record or "%FEATURE_STRUCTURES" in record,
    }
    name = next((name for name, does in looks_like.items() if does), None)
    if name is not None:
        raise CorpusError(
            f"{source}: wanted rows of a task, got an export of {FORMATS[name].source}: give "
            f"format {name}, which reads it as that tool writes it"
        )


_ONE = {"text": "sentence"}
_TWO = {"text": "sentence1", "text_pair": "sentence2"}
_QUORA = {"text": "question1", "text_pair": "question2", "label": "is_duplicate"}
_MSR = {"text": "#1 String", "text_pair": "#2 String", "label": "Quality"}
_STS = ("genre", "filename", "year", "index", "score", "sentence1", "sentence2")
_GLUE = "GLUE"

FORMATS: dict[str, LabelledFormat] = {
    "cola": LabelledFormat(
        read=tsv("source", "label", "mark", "sentence"), columns=_ONE, source=_GLUE
    ),
    "sst2": LabelledFormat(read=tsv(), columns=_ONE, source=_GLUE),
    "mrpc": LabelledFormat(read=tsv(), columns=_MSR, source="Microsoft Research, GLUE"),
    "stsb": LabelledFormat(read=tsv(), columns=_TWO, source=_GLUE),
    # NOTE: some of its questions contain a line break, which turns one row into two broken lines.
    "qqp": LabelledFormat(read=tsv(errors="skip"), columns=_QUORA, source=_GLUE),
    "mnli": LabelledFormat(read=tsv(), columns=_TWO | {"label": "gold_label"}, source=_GLUE),
    "qnli": LabelledFormat(
        read=tsv(), columns={"text": "question", "text_pair": "sentence"}, source=_GLUE
    ),
    "rte": LabelledFormat(read=tsv(), columns=_TWO, source=_GLUE),
    "wnli": LabelledFormat(read=tsv(), columns=_TWO, source=_GLUE),
    "ax": LabelledFormat(read=tsv(), columns=_TWO, source=_GLUE),
    "sts_benchmark": LabelledFormat(read=tsv(*_STS), columns=_TWO, source="STS benchmark"),
    "clinc_train": LabelledFormat(
        read=clinc("train"), columns={"label": "intent"}, source="CLINC150"
    ),
    "clinc_val": LabelledFormat(read=clinc("val"), columns={"label": "intent"}, source="CLINC150"),
    "clinc_test": LabelledFormat(
        read=clinc("test"), columns={"label": "intent"}, source="CLINC150"
    ),
    "conll": LabelledFormat(
        read=conll,
        columns={"tokens": "0", "tags": "-1"},
        source="CoNLL-2003 and others",
    ),
    "conllu": LabelledFormat(
        read=conllu,
        columns={"tokens": "form", "tags": "upos"},
        source="Universal Dependencies",
    ),
    "cupt": LabelledFormat(
        read=cupt, columns={"tokens": "form", "tags": "mwe"}, source="PARSEME (CoNLL-U Plus)"
    ),
    "swag": LabelledFormat(read=swag, source="SWAG"),
    "squad": LabelledFormat(read=squad, source="SQuAD 1.1 and 2.0"),
    "label_studio": LabelledFormat(read=label_studio, source="Label Studio (JSON, JSON-MIN)"),
    "doccano": LabelledFormat(read=doccano, source="doccano (JSONL)"),
    "prodigy": LabelledFormat(read=prodigy, source="Prodigy (db-out)"),
    "brat": LabelledFormat(read=brat, source="brat", suffix=".ann", beside=".txt"),
    "webanno": LabelledFormat(read=webanno, source="WebAnno and INCEpTION (TSV 3)", suffix=".tsv"),
    "pubtator": LabelledFormat(read=pubtator, source="PubTator"),
    "bioc": LabelledFormat(read=bioc, source="BioC (XML)", suffix=".xml"),
    "semeval2010_task8": LabelledFormat(read=semeval_relations, source="SemEval-2010 task 8"),
    "spacy": LabelledFormat(read=spacy_docs, source="spaCy (DocBin, JSONL)"),
    "uima_xmi": LabelledFormat(
        read=uima_xmi,
        source="UIMA, INCEpTION (CAS XMI)",
        suffix=".xmi",
        beside="/TypeSystem.xml",
    ),
    "uima_json": LabelledFormat(
        read=uima_json, source="UIMA, INCEpTION (CAS JSON)", suffix=".json"
    ),
}
