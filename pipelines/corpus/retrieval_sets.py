"""Finds and reads retrieval sets: documents, queries, and which documents are relevant to a query.

A set is a folder or a data set of the hub, whose files are told apart by their names: `corpus…`,
`queries…` and `qrels…` (BEIR, NanoBEIR, MTEB). TREC's documents and topics are known by their
contents.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bert_core import files
from bert_core.data.contents import HEAD_BYTES
from bert_core.data.retrieval_formats import (
    Judgement,
    Text,
    judgements_in,
    texts_in,
    trec_role,
)
from bert_core.errors import ConfigError, CorpusError
from bert_core.metrics.judged import Judgements
from pipelines.corpus import hub
from pipelines.corpus.data_files import report
from pipelines.runtime.progress import counted, say

if TYPE_CHECKING:
    from bert_core.tasks.base import Remarks

CORPUS, QUERIES, QRELS = "corpus", "queries", "qrels"
UNJUDGED, NONE_RELEVANT = "queries_left_out_as_not_judged", "queries_without_a_relevant_document"
LEFT_OUT = "judgements_left_out_as_bad"
"""Remarks: queries that the split has no judgement of; queries of whose documents none is relevant,
which count as 0; and judgements of queries or documents that there are not."""
SHOWN = 3
"""How many faults of a kind are named."""
_ROLES = {
    QRELS: re.compile(r"(?:^|[^a-z])(?:qrels?|default)(?=[^a-z]|$)"),
    QUERIES: re.compile(r"(?:^|[^a-z])(?:queries|query|topics?)(?=[^a-z]|$)"),
    CORPUS: re.compile(r"(?:^|[^a-z])(?:corpus|docs?|documents?|passages)(?=[^a-z]|$)"),
}
_OTHER_ROLES = re.compile(r"(?:^|[^a-z])(?:top_ranked|instructions?)(?=[^a-z]|$)")
_TREC_SUFFIXES = {"trec", "sgml", "sgm", "xml", "dat", ""}


@dataclass(frozen=True)
class RetrievalFiles:
    """The files of a retrieval set, for one split of its judgements."""

    source: str
    corpus: tuple[str, ...]
    queries: tuple[str, ...]
    qrels: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        return [*self.corpus, *self.queries, *self.qrels]


@dataclass(frozen=True)
class RetrievalSet:
    """A search whose right answers are known."""

    document_ids: list[str]
    documents: list[str]
    """Their texts, each after its title."""
    query_ids: list[str]
    """Those of the split, which have judgements."""
    queries: list[str]
    judgements: list[Judgements]
    """The relevant documents of each query."""
    remarks: "Remarks"

    @cached_property
    def pairs(self) -> list[dict[str, Any]]:
        """Return every query with each of its relevant documents, as rows of two texts."""
        return [
            {"text": query, "text_pair": self.documents[place]}
            for query, judged in zip(self.queries, self.judgements, strict=True)
            for place in judged.places
        ]


def retrieval_files(
    source: str, splits: Sequence[str], *, named: bool = False
) -> RetrievalFiles | None:
    """Return the files of a retrieval set; None if `source` is something else.

    Of the judgements, those of the first of these splits that there is, or all if only one split
    has any. Where documents or queries are in files named after a split, these are chosen too.

    Args:
        named: whether the user named the split, so that there is no other.
    Raises: ConfigError if there is no such split; CorpusError if there are no judgements.
    """
    if not hub.may_be_a_folder(source) or files.is_file(source):
        return None
    every, _ = files.find_all(source)
    roles: dict[str, list[str]] = {CORPUS: [], QUERIES: [], QRELS: []}
    others: list[str] = []
    for path in every:
        roles.get(_role_of(source, path) or "", others).append(path)
    if not roles[CORPUS] or not roles[QUERIES]:
        return None
    if not roles[QRELS]:
        _data_as_qrels(source, roles[QRELS], others)
    if not roles[QRELS]:
        raise CorpusError(
            f"{source}: wanted judgements beside {hub.below(source, roles[CORPUS][0])} and "
            f"{hub.below(source, roles[QUERIES][0])}, got none: put them into qrels/test.tsv, with "
            "the columns query-id, corpus-id and score"
        )
    report(source, others, "of no use for a search")
    of_split = _of_split(source, roles[QRELS], splits)
    kinds = hub.splits_of(source, roles[QRELS])
    chosen = splits if named else ()
    texts = {role: _of_split(source, roles[role], chosen) for role in (CORPUS, QUERIES)}
    is_nowhere = named and not any(texts.values())
    if not of_split and (is_nowhere or len(kinds) > 1):
        raise ConfigError(
            f"{source}: wanted judgements of a split {' or '.join(splits)}, there are those of "
            f"{', '.join(kinds) or 'no split'}: name another split"
        )
    return RetrievalFiles(
        source,
        tuple(texts[CORPUS] or roles[CORPUS]),
        tuple(texts[QUERIES] or roles[QUERIES]),
        tuple(of_split or roles[QRELS]),
    )


def _data_as_qrels(source: str, qrels: list[str], others: list[str]) -> None:
    """Take the files of `data/` for judgements, as MTEB's default config has them there."""
    for path in [path for path in others if hub.below(source, path).startswith("data/")]:
        others.remove(path)
        qrels.append(path)


