"""spaCy's files: entities, groups of spans and categories, from a DocBin and from JSONL."""

import json
import sys
from pathlib import Path

import pytest

from bert_core.data.labelled_formats import labelled_records
from bert_core.errors import CorpusError, ResourceError

ROW = {"text": "Ada left", "cats": {"a": 1.0, "b": 0.2}, "entities": [[0, 3, "person"]]}


def test_categories_of_at_least_a_half_are_labels() -> None:
    data = json.dumps(ROW).encode()
    [record] = labelled_records(data, "train.jsonl", "spacy").records
    assert (record["labels"], record["label"]) == (["a"], "a")
    assert record["spans"] == [[0, 3, "person"]]
    with pytest.raises(CorpusError, match=r"train\.jsonl: wanted rows of a task, got .*spaCy"):
        labelled_records(data, "train.jsonl", None)


def test_rows_whose_categories_or_spans_have_another_form_are_named() -> None:
    rows = [ROW | {"cats": {"a": "yes"}}, ROW | {"entities": 3}, ROW | {"relations": [1]}]
    data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    found = labelled_records(data, "train.jsonl", "spacy")
    assert len(found.records) == 1
    assert found.unused == {"relations": 1}
    assert found.unread[1].startswith("row 1: wanted cats with a number for each category, and a")
    assert found.unread[2].startswith("row 2: wanted cats")


def test_a_docbin_is_read_as_spacy_wrote_it() -> None:
    tokens = pytest.importorskip("spacy.tokens", reason="spaCy (the extra spacy) is not installed")
    vocab = pytest.importorskip("spacy.vocab").Vocab()
    words, spaces = ["Ada", "was", "in", "\N{HUGGING FACE}", "Rome", "."], [True] * 4 + [False] * 2
    doc = tokens.Doc(vocab, words, spaces)
    doc.ents = [tokens.Span(doc, 0, 1, "PERSON"), tokens.Span(doc, 4, 5, "mark")]
    doc.spans["sc"] = [tokens.Span(doc, 0, 5, "event"), tokens.Span(doc, 0, 1, "PERSON")]
    doc.cats = {"travel": 1.0, "sport": 0.0}
    data = tokens.DocBin(docs=[doc], attrs=["ENT_IOB", "ENT_TYPE"]).to_bytes()
    found = labelled_records(data, "train.spacy", "spacy")
    [record] = found.records
    assert record["text"] == "Ada was in \N{HUGGING FACE} Rome."
    assert [(span["label"], span["text"]) for span in record["spans"]] == [
        ("PERSON", "Ada"),
        ("mark", "Rome"),
    ]
    assert [(span["start"], span["end"]) for span in record["sc"]] == [(0, 17), (0, 3)]
    assert record["labels"] == ["travel"]
    assert found.unused == {"spans of the group sc": 2}
    with pytest.raises(CorpusError, match=r"a\.spacy: wanted a DocBin, as spaCy writes it"):
        labelled_records(data[:-9], "a.spacy", "spacy")


def test_the_demo_of_prodigy_has_the_spans_of_its_jsonl(data_dir: Path) -> None:
    pytest.importorskip("spacy", reason="spaCy (the extra spacy) is not installed")
    read = {}
    for name, form in (("demo.spacy", "spacy"), ("demo.jsonl", "prodigy")):
        path = data_dir / "prodigy" / name
        read[name] = [
            (record["text"], [(span["start"], span["end"], span["label"]) for span in spans])
            for record in labelled_records(path.read_bytes(), str(path), form).records
            for spans in [record["spans"]]
        ]
    assert read["demo.spacy"] == read["demo.jsonl"]
    assert len(read["demo.spacy"]) == 1


def test_without_spacy_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spacy.tokens", None)
    with pytest.raises(ResourceError, match=r"a\.spacy: wanted the package spacy.*'\.\[spacy\]'"):
        labelled_records(b"\x78\x9c", "a.spacy", "spacy")
