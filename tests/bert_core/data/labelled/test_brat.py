"""brat's standoff files."""

from collections import Counter
from pathlib import Path

import pytest

from bert_core.data.labelled_formats import LabelledFile, labelled_records
from bert_core.errors import CorpusError

TEXT = "Ada\nLovelace left\nLondon."
ENTITIES = "T1\tperson 0 12\tAda Lovelace\nT2\tplace 18 24\tLondon\n"


def read(annotations: str, text: str = TEXT) -> LabelledFile:
    return labelled_records(annotations.encode(), "a/doc.ann", "brat", text.encode())


def test_a_document_is_a_text_with_spans() -> None:
    [record] = read(ENTITIES).records
    assert (record["id"], record["text"]) == ("doc", TEXT)
    assert record["spans"] == [
        {"start": 0, "end": 12, "label": "person", "text": "Ada\nLovelace"},
        {"start": 18, "end": 24, "label": "place", "text": "London"},
    ]
    assert read("").records[0]["spans"] == []
    [record] = read("T1\tplace 0 3\tEve\r\n").records
    assert record["spans"][0]["text"] == "Eve", "which differs, as the task will say"


def test_what_is_no_span_is_counted() -> None:
    others = (
        "E1\tLeave:T1 From:T2\nR1\tlivesIn Arg1:T1 Arg2:T2\nA1\tsure T1\nM1\tsure T2\n"
        "N1\tReference T1 Wikidata:Q7259\tAda\n#1\tAnnotatorNotes T1\tOk\n*\tEquiv T1 T2\n"
        "T3\tperson 0 3;13 17\tAda left\n"
    )
    found = read(ENTITIES + others)
    assert len(found.records[0]["spans"]) == 2
    assert found.unused == {
        "events": 1, "relations": 1, "attributes": 2, "normalizations": 1, "notes": 1,
        "equivalences": 1, "entities of several parts": 1,
    }  # fmt: skip


@pytest.mark.parametrize("line", ["T1\tperson 0\tAda", "T1 person 0 3", "person\t0\t3", "T1\t0 3"])
def test_a_line_of_another_kind_is_named(line: str) -> None:
    [fault] = read(f"{ENTITIES}{line}\n").unread.values()
    assert fault.startswith("line 3: wanted an entity such as `T1\tplace 0 4\tRome`, an event (E)")
    assert repr(line) in fault


def test_a_text_that_is_not_utf_8_is_told() -> None:
    with pytest.raises(CorpusError, match=r"a/doc\.txt: wanted UTF-8, byte 0xe9"):
        labelled_records(ENTITIES.encode(), "a/doc.ann", "brat", b"Andr\xe9 ")


def test_real_sets_have_their_published_counts(data_dir: Path) -> None:
    spans, unused, wrong = Counter[str](), Counter[str](), 0
    for folder in ("materials_brat", "litbank/brat"):
        for path in sorted((data_dir / folder).glob("*.ann")):
            text = path.with_suffix(".txt").read_bytes()
            found = labelled_records(path.read_bytes(), str(path), "brat", text)
            [record] = found.records
            unused.update(found.unused)
            for span in record["spans"]:
                spans[folder] += 1
                wrong += record["text"][span["start"] : span["end"]] != span["text"]
    assert spans == {"materials_brat": 5067, "litbank/brat": 13_912}
    assert unused == {"events": 939, "relations": 3641, "attributes": 58}
    assert wrong == 0
