"""Documents → one JSON record each, of what a tagging and a question-answering model find in them.

Parts, and what becomes of rows that cannot be read, are `pipelines.answering.parts`'; windows over
documents of any length are the tasks'.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from pipelines.corpus.digest import corpus_input
from pipelines.corpus.readers.base import Block
from pipelines.corpus.sources import Corpus, list_corpus
from pipelines.runtime.progress import counted, say
from pipelines.runtime.stage import INPUT, Result, bundle_input, run_stage
from tracking.runs import DatasetInput

if TYPE_CHECKING:
    from bert_core.predictor import Predictor
    from bert_core.tasks.base import Task

RECORDS = "records.jsonl"
TAGGER, READER = "tagger", "reader"
TASK_OF = {TAGGER: "token-classification", READER: "question-answering"}
ROWS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class TaggerConfig:
    """A model of entities, and which of them to collect."""

    model: str = field(metadata=INPUT)
    """Bundle for token classification: a folder, a URI, or models:/name@alias."""
    fields: dict[str, str]
    """Field of the record → type of the entities in it: `{people = "person"}`."""
    least_score: Share = 0.0
    """Entities of a lower score are left out."""


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """A model of answers, and what to ask it."""

    model: str = field(metadata=INPUT)
    """Bundle for question answering: a folder, a URI, or models:/name@alias."""
    fields: dict[str, str]
    """Field of the record → question about the document:
    `{founded_in = "When was it founded?"}`."""
    least_score: Share = 0.0
    """An answer of a lower score counts as none; so does none itself, where the model is trained on
    passages that hold no answer."""
    max_answer_len: PositiveInt = 30
    """Most tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class ExtractConfig(RowsConfig):
    """Which models to ask about which documents: `text` and, where they have one, `id`."""

    tagger: TaggerConfig | None = None
    """Collects entities; left out, records have none."""
    reader: ReaderConfig | None = None
    """Answers questions; left out, records have no answers."""
    document_boundary: Boundary = "blank_line"
    """In text files: a document ends at a `blank_line`, with its `line` or its `file`, or before a
    `heading`; white space around it is no part of it."""
    keep_text: bool = False
    """Whether a record has the document's text too, which `start` and `end` count characters of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.models:
            raise ConfigError("tagger, reader: wanted a model in one of them at least, got none")
        taken = dict.fromkeys(("id", "text"), "every record")
        for name, one in self.models.items():
            check_fields(one, prefix=f"{name}.")
            if not one.fields:
                raise ConfigError(f'{name}.fields: wanted at least one, {{field = "…"}}, got none')
            for said in one.fields:
                if said in taken:
                    raise ConfigError(
                        f"{name}.fields: wanted names of their own, {said!r} is in {taken[said]} "
                        "already: give it another name"
                    )
                taken[said] = f"{name}.fields"

    @property
    def models(self) -> dict[str, TaggerConfig | ReaderConfig]:
        """Those that there are, by name."""
        both = {TAGGER: self.tagger, READER: self.reader}
        return {name: one for name, one in both.items() if one is not None}

    @property
    def corpus(self) -> CorpusConfig:
        return CorpusConfig(source=self.source, document_boundary=self.document_boundary)


@dataclass(frozen=True, kw_only=True)
class DocumentInput:
    """A document as it is read."""

    text: str
    """Its text."""
    id: str | int | None = None
    """What it is known by; else the sha256 of its text."""


def run(config: ExtractConfig) -> Manifest:
    """Write a record for every document, in the order of the input."""
    folders, inputs = {}, []
    for name, one in config.models.items():
        folder, source = bundle_input(one.model, name=name, tracking_uri=config.tracking_uri)
        folders[name] = folder.absolute()
        inputs.append(source)
    predictor_of.cache_clear()  # what lay there in an earlier run of this process
    corpus = list_corpus(config.corpus)
    documents = corpus_input(corpus, config)
    inputs.append(DatasetInput("documents", documents.digest, documents.source))
    return run_stage("extract", config, inputs, lambda _: _extract(config, corpus, folders))


def _extract(config: ExtractConfig, corpus: Corpus, folders: dict[str, Path]) -> Result:
    models = _models(config, folders)
    if config.tagger is not None:
        _check_types(config.tagger, models[TAGGER].task)
    check_files(config, corpus, DocumentInput, lambda names, where: None)
    made = make_parts("extract", config, corpus, partial(_make_part, config, folders))
    path = files.join(config.output, RECORDS)
    parts = [name for name in made.outputs if not name.startswith(REJECTED)]
    if not files.exists(path):  # else a killed run has joined them already
        with files.writing(path) as sink:
            for name in parts:
                with files.open_input(files.join(config.output, name)) as part:
                    shutil.copyfileobj(part, sink)
    files.remove(files.join(config.output, ROWS))
    say(f"extract: {counted(made.counts[ROWS], 'record')} in {path}")
    rejected = {name: about for name, about in made.outputs.items() if name not in parts}
    return Result(outputs={RECORDS: Output.of(path), **rejected}, counts=made.counts)


def _models(config: ExtractConfig, folders: Mapping[str, Path]) -> dict[str, "Predictor"]:
    return {
        name: predictor_of(folder, config.threads_per_worker, TASK_OF[name])
        for name, folder in folders.items()
    }


def _check_types(config: TaggerConfig, task: "Task") -> None:
    """Raises: ConfigError if the tagger does not know a type of entity."""
    known = sorted({_type_of(label) for label in task.labels} - {"O"})
    for name, kind in config.fields.items():
        if kind not in known:
            raise ConfigError(
                f"tagger.fields.{name}: wanted one of {', '.join(known)}, which {config.model} "
                f"knows, got {kind!r}"
            )


def _type_of(tag: str) -> str:
    """`person` of `B-person`; a tag that is of no entity, such as `NOUN`, is its own."""
    prefix, _, kind = tag.partition("-")
    return kind if kind and len(prefix) == 1 else tag


def _make_part(
    config: ExtractConfig, folders: dict[str, Path], item: tuple[int, Block]
) -> dict[str, Any]:
    """Write the records of one block's documents."""
    number, block = item
    part = _Extraction(config, _models(config, folders))
    rows = _rows(block, part)
    with files.writing(files.join(config.output, row_file(number, "jsonl"))) as sink:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            for record in part.records(some):
                sink.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
    return finish_part(config, number, part, "jsonl")


