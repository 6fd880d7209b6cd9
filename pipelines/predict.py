"""Bundle + rows without labels → the same rows with answers, part by part, any number of them.

A part is a piece of the input and becomes one file: Parquet where Parquet was read, else JSONL.
What a killed run has finished stays; a row that cannot be answered is put aside with the reason.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from bert_core import files
from bert_core.data.formats import decode_utf8, jsonl_rows
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.manifest import Manifest, Output
from bert_core.tasks.rows import Row, as_row
from pipelines import parquet
from pipelines.blocks import Block, plan_blocks, read_lines, read_row_groups
from pipelines.distribute import run_tasks
from pipelines.evaluate import ANSWER, answer_columns, named, predictor_of
from pipelines.report import meter, say
from pipelines.sources import CorpusConfig, CorpusFile, corpus_files, corpus_input
from pipelines.stage import INPUT, Result, StageConfig, run_stage
from tracking.runs import DatasetInput

if TYPE_CHECKING:
    from bert_core.data.windows import Window
    from bert_core.predictor import Predictor
    from bert_core.tasks.base import Parameters, Task

ROWS, REJECTED, PARTS = "rows", "rejected", "parts"
"""Folders of the output: rows with answers, rows that have none, and what each part came to."""
ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class PredictConfig(StageConfig):
    """Which model to ask about which rows."""

    model: str = field(metadata=INPUT)
    """Fine-tuned bundle: a folder, a URI, or models:/name@alias."""
    source: str | tuple[str, ...] = field(metadata=INPUT)
    """Files, folders, globs or URIs of .parquet, or of .jsonl and, a row a line, .txt, which may be
    .gz, .bz2 or .zst."""
    columns: dict[str, str] = field(default_factory=dict)
    """Field of the task → the column that holds it, where that has another name:
    `{text = "body"}`."""
    task: str | None = None
    """What to ask a model for that was not fine-tuned: `fill-mask` where this is not given, or
    `feature-extraction` for vectors, which any model makes."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the task is told, where it needs no head: `{pooling = "cls", layer = 8}`."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """What the task is told with every row, as a request to the server would: `{top_k = 3}`. A text
    that is too long is cut, unless `truncation` (`truncate` for vectors) is false here: then its
    row is put aside."""
    prefix: str = "predicted_"
    """Begins the names of the columns that hold the best of an answer."""
    answer_column: str = ANSWER
    """Name of the column that holds the whole answer; in Parquet it is JSON. An empty name leaves
    it out, as of vectors, which the best of an answer holds whole."""
    part_bytes: int = 16_000_000
    """Bytes of input that become one part, about; a row group of Parquet is never cut."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.source:
            raise ConfigError("source: wanted a path or a URI, got none")
        if self.part_bytes < 1:
            raise ConfigError(f"part_bytes: wanted at least 1, got {self.part_bytes}")
        if not self.prefix:
            raise ConfigError("prefix: wanted the beginning of a name, got an empty string")

    @property
    def corpus(self) -> CorpusConfig:
        """The source as what is cut into blocks, a row a line."""
        return CorpusConfig(source=self.source, document_boundary="line")


def run(config: PredictConfig) -> Manifest:
    """Write every row with the model's answer, in the order of the input."""
    from bert_core.bundle import bundle_digest
    from tracking.resolve import resolve

    folder = resolve(config.model, uri=config.tracking_uri)
    predictor_of.cache_clear()  # what lay there in an earlier run of this process
    rows = corpus_input(config.corpus)
    inputs = [
        DatasetInput("model", bundle_digest(folder), config.model),
        DatasetInput("rows", rows.digest, rows.source),
    ]
    return run_stage("predict", config, inputs, lambda _: _predict(config, folder.absolute()))


