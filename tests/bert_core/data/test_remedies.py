"""Every command that a message about files names does what the message says, and loses nothing."""

import ast
import csv
import gzip
import io
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bert_core import files
from bert_core.data import tables
from bert_core.data.tables import table_rows
from bert_core.errors import CorpusError

# What careless conversions lose: missing values, leading zeros, dates, line ends, quotes, blanks.
ROWS = [
    {"text": "None", "label": "01"},
    {"text": "NA", "label": "007"},
    {"text": 'she said "no; | thanks"', "label": "2026-01-02"},
    {"text": "two\r\nlines, é", "label": "1.50"},
    {"text": " nan ", "label": "True"},
]
PLAIN = [row for row in ROWS if not {*'"\r\n'} & {*row["text"]}]


def delimited(mark: str, rows: list[dict[str, str]] = ROWS, *, quoted: bool = True) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(
        text,
        ["text", "label"],
        delimiter=mark,
        quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_NONE,
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow(make: Callable) -> bytes:
    table = pa.Table.from_pylist(ROWS)
    sink = io.BytesIO()
    with make(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def sheet() -> bytes:
    openpyxl = pytest.importorskip("openpyxl", reason="openpyxl reads .xlsx for pandas")
    book, sink = openpyxl.Workbook(), io.BytesIO()
    for row in [["text", "label"], *([row["text"], row["label"]] for row in ROWS)]:
        book.active.append(row)
    book.save(sink)
    return sink.getvalue()


def by_pandas(orient: str, **options: Any) -> Callable[[], bytes]:
    """What pandas itself writes."""

    def written() -> bytes:
        import pandas as pd

        return pd.DataFrame(ROWS).to_json(orient=orient, **options).encode()

    return written


# The name of a file, its contents, and the rows that it should come to.
CASES: dict[str, tuple[str, Callable[[], bytes], list[dict[str, str]]]] = {
    "semicolons": ("a.csv", lambda: delimited(";"), ROWS),
    "bars": ("a.csv", lambda: b"\xef\xbb\xbf" + delimited("|"), ROWS),
    "semicolons, packed": ("a.csv.gz", lambda: gzip.compress(delimited(";")), ROWS),
    "quoted tabs": ("a.csv", lambda: delimited("\t"), ROWS),
    "tabs": ("a.csv", lambda: delimited("\t", PLAIN, quoted=False), PLAIN),
    "commas": ("a.tsv", lambda: delimited(","), ROWS),
    "UTF-16": ("a.csv", lambda: delimited(",").decode().encode("utf-16"), ROWS),
    "WINDOWS-1252": ("a.csv", lambda: delimited(",").decode().encode("cp1252"), ROWS),
    "an Arrow file": ("a.arrow", lambda: arrow(pa.ipc.new_file), ROWS),
    "an Arrow stream": ("a.arrow", lambda: arrow(pa.ipc.new_stream), ROWS),
    "pandas, by columns": ("a.json", by_pandas("columns"), ROWS),
    "pandas, by columns, as lines": ("a.jsonl", by_pandas("columns"), ROWS),
    "pandas, by columns, indented": ("a.json", by_pandas("columns", indent=2), ROWS),
    "pandas, by columns, packed": (
        "a.json.gz",
        lambda: gzip.compress(by_pandas("columns")()),
        ROWS,
    ),
    "pandas, by index": ("a.json", by_pandas("index"), ROWS),
    "pandas, split": ("a.json", by_pandas("split"), ROWS),
    "pandas, table": ("a.json", by_pandas("table", index=False), ROWS),
    "a sheet": ("a.xlsx", sheet, [row | {"text": row["text"].replace("\r", "")} for row in ROWS]),
}
COMMAND = re.compile(r"`([^`]+)`")
RENAME = re.compile(r"name the file \.(\w+)")


def read(path: str) -> list[dict[str, str]]:
    return [dict(row) for row in table_rows(files.read_contents(path), path)]


def follow(message: str, path: Path) -> Path:
    """The file that there is once somebody has done what a message says."""
    if "decompress it" in message:
        path = path.rename(path.with_suffix(".packed"))
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path = path.with_suffix("")
    before = {*path.parent.iterdir()}
    if renamed := RENAME.search(message):
        return path.rename(path.with_suffix(f".{renamed[1]}"))
    [command] = COMMAND.findall(message)
    if command.startswith("iconv"):
        new = path.with_name(f"new{path.suffix}")
        with open(path, "rb") as given, open(new, "wb") as taken:
            subprocess.run(command.split(), stdin=given, stdout=taken, check=True)
        return new
    import pandas as pd

    exec(command, {"csv": csv, "json": json, "pandas": pd, "pyarrow": pa})
    [new] = {*path.parent.iterdir()} - before
    return new


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # open(…) in one line
@pytest.mark.parametrize("case", CASES)
def test_following_a_messages_advice_gives_the_rows_and_loses_nothing(
    tmp_path: Path, case: str
) -> None:
    name, data, rows = CASES[case]
    (tmp_path / name).write_bytes(data())
    with pytest.raises(CorpusError) as raised:
        read(str(tmp_path / name))
    assert read(str(follow(str(raised.value), tmp_path / name))) == rows


def commands_in(path: Path) -> set[str]:
    """The first word of each command in the messages of a module."""
    tree = ast.parse(path.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
              for part in node.values}  # fmt: skip
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in inside | notes
    ]
    return {found[1] for text in texts for found in re.finditer(r"`([a-z_.…]+)[ (]", text)}


def test_every_command_in_a_readers_messages_is_run_here() -> None:
    root = Path(tables.__file__).parents[2]
    readers = [
        *(root / "bert_core" / "data").glob("*.py"),
        *(root / "pipelines" / "corpus").rglob("*.py"),
        root / "bert_core" / "files.py",
    ]
    named = set.union(*map(commands_in, readers)) - {"raybert"}  # the documentation runs these
    assert named == {
        "csv.writer", "iconv", "pandas.read_excel", "pyarrow.parquet.write_table", "….to_json",
    }  # fmt: skip


def test_a_file_that_iconv_cannot_take_is_not_halved(tmp_path: Path) -> None:
    """A byte that WINDOWS-1252 does not have: iconv says so, rather than leave it out."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\n\x81,x\n")
    with pytest.raises(CorpusError) as raised:
        read(str(path))
    with pytest.raises(subprocess.CalledProcessError):
        follow(str(raised.value), path)
