"""Runs any number of rows through models, in parts: shared by `predict` and `extract`.

A part is a piece of the input and becomes one file. Parts that a killed run finished are kept. A
row that cannot be answered is put aside together with the reason.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from bert_core import files
from bert_core.checks import PositiveInt
from bert_core.data.formats import decode_utf8
from bert_core.data.json_rows import check_finite, jsonl_rows
from bert_core.data.parquet import plain_values
from bert_core.data.tables import TextTable
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.manifest import Output
from bert_core.tasks.shapes import Row, as_row, check_unicode, has_empty_text, own_columns
from pipelines.corpus.blocks import plan_blocks, read_pieces
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.readers import parquet, reader_of
from pipelines.corpus.readers.base import Block, CorpusFile, Extent
from pipelines.corpus.readers.delimited import read_cells
from pipelines.corpus.readers.parquet import read_row_groups
from pipelines.corpus.sources import Corpus
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.progress import CUT, counted, meter, print_remarks, say
from pipelines.runtime.result import SPREAD, Counts, Result, spread
from pipelines.runtime.stage_config import INPUT, StageConfig

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor
    from bert_core.tasks.base import Parameters

ROWS, REJECTED, PARTS = "rows", "rejected", "parts"
"""Folders of the output: the answered rows, the rows put aside, and a record per part."""
_MAYBE_NOT_FINITE = re.compile(rb"NaN|Infinity|[0-9][eE]\+?[0-9]{3}|[0-9]{309}")
PARTS_WANTED, LEAST_PART_BYTES, MOST_PART_BYTES = 50, 100_000, 16_000_000
EMPTY = "rows_with_empty_text"
BLANK = "blank_lines_left_out"


@dataclass(frozen=True, kw_only=True)
class RowsConfig(StageConfig):
    """Which rows to read."""

    source: str | tuple[str, ...] = field(metadata=INPUT)
    """Files, folders, globs or URIs of .parquet, or of .jsonl, .json, .csv, .tsv and .txt,
    optionally compressed (.gz, .bz2, .zst, .xz); `hf://datasets/<owner>/<name>` on the Hugging Face
    hub. The first line of .csv and .tsv names the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field of the task → its column, if that has another name: `{text = "body"}`."""
    part_bytes: PositiveInt | None = None
    """Approximate bytes of input per part; row groups of Parquet and compressed files are never
    cut. By default a fiftieth of the input, from 100 kB to 16 MB: a part is what progress counts,
    what a worker takes at a time, and what a kill loses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.source:
            raise ConfigError("source: wanted a path or a URI, got none")

    @property
    def corpus(self) -> CorpusConfig:
        """Return the source as a corpus to cut into blocks, one row per line."""
        return CorpusConfig(source=self.source, document_boundary="line")


@dataclass(frozen=True, slots=True)
class Read:
    """A row as it was read."""

    where: str
    columns: dict[str, Any]
    """From Parquet, only the columns needed."""
    place: int = 0
    """Its index in the current table."""
    is_of_cells: bool = False
    """Whether it is from CSV or TSV, where an empty cell may mean a missing value."""


