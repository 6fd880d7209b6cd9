"""Documents → one JSON record per document, of what a tagging and a question-answering model find.

`pipelines.answering.parts` handles parts and unreadable rows; the tasks handle windows over
documents of any length.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_core import files
from bert_core.checks import PositiveInt, Share, check_fields
from bert_core.data.formats import Boundary
from bert_core.errors import ConfigError
from bert_core.manifest import Manifest, Output
from pipelines.answering.parts import (
    REJECTED,
    ROWS,
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
from pipelines.answering.predictors import predictor_of
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.digest import ordered_corpus_input
from pipelines.corpus.readers.base import Block
from pipelines.corpus.sources import Corpus, list_corpus
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.progress import counted
from pipelines.runtime.result import Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor
    from bert_core.tasks.base import Task

RECORDS = "records.jsonl"
TAGGER, READER = "tagger", "reader"
TASK_OF = {TAGGER: "token-classification", READER: "question-answering"}
ROWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class TaggerConfig:
    """A model that tags entities, and which entities to collect."""

    model: str = field(metadata=INPUT)
    """Bundle for token classification: a folder, a URI, models:/name@alias, or owner/name of the
    Hugging Face hub."""
    fields: dict[str, str]
    """Field of the record → type of the entities in it: `{people = "person"}`."""
    least_score: Share = 0.0
    """Entities with a lower score are left out."""


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """A model that answers questions, and what to ask it."""

    model: str = field(metadata=INPUT)
    """Bundle for question answering: a folder, a URI, models:/name@alias, or owner/name of the
    Hugging Face hub."""
    fields: dict[str, str]
    """Field of the record → question about the document:
    `{founded_in = "When was it founded?"}`."""
    least_score: Share = 0.0
    """An answer with a lower score counts as none; so does the model's own verdict of no answer, if
    it was trained on passages without one."""
    max_answer_len: PositiveInt = 30
    """Maximum tokens in an answer."""


@dataclass(frozen=True, kw_only=True)
class ExtractConfig(RowsConfig):
    """Which models to run on which documents, which have a `text` and optionally an `id`."""

    tagger: TaggerConfig | None = None
    """Collects entities; if unset, records have none."""
    reader: ReaderConfig | None = None
    """Answers questions; if unset, records have no answers."""
    document_boundary: Boundary = "blank_line"
    """Where a document in a text file ends: at a `blank_line`, at the end of its `line` or `file`,
    or before a `heading`; surrounding whitespace is stripped."""
    keep_text: bool = False
    """Include the document's text in its record; `start` and `end` are character offsets in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models:
            raise ConfigError("tagger, reader: wanted a model in at least one of them, got none")
        used_by = dict.fromkeys(("id", "text"), "every record")
        for name, model in self.models.items():
            check_fields(model, prefix=f"{name}.")
            if not model.fields:
                raise ConfigError(f'{name}.fields: wanted at least one, {{field = "…"}}, got none')
            for record_field in model.fields:
                if record_field in used_by:
                    raise ConfigError(
                        f"{name}.fields: wanted unique names, got {record_field!r}, which is "
                        f"already in {used_by[record_field]}: give it another name"
                    )
                used_by[record_field] = f"{name}.fields"

    @property
    def models(self) -> dict[str, TaggerConfig | ReaderConfig]:
        """Return the configured models, by name."""
        both = {TAGGER: self.tagger, READER: self.reader}
        return {name: model for name, model in both.items() if model is not None}

    @property
    def corpus(self) -> CorpusConfig:
        return CorpusConfig(source=self.source, document_boundary=self.document_boundary)


@dataclass(frozen=True, kw_only=True)
class DocumentInput:
    """A document as it is read."""

    text: str
    """Its text."""
    id: str | int | None = None
    """Its id; by default the sha256 of its text."""


@dataclass(frozen=True, kw_only=True)
class ExtractCounts(PartsCounts):
    @property
    def sentence(self) -> str:
        return f"Fields were extracted from {counted(self.rows, 'document')}."


def run(config: ExtractConfig) -> Manifest:
    """Write a record for every document, in input order."""
    folders, inputs = {}, []
    for name, model in config.models.items():
        folder, source = bundle_input(config, model.model, name=name)
        folders[name] = folder.absolute()
        inputs.append(source)
    predictor_of.cache_clear()  # an earlier run in this process may have read other contents
    corpus = list_corpus(config.corpus, config.output)
    documents = ordered_corpus_input(corpus, config)
    inputs.append(DatasetInput("documents", documents.digest, documents.source))
    return run_stage("extract", config, inputs, lambda _: _extract(config, corpus, folders))


