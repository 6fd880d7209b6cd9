"""Bundle + rows without labels → the same rows with answers, part by part, for any number of rows.

Parquet input gives Parquet parts, all other input JSONL. `pipelines.answering.parts` handles parts.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from bert_core import files
from bert_core.data.windows import cut_rows
from bert_core.errors import ConfigError, CorpusError, InputError
from bert_core.inference.vector_spaces import source_of
from bert_core.manifest import Manifest, Output
from bert_core.tasks.shapes import Row, as_row
from pipelines.answering.columns import ANSWER, answer_cells, answer_columns
from pipelines.answering.parts import (
    OutputPart,
    PartsCounts,
    Read,
    RowsConfig,
    check_files,
    finish_part,
    is_table,
    make_parts,
    read_tables,
    read_texts,
    row_file,
)
from pipelines.answering.predictors import options_text, predictor_of
from pipelines.answering.vector_files import METADATA, SOURCE
from pipelines.corpus.digest import ordered_corpus_input
from pipelines.corpus.readers.base import Block
from pipelines.corpus.sources import Corpus, list_corpus
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.progress import CUT, counted
from pipelines.runtime.result import Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.data.windows import Window
    from bert_core.inference.predictor import Predictor
    from bert_core.tasks.base import Parameters, Task

ROWS_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True)
class PredictConfig(RowsConfig):
    """Which model to run on which rows; in a text file, each line is a row."""

    model: str = field(metadata=INPUT)
    """Fine-tuned bundle: a folder, a URI, models:/name@alias, or owner/name or owner/name@revision
    of the Hugging Face hub."""
    task: str | None = None
    """Task to use for a model that was not fine-tuned: `fill-mask` by default, or
    `feature-extraction` for vectors, which every model gives."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a task that needs no head: `{pooling = "cls", layer = 8}`."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of the task, as in a request to the server: `{top_k = 3}`. Texts that are too long
    are cut, unless `truncation` (`truncate` for vectors) is false here: then their rows are
    rejected."""
    prefix: str = "predicted_"
    """Prefix of the columns that hold the best of an answer."""
    answer_column: str = ANSWER
    """Column that holds the whole answer; in Parquet it is JSON. An empty name leaves it out, e.g.
    for vectors, which the prefixed columns already hold in full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prefix:
            raise ConfigError("prefix: wanted at least one character, got an empty string")


@dataclass(frozen=True, kw_only=True)
class PredictCounts(PartsCounts):
    @property
    def sentence(self) -> str:
        return f"The model answered {counted(self.rows, 'row')}."


def run(config: PredictConfig) -> Manifest:
    """Write every row with the model's answer, in input order."""
    folder, model = bundle_input(config, config.model)
    predictor_of.cache_clear()  # an earlier run in this process may have read other contents
    corpus = list_corpus(config.corpus, config.output)
    rows = ordered_corpus_input(corpus, config)
    inputs = [model, DatasetInput("rows", rows.digest, rows.source)]
    return run_stage(
        "predict", config, inputs, lambda _: _predict(config, corpus, folder.absolute())
    )


def _predict(config: PredictConfig, corpus: Corpus, folder: Path) -> Result:
    predictor = _predictor(config, folder)
    parameters = _parameters(config.parameters, predictor.task)
    try:
        source = source_of(predictor, parameters)
    except InputError as error:  # there is no such prompt
        raise ConfigError(f"parameters.{error}") from error
    check_files(config, corpus, predictor.task.inputs, partial(_check_free, config))
    work = partial(make_part, config, folder)
    result = make_parts("predict", config, corpus, work, PredictCounts)
    if source is None:
        return result
    path = files.join(config.output, SOURCE)
    files.write_json(path, source.entries())
    return replace(result, outputs={**result.outputs, SOURCE: Output.of(path)})


def _predictor(config: PredictConfig, folder: Path) -> "Predictor":
    return predictor_of(
        folder, config.threads_per_worker, config.task, options_text(config.options)
    )


def _parameters(parameters: dict[str, Any], task: "Task") -> "Parameters | None":
    """Return the task's parameters; None if none are set, and then long texts are cut."""
    if not parameters:
        return None
    kind = task.parameters
    defaults = {} if kind.cut_by is None else {kind.cut_by: True}
    try:
        return kind(**as_row(kind, defaults | parameters, "parameters"))
    except InputError as error:
        raise ConfigError(str(error)) from error