class OutputPart:
    """Collects what one part yields as its rows are processed: each row's input, the rejected rows
    and the counts."""

    def __init__(self, config: RowsConfig, inputs: type) -> None:
        self.columns = columns_of(config, inputs)
        self.rejected: list[dict[str, Any]] = []
        self.rows = self.tokens = 0
        self.counts: Counter[str] = Counter()
        self._inputs = inputs
        self._optional = {field.name for field in fields(inputs) if not _is_needed(field)}

    @property
    def first_column(self) -> str:
        """Return the column that a line of plain text is read into."""
        return next(iter(self.columns.values()))

    def check_names(self, names: Iterable[str], where: str) -> None:
        """Raise CorpusError if a row has a column that is not allowed."""

    def reject(self, where: str, row: Any, kind: str, reason: str) -> None:
        """Put a row aside, counted under the reason `kind`."""
        self.rejected.append({"where": where, "kind": kind, "reason": reason, "row": row})

    def input_of(self, row: Read) -> Row | None:
        """Return the task's input; put the row aside and return None if the row lacks it."""
        values = {
            name: row.columns[column]
            for name, column in self.columns.items()
            if column in row.columns
            and not (row.is_of_cells and name in self._optional and row.columns[column] == "")
        }
        try:
            return as_row(self._inputs, values, "row")
        except InputError as error:
            self.reject(row.where, row.columns, "without_the_input", str(error))
            return None

    def take(self, inputs: Sequence[Row]) -> None:
        """Count rows that have been answered."""
        self.rows += len(inputs)
        empty = sum(has_empty_text(self._inputs, each) for each in inputs)
        self.counts[EMPTY] += empty

    def ask(
        self, predictor: "Predictor", rows: Sequence[Row], parameters: "Parameters"
    ) -> list[Any]:
        """Return a model's answer to each row. Raises: InputError if the model cannot take a
        row."""
        if not rows:
            return []
        windows = predictor.encode(rows, parameters)
        self.tokens += sum(window.tokens for window in windows)
        return predictor.decode(rows, windows, predictor.forward(windows), parameters)


