"""Detects the format of a file from its first bytes, and from its name where these do not tell."""

import re

from bert_core import files
from bert_core.data.json_rows import is_of_lines, looks_like_json
from bert_core.data.parquet import MAGIC
from bert_core.errors import CorpusError

HEAD_BYTES = 1 << 13
"""How many bytes of a file's contents tell what it holds."""
JSON_ENDINGS = ("jsonl", "ndjson", "json")
# The name decides for these: text may contain anything, even what looks like JSON.
_BY_NAME = ("txt", "md", "csv", "tsv")
_DUMP = re.compile(rb"<mediawiki\b|<page>")

# First bytes of formats that are not read → their names, and how to convert the file.
_TO_PARQUET = "write its table as .parquet"
_FOREIGN = {
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("an older Office document", "save it as .xlsx or .csv"),
    b"%PDF-": ("PDF", "write its text as .txt"),
    b"ARROW1": ("an Arrow file", _TO_PARQUET),
    b"\xff\xff\xff\xff": ("an Arrow stream", _TO_PARQUET),
    b"SQLite format 3\x00": ("an SQLite database", _TO_PARQUET),
    b"Obj\x01": ("Avro", _TO_PARQUET),
    b"ORC": ("ORC", _TO_PARQUET),
    b"\x89HDF": ("HDF5", _TO_PARQUET),
    b"\x04\x22\x4d\x18": ("lz4", "decompress it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
}
_LIKE_WORDS = (b"ORC", b"ARROW1", b"%PDF-")
"""The signatures that a text may begin with, too."""
_POINTER = b"version https://git-lfs.github.com/spec/v1\n"
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
_SHEET = (
    "with openpyxl installed, "
    "`pandas.read_excel({path!r}, dtype=str, keep_default_na=False)"
    ".to_csv({target!r}, index=False)`"
)
_ARROW = "`pyarrow.parquet.write_table(pyarrow.ipc.open_{kind}({path!r}).read_all(), {target!r})`"


def format_of(head: bytes, path: str) -> str:
    """Return the format of a file as a suffix, such as "jsonl": the detected one, or else that of
    its name. "jsonl" has one object per line; "json" is a list, or objects over several lines.

    Args:
        head: the first `HEAD_BYTES` of its contents, decompressed.
    Raises: CorpusError if the contents cannot be of the format that the name says.
    """
    suffix, _ = files.suffixes(path)
    check_is_itself(head, path)
    if head.startswith(MAGIC):
        return "parquet"
    if suffix in JSON_ENDINGS:
        return "jsonl" if is_of_lines(head) else "json"
    if suffix in _BY_NAME:
        return suffix
    if _DUMP.search(head):
        return "xml"
    if looks_like_json(head):
        return "jsonl" if is_of_lines(head) else "json"
    return suffix


def check_is_itself(head: bytes, path: str) -> None:
    """Check that the contents are what the name says: downloads and renames may put another file
    in its place.

    Raises: CorpusError for a Git LFS pointer; for a web page that is not named .txt or .md; and for
        a file that has the name of a supported format but begins like an unsupported one.
    """
    suffix, _ = files.suffixes(path)
    fault = None
    if head.startswith(_POINTER):
        fault = "it is a pointer of Git LFS: have Git LFS fetch the file itself"
    elif suffix not in ("txt", "md") and _PAGE.match(head):
        fault = "it is a web page: download the file itself"
    elif suffix in ("parquet", *JSON_ENDINGS) or (
        suffix in _BY_NAME and not head.startswith(_LIKE_WORDS)
    ):
        fault = to_convert(head, path)
    if fault:
        raise CorpusError(f"{path}: wanted what its name says, {fault}")


def is_dump(head: bytes) -> bool:
    """Whether contents that begin with `head` are a part of a Wikipedia dump."""
    return _DUMP.search(head) is not None


def to_convert(head: bytes, path: str) -> str | None:
    """Return how to convert a file of an unsupported format; None if the format is unknown."""
    suffix, _ = files.suffixes(path)
    stem = path.removesuffix(f".{suffix}")
    if suffix == "xlsx":
        return _SHEET.format(path=path, target=f"{stem}.csv")
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        kind = "file" if head.startswith(b"ARROW1") else "stream"
        return _ARROW.format(kind=kind, path=path, target=f"{stem}.parquet")
    if head[257:262] == b"ustar":
        return "it is a tar archive: unpack it"
    return next(
        (f"it is {name}: {do}" for magic, (name, do) in _FOREIGN.items() if head.startswith(magic)),
        None,
    )
