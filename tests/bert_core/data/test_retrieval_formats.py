"""Documents, queries and judgements in the layouts of the field."""

import json

import pytest

from bert_core.data.retrieval_formats import judgements_in, texts_in
from bert_core.errors import CorpusError

TREC = b"""<DOC>
<DOCNO> FT911-3 </DOCNO>
<HEADLINE>A &amp; B</HEADLINE>
<TEXT>of  the
sea</TEXT>
</DOC>
<DOC><DOCNO>2</DOCNO>
blue
</DOC>
"""
TOPICS = b"""<top>
<num> Number: 301
<title> International Organized Crime

<desc> Description:
Identify organizations.
</top>
<top>
<num>2</num><title>
BLUE SEA
</title>
</top>
"""


def as_lines(*rows: dict) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def test_a_title_is_the_beginning_of_a_documents_text() -> None:
    rows = as_lines(
        {"_id": "a", "title": "One", "text": "Two. "},
        {"_id": 7, "title": "", "text": " Three", "metadata": {}},
        {"id": "b", "text": "Four"},
    )
    found = [tuple(text) for text in texts_in(b"\n" + rows, "corpus.jsonl")]
    assert found == [
        ("line 2", "a", "One Two."),
        ("line 3", "7", "Three"),
        ("line 4", "b", "Four"),
    ]


def test_trecs_documents_and_topics_are_read_as_text() -> None:
    assert [tuple(text) for text in texts_in(TREC, "docs.trec")] == [
        ("document 1", "FT911-3", "A & B of the sea"),
        ("document 2", "2", "blue"),
    ]
    assert [tuple(text) for text in texts_in(TOPICS, "topics")] == [
        ("topic 1", "301", "International Organized Crime"),
        ("topic 2", "2", "BLUE SEA"),
    ]


@pytest.mark.parametrize(
    ("data", "source", "place"),
    [
        (b"query-id\tcorpus-id\tscore\nq 1\td1\t2\n", "qrels/test.tsv", "line 2"),
        (as_lines({"query-id": "q 1", "corpus-id": "d1", "score": 2}), "qrels.jsonl", "line 1"),
        (as_lines({"query_id": "q 1", "corpus_id": "d1", "score": "2"}), "qrels.jsonl", "line 1"),
        (b"q1 0 d1 2\n\nq2 Q0 d2 -1\n", "qrels", "line 1"),
    ],
)
def test_judgements_are_read_from_every_layout(data: bytes, source: str, place: str) -> None:
    first, *others = judgements_in(data, source)
    assert first.place == place
    assert (first.query.replace(" ", ""), first.document, first.relevance) == ("q1", "d1", 2.0)
    assert [(each.place, each.relevance) for each in others] in ([], [("line 3", -1.0)])


def test_without_scores_every_judged_document_is_relevant() -> None:
    (only,) = judgements_in(as_lines({"query-id": "q1", "corpus-id": "d1"}), "qrels.jsonl")
    assert only.relevance == 1


@pytest.mark.parametrize(
    ("read", "data", "source", "message"),
    [
        (texts_in, as_lines({"_id": "a"}), "corpus.jsonl", r"line 1: wanted a text in .* 'text'"),
        (texts_in, as_lines({"text": "a"}), "corpus.jsonl", "line 1: wanted an id in .* '_id'"),
        (texts_in, b"{", "corpus.jsonl", "corpus.jsonl, line 1: wanted a JSON object"),
        (texts_in, b"a b", "corpus.txt", r"wanted .jsonl, .json, .* got .txt"),
        (texts_in, TREC.replace(b"DOCNO", b"ID"), "docs", "document 1: wanted <DOCNO>"),
        (texts_in, TOPICS.replace(b"title", b"t"), "topics", "topic 1: wanted <num> and <title>"),
        (judgements_in, b"q1 0 d1 2\nq1 0 d1\n", "qrels", "line 2: wanted query, 0, document"),
        (
            judgements_in,
            b"query-id\tcorpus-id\tscore\nq1\td1\tmuch\n",
            "test.tsv",
            "line 2: wanted a number in the column 'score', got text",
        ),
        (
            judgements_in,
            b"query-id\tcorpus-id\tscore\nq1\td1\n",
            "test.tsv",
            "line 2: wanted 3 cells",
        ),
        (
            judgements_in,
            b"query\tdocument\nq1\td1\n",
            "test.tsv",
            "line 2: wanted an id in the column 'query-id', got the columns query, document",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    read: object, data: bytes, source: str, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        list(read(data, source))  # type: ignore[operator]