def _rows(block: Block, part: OutputPart) -> Iterator[Read]:
    if is_table(block):
        for _, rows in read_tables(block, part, ROWS_AT_ONCE):
            yield from rows
    else:
        yield from read_texts(block, part)


class _Extraction(OutputPart):
    """Models that are asked about the documents of one part."""

    def __init__(self, config: ExtractConfig, models: Mapping[str, "Predictor"]) -> None:
        super().__init__(config, DocumentInput)
        self._config, self._models = config, models

    def records(self, rows: Sequence[Read]) -> list[dict[str, Any]]:
        """The records of those documents that can be read, in their order."""
        documents = [made for row in rows if (made := self.input_of(row)) is not None]
        texts = [document["text"] for document in documents]
        entities, answers = self._entities(texts), self._answers(texts)
        self.take(documents)
        return [
            {
                "id": document.get("id", hashlib.sha256(document["text"].encode()).hexdigest()),
                **({"text": document["text"]} if self._config.keep_text else {}),
                **found,
                **answered,
            }
            for document, found, answered in zip(documents, entities, answers, strict=True)
        ]

    def _entities(self, texts: Sequence[str]) -> list[dict[str, list[dict[str, Any]]]]:
        config = self._config.tagger
        if config is None:
            return [{} for _ in texts]
        tagger = self._models[TAGGER]
        found = self.ask(tagger, [{"text": text} for text in texts], tagger.task.parameters())
        records = [
            {
                name: [
                    _found(one, one["word"])
                    for one in entities
                    if kind in (one.get("entity_group"), one.get("entity"))
                    and one["score"] >= config.least_score
                ]
                for name, kind in config.fields.items()
            }
            for entities in found
        ]
        for record in records:
            self.counts.update({f"{name}_found": len(those) for name, those in record.items()})
        return records

    def _answers(self, texts: Sequence[str]) -> list[dict[str, dict[str, Any] | None]]:
        from bert_core.tasks.question_answering import QuestionAnsweringParameters

        config = self._config.reader
        if config is None:
            return [{} for _ in texts]
        asked = [{"question": each, "context": t} for t in texts for each in config.fields.values()]
        parameters = QuestionAnsweringParameters(max_answer_len=config.max_answer_len)
        found = iter(self.ask(self._models[READER], asked, parameters))
        records = [{name: _answer(next(found), config) for name in config.fields} for _ in texts]
        for record in records:
            self.counts.update({f"{name}_found": int(bool(one)) for name, one in record.items()})
        return records


def _answer(answer: Mapping[str, Any], config: ReaderConfig) -> dict[str, Any] | None:
    """None where there is no answer, or none that is sure enough."""
    is_one = answer["end"] > answer["start"] and answer["score"] >= config.least_score
    return _found(answer, answer["answer"]) if is_one else None


def _found(one: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"text": text} | {name: one[name] for name in ("start", "end", "score")}