def _is_needed(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def columns_of(config: RowsConfig, inputs: type) -> dict[str, str]:
    """Map each field of the input to its column. Raises: ConfigError for a field that does not
    exist."""
    names = [field.name for field in fields(inputs)]
    unknown = [name for name in config.columns if name not in names]
    if unknown:
        raise ConfigError(
            f"columns: wanted names of the fields {', '.join(names)}, got {unknown[0]}: "
            'give field = "column"'
        )
    return own_columns(config.columns, [inputs])


def check_files(
    config: RowsConfig,
    corpus: Corpus,
    inputs: type,
    check_names: Callable[[Iterable[str], str], None],
) -> None:
    """Raise ConfigError or CorpusError if every row of some file would be put aside."""
    columns = columns_of(config, inputs)
    needed = {
        columns[field.name]
        for field in fields(inputs)
        if field.name in config.columns or _is_needed(field)
    }
    rows = {file: reader_of(file).rows for file in corpus.files}
    tables = [file for file in corpus.files if rows[file] == "table"]
    odd = [file for file in corpus.files if rows[file] is None or (tables and file not in tables)]
    if odd:
        raise CorpusError(
            f"{odd[0].path}: wanted rows in Parquet, or in JSON, CSV, TSV and text, not both, "
            f"among {len(corpus.files):,} files: process them in separate runs"
        )
    for file in corpus.files:
        if rows[file] == "cells" and file.size_bytes:
            with files.open_stream(file.path) as stream:
                names = TextTable(stream, file.path).columns
            _check_columns(names, file.path, needed, check_names)
    schemas = [_checked_schema(file, needed, check_names) for file in tables]
    for file, schema in zip(tables, schemas, strict=True):
        if not schema.equals(schemas[0]):
            raise CorpusError(
                f"{file.path}: wanted the columns and types of {tables[0].path}, since both may "
                "become one file, got others: process them in separate runs"
            )


def _checked_schema(
    file: CorpusFile, needed: set[str], check_names: Callable[[Iterable[str], str], None]
) -> pa.Schema:
    with parquet.open_parquet(file.path) as opened:
        schema = opened.schema_arrow
    _check_columns(schema.names, file.path, needed, check_names)
    return schema


def _check_columns(
    present: Sequence[str],
    path: str,
    needed: set[str],
    check_names: Callable[[Iterable[str], str], None],
) -> None:
    check_names(present, path)
    absent = sorted(needed.difference(present))
    if absent:
        raise CorpusError(
            f"{path}: wanted a column {absent[0]!r}, there are: {', '.join(present)}: map it "
            'with columns = {field = "column"}'
        )
    repeated = [name for name, count in Counter(present).items() if count > 1]
    if repeated:
        raise CorpusError(
            f"{path}: wanted each column once, got {repeated[0]!r} {present.count(repeated[0])} "
            "times: write the file again with distinct names"
        )


@dataclass(frozen=True, kw_only=True)
class PartsCounts(Counts):
    """Counts of a stage that answers rows part by part."""

    rows: int
    rejected: int
    reasons: Mapping[str, int] = field(metadata=spread(f"{REJECTED}_{{}}"))
    """Rows that were put aside, by the reason."""
    remarks: Mapping[str, int] = field(metadata=SPREAD)
    parts: int
    tokens_per_s: float

    @property
    def line(self) -> str:
        return counted(self.rows, "row")


P = TypeVar("P", bound=PartsCounts)


def make_parts(
    stage: str,
    config: RowsConfig,
    corpus: Corpus,
    work: Callable[[tuple[int, Block]], dict[str, Any]],
    kind: type[P],
) -> Result[P]:
    """Do `work` on every part that is not finished yet.

    Args:
        work: writes a part and returns what `finish_part` returns.
        kind: the class of the counts.
    Raises: CorpusError if no row could be answered.
    """
    blocks = plan_blocks(corpus, config.part_bytes or usual_part_bytes(corpus))
    parts: dict[int, dict[str, Any]] = {}
    for number in range(len(blocks)):
        with suppress(FileNotFoundError):  # no earlier run has finished it
            parts[number] = files.read_json(_record_of(config, number))
    missing = [(number, block) for number, block in enumerate(blocks) if number not in parts]
    began, tokens = time.monotonic(), 0
    with meter(stage, len(blocks), "parts") as progress:
        progress.set(len(parts))
        for index, part in run_tasks(work, missing, config, use_gpu=True):
            parts[missing[index][0]] = part
            tokens += part["tokens"]
            progress.add()
    seconds = time.monotonic() - began
    rows, rejected = (sum(part[name] for part in parts.values()) for name in (ROWS, REJECTED))
    reasons, counts = Counter[str](), Counter[str]()
    for part in parts.values():
        reasons.update(part["reasons"])
        counts.update(part["counts"])
    why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    if not rows:
        raise CorpusError(
            f"{corpus.name}: wanted rows to answer, got none ({why or 'no rows at all'}): see "
            f"{files.join(config.output, REJECTED)}, name the right columns, or give another source"
        )
    odd = {name: counts[name] for name in (EMPTY, BLANK, CUT)}
    print_remarks(stage, odd, corpus.name)
    if rejected:
        say(f"{stage}: {rejected:,} put aside ({why}) in {files.join(config.output, REJECTED)}")
    return Result(
        outputs={
            name: Output(**about)
            for _, part in sorted(parts.items())
            for name, about in part["files"].items()
        },
        counts=kind(
            rows=rows,
            rejected=rejected,
            reasons=reasons,
            remarks=counts,
            parts=len(parts),
            tokens_per_s=tokens / seconds,
        ),
    )


def usual_part_bytes(corpus: Corpus) -> int:
    """Return the default part size in bytes, which depends on the files alone."""
    size_bytes = sum(file.size_bytes * file.expansion for file in corpus.files)
    return min(max(round(size_bytes / PARTS_WANTED), LEAST_PART_BYTES), MOST_PART_BYTES)


def _record_of(config: RowsConfig, number: int) -> str:
    return files.join(config.output, PARTS, f"part-{number:05d}.json")


def finish_part(config: RowsConfig, number: int, part: OutputPart, suffix: str) -> dict[str, Any]:
    """Write the rows that were put aside, then the record that marks the part as finished.

    Args:
        suffix: that of the part's file in `ROWS`, which is already written.
    Returns: the record.
    """
    paths = [row_file(number, suffix)]
    if part.rejected:
        paths.append(f"{REJECTED}/part-{number:05d}.jsonl")
        lines = (json.dumps(row, ensure_ascii=False, default=str) for row in part.rejected)
        text = "".join(f"{line}\n" for line in lines)
        files.write_bytes(files.join(config.output, paths[1]), text.encode(errors="replace"))
    record: Mapping[str, Any] = {
        ROWS: part.rows,
        REJECTED: len(part.rejected),
        "reasons": Counter(row["kind"] for row in part.rejected),
        "tokens": part.tokens,
        "counts": part.counts,
        "files": {path: vars(Output.of(files.join(config.output, path))) for path in paths},
    }
    files.write_json(_record_of(config, number), record)
    return dict(record)


def row_file(number: int, suffix: str) -> str:
    """Return the path of a part's file inside the output."""
    return f"{ROWS}/part-{number:05d}.{suffix}"


def is_table(block: Block) -> bool:
    """Whether a block consists of Parquet files."""
    return reader_of(block.extents[0].file).rows == "table"


def read_texts(block: Block, part: OutputPart) -> Iterator[Read]:
    """Yield the readable rows of JSON, CSV, TSV and text files; put the others aside."""
    for extent in block.extents:
        if reader_of(extent.file).rows == "cells":
            yield from _cells(extent, part)
        else:
            yield from _pieces(extent, block, part)


def _cells(extent: Extent, part: OutputPart) -> Iterator[Read]:
    path = extent.file.path
    for row, columns in read_cells(extent):
        if columns:
            yield Read(f"{path}, line {row.line:,}", columns, is_of_cells=True)
            continue
        if not row.fault:
            part.counts[BLANK] += 1
            continue
        # Lines that cannot be split into rows are put aside one by one, so that each is counted.
        for place, line in enumerate(["".join(row.lines)] if row.cells else row.lines):
            where = f"{path}, line {row.line + place:,}"
            text = line.encode(errors="surrogateescape").decode(errors="replace")
            part.reject(where, text, "unreadable", f"{path}, line {row.line:,}: {row.fault}")


def _pieces(extent: Extent, block: Block, part: OutputPart) -> Iterator[Read]:
    path = extent.file.path
    is_text = reader_of(extent.file).rows == "lines"
    of_lines = block.corpus.document_boundary == "line"
    for offset, piece in read_pieces(extent, block):
        unit = "document" if is_text and not of_lines else "line"
        where = f"{path}, the {unit} at byte {offset:,}"
        if not piece.strip():
            part.counts[BLANK] += 1
            continue
        try:
            if is_text:
                text = decode_utf8(piece, path, offset).removeprefix("\ufeff")
                text = text.rstrip("\r\n") if of_lines else text.strip()
                columns: dict[str, Any] = {part.first_column: text}
            else:
                record = next(jsonl_rows(piece, path, offset), None)
                if record is None:  # only a byte order mark
                    continue
                columns = record
                if _MAYBE_NOT_FINITE.search(piece):  # no answer could be written as JSON
                    check_finite(columns, where)
                if rb"\ud" in piece.lower():  # perhaps a lone surrogate, which no file can hold
                    check_unicode(columns, where)
        except (CorpusError, InputError) as error:
            part.reject(where, piece.decode(errors="replace"), "unreadable", str(error))
            continue
        try:
            part.check_names(columns, where)
        except CorpusError as error:
            part.reject(where, columns, "name_taken", str(error))
        else:
            yield Read(where, columns)


def read_tables(
    block: Block, part: OutputPart, at_once: int
) -> Iterator[tuple[pa.Table, list[Read]]]:
    """Yield batches of Parquet rows, each as a table of all columns and as rows. For an empty
    table, yield one empty batch so that its columns are known."""
    for where, table in read_row_groups(block):
        needed = [name for name in table.column_names if name in part.columns.values()]
        for start in range(0, max(1, len(table)), at_once):
            batch = table.slice(start, at_once)
            yield (
                batch,
                [
                    Read(f"{where}, row {start + place + 1:,}", columns, place)
                    for place, columns in enumerate(_plain_rows(batch.select(needed), where))
                ],
            )


def _plain_rows(table: pa.Table, where: str) -> list[dict[str, Any]]:
    columns = {
        name: plain_values(table.column(name), f"{where}, column {name!r}")
        for name in table.column_names
    }
    return [{name: values[row] for name, values in columns.items()} for row in range(len(table))]