def _extract(config: ExtractConfig, corpus: Corpus, folders: dict[str, Path]) -> Result:
    models = _models(config.threads_per_worker, folders)
    if config.tagger is not None:
        _check_types(config.tagger, models[TAGGER].task)
    check_files(config, corpus, DocumentInput, lambda names, where: None)
    work = partial(make_part, config, folders)
    result = make_parts("extract", config, corpus, work, ExtractCounts)
    path = files.join(config.output, RECORDS)
    parts = [name for name in result.outputs if not name.startswith(REJECTED)]
    if not files.exists(path):  # absent if a killed run has already joined them
        with files.writing(path) as sink:
            for name in parts:
                with files.open_input(files.join(config.output, name)) as part:
                    shutil.copyfileobj(part, sink)
    files.remove(files.join(config.output, ROWS))
    rejected = {name: output for name, output in result.outputs.items() if name not in parts}
    return replace(result, outputs={RECORDS: Output.of(path), **rejected})


def _models(threads: int, folders: Mapping[str, Path]) -> dict[str, "Predictor"]:
    return {name: predictor_of(folder, threads, TASK_OF[name]) for name, folder in folders.items()}


def _check_types(config: TaggerConfig, task: "Task") -> None:
    """Raise ConfigError if the tagger does not know an entity type."""
    known = _types_of(task)
    for name, kind in config.fields.items():
        if kind not in known:
            raise ConfigError(
                f"tagger.fields.{name}: wanted one of {', '.join(known)}, which {config.model} "
                f"knows, got {kind!r}"
            )


def _types_of(task: "Task") -> list[str]:
    """Return the types of entities, or the tags, that a tagger finds."""
    from bert_core.tasks.token_classification import TokenClassification

    assert isinstance(task, TokenClassification)
    return task.kinds_found


def make_part(
    config: ExtractConfig, folders: dict[str, Path], item: tuple[int, Block]
) -> dict[str, Any]:
    """Write the records of one block's documents."""
    number, block = item
    part = _Extraction(config, _models(config.threads_per_worker, folders))
    rows = _rows(block, part)
    with files.writing(files.join(config.output, row_file(number, "jsonl"))) as sink:
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            for record in part.records(batch):
                sink.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
    return finish_part(config, number, part, "jsonl")


def _rows(block: Block, part: OutputPart) -> Iterator[Read]:
    if is_table(block):
        for _, rows in read_tables(block, part, ROWS_AT_ONCE):
            yield from rows
    else:
        yield from read_texts(block, part)


class _Extraction(OutputPart):
    """Runs the models on the documents of one part."""

    def __init__(self, config: ExtractConfig, models: Mapping[str, "Predictor"]) -> None:
        super().__init__(config, DocumentInput)
        self._config, self._models = config, models

    def records(self, rows: Sequence[Read]) -> list[dict[str, Any]]:
        """Return the records of the readable documents, in order."""
        documents = [document for row in rows if (document := self.input_of(row)) is not None]
        texts = [document["text"] for document in documents]
        entities, answers = self._entities(texts), self._answers(texts)
        self.take(documents)
        return [
            {
                "id": document.get("id", hashlib.sha256(document["text"].encode()).hexdigest()),
                **({"text": document["text"]} if self._config.keep_text else {}),
                **tagged,
                **answered,
            }
            for document, tagged, answered in zip(documents, entities, answers, strict=True)
        ]

    def _entities(self, texts: Sequence[str]) -> list[dict[str, list[dict[str, Any]]]]:
        config = self._config.tagger
        if config is None:
            return [{} for _ in texts]
        tagger = self._models[TAGGER]
        answers = self.ask(tagger, [{"text": text} for text in texts], tagger.task.parameters())
        records = [
            {
                name: [
                    _found(entity, entity["word"])
                    for entity in entities
                    if kind in (entity.get("entity_group"), entity.get("entity"))
                    and entity["score"] >= config.least_score
                ]
                for name, kind in config.fields.items()
            }
            for entities in answers
        ]
        for record in records:
            self.counts.update({f"{name}_found": len(items) for name, items in record.items()})
        return records

    def _answers(self, texts: Sequence[str]) -> list[dict[str, dict[str, Any] | None]]:
        from bert_core.tasks.question_answering import QuestionAnsweringParameters

        config = self._config.reader
        if config is None:
            return [{} for _ in texts]
        questions = [{"question": q, "context": t} for t in texts for q in config.fields.values()]
        parameters = QuestionAnsweringParameters(max_answer_len=config.max_answer_len)
        answers = iter(self.ask(self._models[READER], questions, parameters))
        records = [
            {name: _answer(next(answers), config.least_score) for name in config.fields}
            for _ in texts
        ]
        for record in records:
            self.counts.update({f"{name}_found": int(bool(item)) for name, item in record.items()})
        return records


def _answer(answer: Mapping[str, Any], least_score: float) -> dict[str, Any] | None:
    """Return the answer; None if there is none, or its score is below `least_score`."""
    is_answer = answer["end"] > answer["start"] and answer["score"] >= least_score
    return _found(answer, answer["answer"]) if is_answer else None


def _found(span: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"text": text} | {name: span[name] for name in ("start", "end", "score")}
