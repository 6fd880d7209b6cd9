"""WebAnno's and INCEpTION's TSV 3."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.labelled_formats import LabelledFile, labelled_records
from bert_core.errors import CorpusError

HEAD = (
    "#FORMAT=WebAnno TSV 3.3\n#T_SP=a.b.NamedEntity|value|sure\n#T_RL=a.Dep|kind|BT_a.b.POS\n\n\n"
)
BODY = (
    "#Text=Ada 😀 saw New\\nYork\n"
    "1-1\t0-3\tAda\tPER\tyes\t_\t_\t\n"
    "1-2\t4-6\t😀\t_\t_\tsubj\t1-1[0_0]\t\n"
    "1-3\t7-10\tsaw\tout\\_er[1]|in\\|ner[2]\t*[1]|*[2]\t_\t_\t\n"
    "1-4\t11-14\tNew\tout\\_er[1]\t*[1]\t_\t_\t\n"
    "1-5\t15-19\tYork\tLOC\t_\t_\t_\t\n"
    "1-5.1\t15-17\tYo\tPART\t_\t_\t_\t\n\n"
)


def read(text: str) -> LabelledFile:
    return labelled_records(text.encode(), "a.tsv", "webanno")


def marked(record: Any) -> list[tuple[str, str]]:
    return [(record["text"][one["start"] : one["end"]], one["label"]) for one in record["spans"]]


def test_spans_are_those_of_a_layer_with_characters_of_their_sentence() -> None:
    """Nested, escaped, of parts of tokens, and after a character of two UTF-16 units."""
    found = read(HEAD + BODY)
    [record] = found.records
    assert record["text"] == "Ada 😀 saw New\nYork"
    assert marked(record) == [
        ("Ada", "PER"), ("saw New", "out_er"), ("saw", "in|ner"), ("York", "LOC"), ("Yo", "PART"),
    ]  # fmt: skip
    assert record["NamedEntity.value"] == record["spans"]
    assert found.unused == {"relations": 1, "spans of NamedEntity.sure": 3}


def test_a_sentence_with_a_broken_token_is_named() -> None:
    found = read(HEAD + BODY + BODY.replace("1-2\t4-6", "1-2\t4") + BODY)
    assert len(found.records) == 2
    assert found.unread[2].startswith(
        "line 14: wanted tokens such as `1-1`, their characters `0-5`"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\n", "wanted WebAnno TSV 3, whose first line is #FORMAT=WebAnno TSV 3"),
        ("#FORMAT=WebAnno TSV 3.2\n#T_RL=a.Dep|kind|BT_x\n", "wanted a layer of spans"),
    ],
)
def test_what_is_no_webanno_is_refused(text: str, message: str) -> None:
    with pytest.raises(CorpusError, match=f"a\\.tsv: {message}"):
        read(text)


def test_real_sets_have_the_characters_of_their_tokens(data_dir: Path) -> None:
    spans: Counter[str] = Counter()
    sentences = 0
    for path in sorted((data_dir / "gum_webanno").glob("*.tsv")):
        found = labelled_records(path.read_bytes(), str(path), "webanno")
        assert not found.unread
        sentences += len(found.records)
        spans.update(span["label"] for record in found.records for span in record["spans"])
    assert sentences == 77
    assert spans.total() == 469
    path = data_dir / "inception_uima" / "coref.tsv"
    records = labelled_records(path.read_bytes(), str(path), "webanno").records
    assert sum(len(record["spans"]) for record in records) == 74
    # A lemma is a span of one token: the characters are those of a word.
    for record in records:
        for span in record["Lemma.value"]:
            assert record["text"][span["start"] : span["end"]].strip() != ""
            assert " " not in record["text"][span["start"] : span["end"]]
