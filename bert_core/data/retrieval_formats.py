"""Bytes to the documents, queries and judgements of a retrieval set, in the layouts in which the
field publishes them: BEIR, NanoBEIR and MTEB (JSON, TSV, Parquet), and TREC. Pure: no files.

Every row is yielded with its place in the file, so that a fault can be named.
"""

import codecs
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from bert_core.data.contents import HEAD_BYTES, check_is_itself, format_of
from bert_core.data.formats import decode_utf8
from bert_core.data.json_rows import as_lines, is_of_lines, json_object
from bert_core.data.tables import TextTable, parquet_rows
from bert_core.errors import CorpusError
from bert_core.wording import shown

ID, QUERY_ID, DOCUMENT_ID = ("_id", "id"), ("query-id", "query_id"), ("corpus-id", "corpus_id")
"""Names that a column has, the most common first."""
TEXT, TITLE, SCORE = "text", "title", "score"
_DOCUMENT = re.compile(rb"(?:\xef\xbb\xbf)?\s*<DOC\b", re.IGNORECASE)
_TOPIC = re.compile(rb"(?:\xef\xbb\xbf)?\s*<top\b", re.IGNORECASE)
_OF_TREC = {
    "document": re.compile(r"<DOC\b[^>]*>(.*?)</DOC>", re.DOTALL | re.IGNORECASE),
    "topic": re.compile(r"<top\b[^>]*>(.*?)</top>", re.DOTALL | re.IGNORECASE),
}
_DOCNO = re.compile(r"<DOCNO>\s*(\S+?)\s*</DOCNO>", re.IGNORECASE)
_NUMBER = re.compile(r"<num>\s*(?:Number:)?\s*([^\s<]+)\s*(?:</num>)?", re.IGNORECASE)
_TITLE = re.compile(r"<title>\s*(?:Topic:)?(.*?)(?=<|$)", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>")
_QRELS_LINE = re.compile(r"(\S+)\s+(?:Q?0|\d+)\s+(\S+)\s+(-?\d+)")
"""Query, a column that is not used, document, relevance."""


class Text(NamedTuple):
    """A document or a query."""

    place: str
    """Where it is in its file: `line 3`."""
    id: str
    text: str


class Judgement(NamedTuple):
    """How relevant a document is to a query."""

    place: str
    query: str
    document: str
    relevance: float


def texts_in(data: bytes, source: str) -> Iterator[Text]:
    """Yield the documents, or the queries, of a file. A title becomes the beginning of the text,
    with a space after it, as in BEIR and MTEB.

    Args:
        data: the file's contents, decompressed.
        source: the file's name.
    Raises: CorpusError naming the place of a row without an id or a text.
    """
    if trec_role(data):
        yield from _trec_texts(data, source)
        return
    for place, row in _rows(data, source):
        number, text = _cell(row, ID, source, place), row.get(TEXT)
        if not isinstance(text, str):
            raise CorpusError(
                f"{source}, {place}: wanted a text in the column {TEXT!r}, got {shown(text)}: "
                "correct or remove the row"
            )
        title = row.get(TITLE)
        yield Text(place, number, f"{title} {text}".strip() if title else text.strip())


def judgements_in(data: bytes, source: str) -> Iterator[Judgement]:
    """Yield the judgements of a file: rows of query, document and relevance, or lines of TREC
    (`301 0 FBIS3-10082 1`). Without a column of relevance, every document is relevant, as in
    NanoBEIR.

    Raises: CorpusError naming the place of a row without one of these.
    """
    first = data[:HEAD_BYTES].decode(errors="replace").removeprefix("\ufeff").partition("\n")[0]
    if _QRELS_LINE.fullmatch(first.strip()):
        yield from _trec_judgements(data, source)
        return
    for place, row in _rows(data, source):
        query, document = (_cell(row, names, source, place) for names in (QUERY_ID, DOCUMENT_ID))
        value = row.get(SCORE, 1)
        try:
            relevance = float(value)
        except (TypeError, ValueError) as error:
            raise CorpusError(
                f"{source}, {place}: wanted a number in the column {SCORE!r}, got {shown(value)}: "
                "correct or remove the row"
            ) from error
        yield Judgement(place, query, document, relevance)


def _cell(row: Mapping[str, Any], names: Sequence[str], source: str, place: str) -> str:
    """Return the id in the first of these columns that the row has."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    raise CorpusError(
        f"{source}, {place}: wanted an id in the column {names[0]!r}, got the columns "
        f"{', '.join(map(str, row))}: rename the column, or correct the row"
    )


def _rows(data: bytes, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    kind = format_of(data[:HEAD_BYTES], source)
    if kind == "jsonl" and is_of_lines(data):
        for number, line in enumerate(data.splitlines(), 1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield (place := f"line {number:,}"), json_object(line, source, place)
    elif kind in ("jsonl", "json"):
        for number, (_, line) in enumerate(as_lines(io.BytesIO(data), source), 1):
            yield (place := f"object {number:,}"), json_object(line, source, place)
    elif kind == "parquet":
        for number, row in enumerate(parquet_rows(data, source), 1):
            yield f"row {number:,}", row
    elif kind in ("csv", "tsv"):
        table = TextTable(io.BytesIO(data), source)
        for cells in table.rows():
            if cells.fault:
                raise CorpusError(f"{source}, line {cells.line:,}: {cells.fault}")
            if cells.cells:
                yield f"line {cells.line:,}", dict(zip(table.columns, cells.cells, strict=True))
    else:
        raise CorpusError(
            f"{source}: wanted .jsonl, .json, .tsv, .csv or .parquet, also compressed, or TREC's "
            f"<DOC>, <top> or lines of four columns, got .{kind}: convert or rename it"
        )


def _trec_texts(data: bytes, source: str) -> Iterator[Text]:
    """Yield TREC's documents (all their text, without tags), or its topics (their title)."""
    check_is_itself(data[:HEAD_BYTES], source)
    contents = decode_utf8(data, source)
    kind = "document" if trec_role(data) == "corpus" else "topic"
    for number, found in enumerate(_OF_TREC[kind].finditer(contents), 1):
        place, body = f"{kind} {number:,}", found[1]
        named = (_DOCNO if kind == "document" else _NUMBER).search(body)
        title = None if kind == "document" else _TITLE.search(body)
        if named is None or (kind == "topic" and title is None):
            wanted = "<DOCNO>" if kind == "document" else "<num> and <title>"
            raise CorpusError(
                f"{source}, {place}: wanted {wanted}, got {shown(body.strip()[:80])}: correct or "
                "remove it"
            )
        text = body[: named.start()] + body[named.end() :] if title is None else title[1]
        yield Text(place, named[1], " ".join(html.unescape(_TAG.sub(" ", text)).split()))


def _trec_judgements(data: bytes, source: str) -> Iterator[Judgement]:
    for number, line in enumerate(decode_utf8(data, source).splitlines(), 1):
        if not line.strip():
            continue
        found = _QRELS_LINE.fullmatch(line.removeprefix("\ufeff").strip())
        if found is None:
            raise CorpusError(
                f"{source}, line {number:,}: wanted query, 0, document and relevance, with spaces "
                f"between them, got {shown(line.strip()[:80])}: correct or remove the line"
            )
        yield Judgement(f"line {number:,}", found[1], found[2], float(found[3]))


def trec_role(head: bytes) -> Literal["corpus", "queries"] | None:
    """Return the role of a TREC file that begins with `head`: `corpus` for documents, `queries` for
    topics; None if it is not TREC's."""
    if _DOCUMENT.match(head):
        return "corpus"
    return "queries" if _TOPIC.match(head) else None