def _predict(config: PredictConfig, folder: Path) -> Result:
    task = _predictor(config, folder).task
    _parameters(config, task)
    _check_files(config, task)
    blocks = plan_blocks(config.corpus, config.part_bytes)
    parts: dict[int, dict[str, Any]] = {}
    for number in range(len(blocks)):
        with suppress(FileNotFoundError):  # then a killed run has not finished it
            parts[number] = files.read_json(_record_of(config, number))
    missing = [(number, block) for number, block in enumerate(blocks) if number not in parts]
    began, tokens = time.monotonic(), 0
    with meter("predicting", len(blocks), "parts") as progress:
        progress.set(len(parts))
        work = partial(_make_part, config, folder)
        for index, part in run_tasks(work, missing, config, use_gpu=True):
            parts[missing[index][0]] = part
            tokens += part["tokens"]
            progress.add()
    seconds = time.monotonic() - began
    rows, rejected = (sum(part[name] for part in parts.values()) for name in (ROWS, REJECTED))
    reasons: Counter[str] = Counter()
    for part in parts.values():
        reasons.update(part["reasons"])
    why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
    if not rows:
        raise CorpusError(
            f"{', '.join(config.corpus.sources)}: wanted rows to answer, got none "
            f"({why or 'no row at all'}): see {files.join(config.output, REJECTED)}, name the "
            "right columns, or give another source"
        )
    aside = f"; {rejected:,} put aside ({why})" if rejected else ""
    say(f"predict: {rows:,} rows with answers in {files.join(config.output, ROWS)}{aside}")
    outputs = {
        name: Output(**about)
        for _, part in sorted(parts.items())
        for name, about in part["files"].items()
    }
    counts = {
        ROWS: rows,
        REJECTED: rejected,
        **{f"{REJECTED}_{reason}": count for reason, count in reasons.items()},
        PARTS: len(parts),
        "tokens_per_s": tokens / seconds,
    }
    return Result(outputs=outputs, counts=counts)


def _predictor(config: PredictConfig, folder: Path) -> "Predictor":
    return predictor_of(folder, config.threads_per_worker, config.task, named(config.options))


def _parameters(config: PredictConfig, task: "Task") -> "Parameters | None":
    """None, which cuts what is too long, where the user has nothing to say."""
    if not config.parameters:
        return None
    kind = task.parameters
    usual = {} if kind.cut_by is None else {kind.cut_by: True}
    try:
        return kind(**as_row(kind, usual | config.parameters, "parameters"))
    except InputError as error:
        raise ConfigError(str(error)) from error


def _names(shape: type) -> list[str]:
    return [one.name for one in fields(shape)]


def _columns(config: PredictConfig, task: "Task") -> dict[str, str]:
    """Field of the task's input → its column. Raises: ConfigError for a field that there is not."""
    names = _names(task.inputs)
    unknown = [name for name in config.columns if name not in names]
    if unknown:
        raise ConfigError(
            f"columns: wanted names of the fields {', '.join(names)}, got {unknown[0]}: "
            'give field = "column"'
        )
    return {name: config.columns.get(name, name) for name in names}


def _check_files(config: PredictConfig, task: "Task") -> None:
    """Raises: ConfigError or CorpusError for what would put every row of a file aside."""
    columns = _columns(config, task)
    needed = {
        columns[one.name]
        for one in fields(task.inputs)
        if one.name in config.columns or (one.default is MISSING and one.default_factory is MISSING)
    }
    found = corpus_files(config.corpus)
    tables = [file for file in found if file.format == "parquet"]
    odd = [file for file in found if file.format == "wikipedia" or (tables and file not in tables)]
    if odd:
        raise CorpusError(
            f"{odd[0].path}: wanted rows in Parquet, or in JSONL and text, not both, among "
            f"{len(found):,} files: predict them one after the other"
        )
    schemas = [_checked_schema(config, file, needed) for file in tables]
    for file, schema in zip(tables, schemas, strict=True):
        if not schema.equals(schemas[0]):
            raise CorpusError(
                f"{file.path}: wanted the columns and types of {tables[0].path}, since both may "
                "become one file, got others: predict them one after the other"
            )