def _check_free(config: PredictConfig, names: Iterable[str], where: str) -> None:
    """Raise CorpusError if an input column has a name that answers will use."""
    for name in names:
        if name == config.answer_column or name.startswith(config.prefix):
            raise CorpusError(
                f"{where}: wanted no column {name!r}, which answers are written to: set another "
                "answer_column or prefix"
            )


def make_part(config: PredictConfig, folder: Path, item: tuple[int, Block]) -> dict[str, Any]:
    """Answer the rows of one block and write them."""
    number, block = item
    answering = _Answering(config, _predictor(config, folder))
    suffix, write = ("parquet", _write_tables) if is_table(block) else ("jsonl", _write_lines)
    with files.writing(files.join(config.output, row_file(number, suffix))) as sink:
        write(sink, answering, block)
    return finish_part(config, number, answering, suffix)


def _write_lines(sink: BinaryIO, answering: "_Answering", block: Block) -> None:
    texts = read_texts(block, answering)
    while rows := list(islice(texts, ROWS_AT_ONCE)):
        answered = list(answering.answered(rows))
        for row, columns in zip(answered, answering.objects(), strict=True):
            sink.write(f"{json.dumps(row.columns | columns, ensure_ascii=False)}\n".encode())


def _write_tables(sink: BinaryIO, answering: "_Answering", block: Block) -> None:
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    for table, rows in read_tables(block, answering, ROWS_AT_ONCE):
        places = [row.place for row in answering.answered(rows)]
        answered = table.take(pa.array(places, pa.int64()))
        for name, column in answering.arrays().items():
            answered = answered.append_column(name, column)
        if (about := answering.metadata()) is not None:
            answered = answered.replace_schema_metadata((answered.schema.metadata or {}) | about)
        if writer is None:
            writer = pq.ParquetWriter(sink, answered.schema, compression="zstd")
        writer.write_table(answered)
    if writer is not None:
        writer.close()


class _Answering(OutputPart):
    """Runs the model on one part's rows in batches, and holds its answers to the last batch."""

    def __init__(self, config: PredictConfig, predictor: "Predictor") -> None:
        super().__init__(config, predictor.task.inputs)
        self.config, self._predictor, self._task = config, predictor, predictor.task
        self._parameters = _parameters(config.parameters, predictor.task)
        self._answers: list[Any] = []

    def check_names(self, names: Iterable[str], where: str) -> None:
        _check_free(self.config, names, where)

    def answered(self, rows: Sequence[Read]) -> list[Read]:
        """Answer the rows; returns those that have an answer, in order."""
        pairs = [
            (row, task_input) for row in rows if (task_input := self.input_of(row)) is not None
        ]
        try:
            windows = self._windows([task_input for _, task_input in pairs])
        except InputError:  # answer the rows singly, to find those that raise it
            pairs = [
                (row, task_input) for row, task_input in pairs if self._is_taken(row, task_input)
            ]
            windows = self._windows([task_input for _, task_input in pairs])
        inputs = [task_input for _, task_input in pairs]
        self._answers = []
        if windows:
            scores = self._predictor.forward(windows)
            self._answers = self._task.decode(inputs, windows, scores, self._parameters)
        self.take(inputs)
        self.counts[CUT] += cut_rows(windows)
        self.tokens += sum(window.tokens for window in windows)
        return [row for row, _ in pairs]

    def _is_taken(self, row: Read, task_input: Row) -> bool:
        try:
            self._windows([task_input])
        except InputError as error:
            self.reject(row.where, row.columns, "not_taken", str(error))
            return False
        return True

    def _windows(self, rows: Sequence[Row]) -> "list[Window]":
        """Return the encoded windows. Raises: InputError if the task rejects a row, or a row is too
        long and may not be cut."""
        if not rows:
            return []
        if self._parameters is not None:
            return self._predictor.encode(rows, self._parameters)
        tokenizer, longest = self._predictor.bundle.tokenizer, self._predictor.max_length
        return self._task.encode(rows, tokenizer, longest)

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield the columns of each answer to the last batch, as JSON values."""
        config = self.config
        for answer in self._answers:
            yield answer_cells(self._task, answer, config.prefix, config.answer_column)

    def metadata(self) -> dict[bytes, bytes] | None:
        """Return what made the vectors, for a table's schema; None for other answers."""
        source = source_of(self._predictor, self._parameters)
        return None if source is None else {METADATA: json.dumps(source.entries()).encode()}

    def arrays(self) -> dict[str, pa.Array]:
        """Return the columns of all answers to the last batch, as Arrow arrays."""
        config = self.config
        return answer_columns(self._task, self._answers, config.prefix, config.answer_column)