def _role_of(source: str, path: str) -> str | None:
    """Return the role of a file, by its path in the folder and by what TREC's files begin with."""
    name = hub.below(source, path).lower()
    if _OTHER_ROLES.search(name):
        return None
    suffix, _ = files.suffixes(path)
    if suffix in _TREC_SUFFIXES and (role := trec_role(files.look_into(path, HEAD_BYTES)[0])):
        return role
    if suffix not in _TREC_SUFFIXES and hub.TABLES.names.search(path) is None:
        is_lines_of_trec = suffix in ("txt", QRELS) and _ROLES[QRELS].search(name)
        return QRELS if is_lines_of_trec else None
    return next((role for role, words in _ROLES.items() if words.search(name)), None)


def _of_split(source: str, paths: Sequence[str], splits: Sequence[str]) -> list[str]:
    for split in splits:
        if found := [path for path in paths if hub.is_of(split, hub.below(source, path))]:
            return found
    return []


def read_retrieval_set(found: RetrievalFiles, *, skip: bool = False) -> RetrievalSet:
    """Read a retrieval set.

    Args:
        skip: whether to leave out judgements of queries or documents that there are not.
    Raises: CorpusError naming the file and the place of a fault.
    """
    say(
        f"{found.source}: documents from {_named(found.source, found.corpus)}, queries from "
        f"{_named(found.source, found.queries)}, judgements from "
        f"{_named(found.source, found.qrels)}"
    )
    documents, queries = _texts(found.corpus), _texts(found.queries)
    places = {number: place for place, number in enumerate(documents)}
    judged: dict[str, dict[str, float]] = {}
    bad: list[str] = []
    for path, judgement in _judgements(found.qrels):
        if fault := _fault(judgement, documents, queries, judged, found):
            bad.append(f"{path}, {judgement.place}: {fault}")
            continue
        judged.setdefault(judgement.query, {})[judgement.document] = judgement.relevance
    if bad and not skip:
        more = f", and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
        raise CorpusError(
            f"{'; '.join(bad[:SHOWN])}{more}: correct or remove the lines "
            '(bad_rows = "skip" beside the source leaves them out)'
        )
    if not judged:
        raise CorpusError(
            f"{found.qrels[0]}: wanted at least one judgement, got none: give another split"
        )
    chosen = [number for number in queries if number in judged]
    remarks: Remarks = {
        UNJUDGED: len(queries) - len(chosen),
        NONE_RELEVANT: sum(max(judged[number].values()) <= 0 for number in chosen),
        LEFT_OUT: len(bad),
    }
    _tell_unjudged(found, queries, judged)
    return RetrievalSet(
        document_ids=list(documents),
        documents=[text.text for _, text in documents.values()],
        query_ids=chosen,
        queries=[queries[number][1].text for number in chosen],
        judgements=[_relevant(judged[number], places) for number in chosen],
        remarks=remarks,
    )


def _tell_unjudged(
    found: RetrievalFiles,
    queries: dict[str, tuple[str, Text]],
    judged: dict[str, dict[str, float]],
) -> None:
    left = [(path, text) for path, text in queries.values() if text.id not in judged]
    if left:
        (path, text), qrels = left[0], _named(found.source, found.qrels)
        say(
            f"{found.source}: left out {counted(len(left), 'query', 'queries')} without a "
            f"judgement in {qrels}, the first on {text.place} of {hub.below(found.source, path)}"
        )


def _named(source: str, paths: Sequence[str]) -> str:
    names = [hub.below(source, path) for path in paths]
    return f"{', '.join(names[:SHOWN])}{' …' if len(names) > SHOWN else ''}"


def _relevant(judged: dict[str, float], places: dict[str, int]) -> Judgements:
    relevant = [(places[number], value) for number, value in judged.items() if value > 0]
    return Judgements(
        np.array([place for place, _ in relevant], dtype=np.int64),
        np.array([value for _, value in relevant], dtype=np.float64),
    )


def _texts(paths: Sequence[str]) -> dict[str, tuple[str, Text]]:
    """Return the texts of all files by id, each with its file. Raises: CorpusError if an id occurs
    twice, or there are no texts."""
    texts: dict[str, tuple[str, Text]] = {}
    for path in paths:
        for text in texts_in(files.read_contents(path), path):
            if text.id in texts:
                before, other = texts[text.id]
                raise CorpusError(
                    f"{path}, {text.place}: wanted each id once, got {text.id!r} again, after "
                    f"{other.place} of {before}: give one of them another id, or name a split"
                )
            texts[text.id] = path, text
    if not texts:
        raise CorpusError(f"{paths[0]}: wanted at least one text, got none: give another file")
    return texts


def _judgements(paths: Sequence[str]) -> Iterator[tuple[str, Judgement]]:
    for path in paths:
        for judgement in judgements_in(files.read_contents(path), path):
            yield path, judgement


def _fault(
    judgement: Judgement,
    documents: dict[str, tuple[str, Text]],
    queries: dict[str, tuple[str, Text]],
    judged: dict[str, dict[str, float]],
    found: RetrievalFiles,
) -> str | None:
    """Return what is wrong with a judgement; None if nothing is."""
    for kind, number, known, paths in (
        ("query", judgement.query, queries, found.queries),
        ("document", judgement.document, documents, found.corpus),
    ):
        if number not in known:
            return f"wanted a {kind} of {_named(found.source, paths)}, there is no {number!r}"
    before = judged.get(judgement.query, {}).get(judgement.document)
    if before is not None and before != judgement.relevance:
        return (
            f"wanted one relevance of document {judgement.document!r} to query "
            f"{judgement.query!r}, got {judgement.relevance:g} after {before:g}"
        )
    return None