def _checked_schema(config: PredictConfig, file: CorpusFile, needed: set[str]) -> pa.Schema:
    with parquet.open_parquet(file.path) as opened:
        schema = opened.schema_arrow
    there = schema.names
    _check_free(config, there, file.path)
    absent = sorted(needed.difference(there))
    if absent:
        raise CorpusError(
            f"{file.path}: wanted a column {absent[0]!r}, there are: {', '.join(there)}: name it "
            'by columns, {field = "column"}'
        )
    twice = [name for name, count in Counter(there).items() if count > 1]
    if twice:
        raise CorpusError(
            f"{file.path}: wanted each column once, got {twice[0]!r} {there.count(twice[0])} "
            "times: write the file again with names of their own"
        )
    return schema


def _check_free(config: PredictConfig, names: Iterable[str], where: str) -> None:
    """Raises: CorpusError if a column is where an answer is to go."""
    for name in names:
        if name == config.answer_column or name.startswith(config.prefix):
            raise CorpusError(
                f"{where}: wanted no column {name!r}, where answers go: give another "
                "answer_column or prefix"
            )


def _record_of(config: PredictConfig, number: int) -> str:
    return files.join(config.output, PARTS, f"part-{number:05d}.json")


def _make_part(config: PredictConfig, folder: Path, item: tuple[int, Block]) -> dict[str, Any]:
    """Answer the rows of one block and write them; what is written last says that it is whole."""
    number, block = item
    answering = _Answering(config, _predictor(config, folder))
    is_table = block.extents[0].file.format == "parquet"
    paths = [f"{ROWS}/part-{number:05d}.{'parquet' if is_table else 'jsonl'}"]
    with files.writing(files.join(config.output, paths[0])) as sink:
        (_write_tables if is_table else _write_lines)(sink, answering, block)
    if answering.rejected:
        paths.append(f"{REJECTED}/part-{number:05d}.jsonl")
        lines = (json.dumps(row, ensure_ascii=False, default=str) for row in answering.rejected)
        text = "".join(f"{line}\n" for line in lines)
        files.write_bytes(files.join(config.output, paths[1]), text.encode(errors="replace"))
    part = {
        ROWS: answering.rows,
        REJECTED: len(answering.rejected),
        "reasons": Counter(row["kind"] for row in answering.rejected),
        "tokens": answering.tokens,
        "files": {path: vars(Output.of(files.join(config.output, path))) for path in paths},
    }
    files.write_json(_record_of(config, number), part)
    return part


def _write_lines(sink: BinaryIO, answering: "_Answering", block: Block) -> None:
    lines = _lines(block, answering)
    while rows := list(islice(lines, ROWS_AT_ONCE)):
        answered = list(answering.answered(rows))
        for row, columns in zip(answered, answering.objects(), strict=True):
            sink.write(f"{json.dumps(row.columns | columns, ensure_ascii=False)}\n".encode())


def _lines(block: Block, answering: "_Answering") -> Iterator["_Read"]:
    """The lines that can be read; the others are put aside."""
    texts = {each.file.path for each in block.extents if each.file.format == "text"}
    for path, offset, line in read_lines(block):
        where = f"{path}, the line at byte {offset:,}"
        try:
            if path in texts:
                text = decode_utf8(line, path, offset).removeprefix("\ufeff").rstrip("\r\n")
                columns: dict[str, Any] = {answering.first_column: text}
            else:
                (record,) = jsonl_rows(line, path, offset)
                columns = dict(record or {})
            _check_free(answering.config, columns, where)
        except CorpusError as error:
            answering.reject(where, line.decode(errors="replace"), "unreadable", str(error))
        else:
            yield _Read(where, columns)


