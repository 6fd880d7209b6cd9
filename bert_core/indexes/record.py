"""`index.json`: what an index holds, what made its vectors, and how well it finds them."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from bert_core import files
from bert_core.checks import PositiveInt, Range
from bert_core.errors import FormatError
from bert_core.inference.vector_spaces import VectorSource, read_source
from bert_core.typed import as_type, parse_json

FORMAT_VERSION = 1
RECORD, TABLE = "index.json", "rows"
"""The record, and LanceDB's name of the table."""
ID, VECTOR = "_id", "_vector"
"""Columns that an index adds to the rows'."""
OWN_COLUMNS = (ID, VECTOR, "_distance", "_score", "_rowid", "_rowaddr", "_rowoffset",
               "_row_created_at_version", "_row_last_updated_at_version",
               "_relevance_score")  # fmt: skip
"""Names that columns of rows cannot have: an index or LanceDB adds them."""

Kind = Literal["exact", "ivf_pq"]
Language = Literal["danish", "dutch", "english", "finnish", "french", "german", "greek",
                   "hungarian", "italian", "norwegian", "portuguese", "romanian", "russian",
                   "spanish", "swedish", "turkish"]  # fmt: skip
"""Languages whose words are stemmed."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of an approximate index a search reads; the results of an exact one need none."""

    nprobes: PositiveInt = 1
    """Cells of vectors that are read."""
    refine_factor: PositiveInt = 1
    """How many times the wanted number of rows are compared by their full vectors."""


@dataclass(frozen=True, kw_only=True)
class IndexRecord:
    """What an index is."""

    rows: int
    kind: Kind
    """`exact` compares every vector, `ivf_pq` the nearest cells of compressed ones."""
    effort: Effort
    recall: Annotated[float, Range(least=0, most=1)]
    """Share of the `recall_at` nearest rows that are found, measured against exact search."""
    recall_at: int
    recall_queries: int
    """Rows whose vectors were searched for to measure it; 0 if the search is exact."""
    columns: list[str]
    """Columns of the rows, without those that the index adds."""
    text: str | None
    """The column whose words are searched; None without them."""
    language: Language | None
    """Language of the words' stems; None for words as they are."""
    vectors: VectorSource
    """What made the vectors."""


def write_record(folder: str, record: IndexRecord) -> str:
    """Write the record; return its path."""
    entries = asdict(record) | {"vectors": record.vectors.entries()}
    path = files.join(folder, RECORD)
    files.write_json(path, {"format_version": FORMAT_VERSION, **entries})
    return path


def read_record(folder: str) -> IndexRecord:
    """Raises: FormatError if it is missing, damaged, or was written by newer code."""
    path = files.join(folder, RECORD)
    try:
        entries: Any = parse_json(files.read_bytes(path), path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FormatError(
            f"{folder}: wanted the folder of an index, it has no {RECORD}: make one with "
            "`raybert index`, or give another folder"
        ) from error
    version = entries.get("format_version") if isinstance(entries, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: wanted format_version {FORMAT_VERSION} or older, got {version}: it was made "
            "by a newer raybert, update this one"
        )
    record: IndexRecord = as_type(IndexRecord, entries, path)
    read_source(entries["vectors"], path)
    return record