def _write_tables(sink: BinaryIO, answering: "_Answering", block: Block) -> None:
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    for where, table in read_row_groups(block):
        wanted = [name for name in table.column_names if name in answering.columns.values()]
        for start in range(0, max(1, len(table)), ROWS_AT_ONCE):  # of no rows the columns too
            few = table.slice(start, ROWS_AT_ONCE)
            rows = [
                _Read(f"{where}, row {start + place + 1:,}", columns, place)
                for place, columns in enumerate(few.select(wanted).to_pylist())
            ]
            places = [row.place for row in answering.answered(rows)]
            kept = few.take(pa.array(places, pa.int64()))
            for name, column in answering.arrays().items():
                kept = kept.append_column(name, column)
            if writer is None:
                writer = pq.ParquetWriter(sink, kept.schema, compression="zstd")
            writer.write_table(kept)
    if writer is not None:
        writer.close()


@dataclass(frozen=True, slots=True)
class _Read:
    """A row as it was read."""

    where: str
    columns: dict[str, Any]
    """Of a table those that the task needs."""
    place: int = 0
    """Its number in the table at hand."""


class _Answering:
    """A model that is asked about the rows of one part, some at a time, and what came of it."""

    def __init__(self, config: PredictConfig, predictor: "Predictor") -> None:
        self.config, self._predictor, self._task = config, predictor, predictor.task
        self._parameters = _parameters(config, predictor.task)
        self.columns = _columns(config, predictor.task)
        self.rejected: list[dict[str, Any]] = []
        self.rows = self.tokens = 0
        self._answers: list[Any] = []

    @property
    def first_column(self) -> str:
        """What a line of text is."""
        return next(iter(self.columns.values()))

    def reject(self, where: str, row: Any, kind: str, reason: str) -> None:
        """Put a row aside; `kind` is what it is counted as."""
        self.rejected.append({"where": where, "kind": kind, "reason": reason, "row": row})

    def answered(self, rows: Sequence[_Read]) -> list[_Read]:
        """Answer the rows; gives those that have an answer, in their order."""
        pairs = [(row, made) for row in rows if (made := self._input_of(row)) is not None]
        try:
            windows = self._windows([made for _, made in pairs])
        except InputError:  # of which row, each by itself says
            pairs = [(row, made) for row, made in pairs if self._is_taken(row, made)]
            windows = self._windows([made for _, made in pairs])
        inputs = [made for _, made in pairs]
        self._answers = []
        if windows:
            scores = self._predictor.forward(windows)
            self._answers = self._task.decode(inputs, windows, scores, self._parameters)
        self.rows += len(pairs)
        self.tokens += sum(window.tokens for window in windows)
        return [row for row, _ in pairs]

    def _input_of(self, row: _Read) -> Row | None:
        """The task's input; None where the row lacks it, which is put aside."""
        there = {
            name: row.columns[column]
            for name, column in self.columns.items()
            if column in row.columns
        }
        try:
            return as_row(self._task.inputs, there, "row")
        except InputError as error:
            self.reject(row.where, row.columns, "without_the_input", str(error))
            return None

    def _is_taken(self, row: _Read, made: Row) -> bool:
        try:
            self._windows([made])
        except InputError as error:
            self.reject(row.where, row.columns, "not_taken", str(error))
            return False
        return True

    def _windows(self, rows: Sequence[Row]) -> "list[Window]":
        """Raises: InputError if the task cannot take one of them, or it is not to be cut."""
        if not rows:
            return []
        if self._parameters is not None:
            return self._predictor.encode(rows, self._parameters)
        tokenizer, longest = self._predictor.bundle.tokenizer, self._predictor.max_length
        return self._task.encode(rows, tokenizer, longest)

    def objects(self) -> Iterator[dict[str, Any]]:
        """The columns that each of the last answers makes, as JSON has them."""
        for answer in self._answers:
            cells = self._task.cells(answer)
            best = {f"{self.config.prefix}{name}": value for name, value in cells.items()}
            name = self.config.answer_column
            yield best | ({name: answer} if name else {})

    def arrays(self) -> dict[str, pa.Array]:
        """The same of all of them, as Arrow has them."""
        config = self.config
        return answer_columns(self._task, self._answers, config.prefix, config.answer_column)
