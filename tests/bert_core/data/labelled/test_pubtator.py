"""PubTator's text and BioC's XML."""

from pathlib import Path

import pytest

from bert_core.data.labelled_formats import labelled_records
from bert_core.errors import CorpusError

BIOC = "CDR_sample.gold.BioC.xml"
DOCUMENT = (
    "7|t|Ada's case.\n7|a|She left Rome.\n7\t0\t3\tAda\tperson\tQ7259\n"
    "7\t12\t25\tShe left Rome\tevent\tX\tleft|Rome\n7\tCID\tQ7259\tX\n"
)
XML = """<?xml version='1.0'?><!DOCTYPE collection SYSTEM 'BioC.dtd'><collection><document>
<id>7</id><passage><offset>0</offset><text>Ada&apos;s case.</text>
<annotation id='0'><infon key="type">person</infon><infon key="id">Q</infon>
<location offset='0' length='3'/><text>Ada</text></annotation></passage>
<passage><offset>{offset}</offset><text>She left Rome.</text>
<annotation id='1'><infon key="type">place</infon><location offset='21' length='4'/>
<text>Rome</text></annotation>
<annotation id='2'><infon key="type">event</infon><location offset='12' length='3'/>
<location offset='16' length='4'/><text>She left</text></annotation>
<relation id='R0'/></passage></document></collection>"""


def test_a_document_of_pubtator_is_its_title_and_abstract() -> None:
    data = f"{DOCUMENT}\n{DOCUMENT}".encode()
    found = labelled_records(data, "a.txt", "pubtator")
    assert len(found.records) == 2
    record = found.records[0]
    assert (record["id"], record["text"]) == ("7", "Ada's case. She left Rome.")
    for span in record["spans"]:
        assert record["text"][span["start"] : span["end"]] == span["text"]
    assert [span["label"] for span in record["spans"]] == ["person", "event"]
    assert found.unused == {
        "identifiers": 4, "names of parts of composite mentions": 2, "relations": 2,
    }  # fmt: skip


def test_a_line_of_another_kind_is_named_and_the_other_documents_are_read() -> None:
    data = f"{DOCUMENT}7\tx\n\n{DOCUMENT}".encode()
    found = labelled_records(data, "a.txt", "pubtator")
    assert len(found.records) == 1
    assert found.unread[1].startswith("line 6: wanted `id|t|title`, `id|a|abstract`, a mention (id")
    [fault] = labelled_records(b"7|t|\xe9\n", "a.txt", "pubtator").unread.values()
    assert fault.startswith("line 1: wanted UTF-8, byte 0xe9")


@pytest.mark.parametrize("offset", [12, 17])
def test_passages_of_bioc_are_at_their_offsets_unless_the_annotations_say_otherwise(
    offset: int,
) -> None:
    found = labelled_records(XML.format(offset=offset).encode(), "a.xml", "bioc")
    [record] = found.records
    assert (record["id"], record["text"]) == ("7", "Ada's case. She left Rome.")
    assert [(span["label"], span["start"]) for span in record["spans"]] == [
        ("person", 0),
        ("place", 21),
    ]
    wrong = {"documents' offsets of passages, which the annotations' texts contradict": 1}
    assert found.unused == {
        "relations": 1, "infons": 1, "annotations of several parts": 1,
        **(wrong if offset == 17 else {}),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<collection>", "a.xml: wanted BioC's XML, it cannot be read"),
        (b"<pmc/>", "a.xml: wanted BioC's collection, got the element 'pmc'"),
        (b'<!DOCTYPE x [<!ENTITY a "b">]><collection/>', "a.xml: wanted BioC without entities"),
    ],
)
def test_what_is_no_bioc_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorpusError, match=message.replace(".", r"\.")):
        labelled_records(data, "a.xml", "bioc")


def test_a_document_of_bioc_without_offsets_is_named() -> None:
    found = labelled_records(XML.replace("{offset}", "x").encode(), "a.xml", "bioc")
    assert found.unread[1].startswith("document 1: wanted passages with offset and text, and annot")


@pytest.mark.parametrize(
    ("name", "form", "documents", "mentions", "relations"),
    [
        ("NCBIdevelopset_corpus.txt", "pubtator", 100, 787, 0),
        ("NCBItestset_corpus.txt", "pubtator", 100, 960, 0),
        ("CDR_sample.gold.PubTator", "pubtator", 50, 934, 123),
        ("CDR_sample.gold.BioC.xml", "bioc", 50, 939, 123),
    ],
)
def test_real_sets_have_their_published_counts(
    name: str, form: str, documents: int, mentions: int, relations: int, data_dir: Path
) -> None:
    path = data_dir / "pubtator_bioc" / name
    found = labelled_records(path.read_bytes(), str(path), form)
    spans = [(record["text"], span) for record in found.records for span in record["spans"]]
    assert (len(found.records), len(spans)) == (documents, mentions)
    assert found.unused.get("relations", 0) == relations
    assert all(text[span["start"] : span["end"]] == span["text"] for text, span in spans)


def test_both_forms_of_a_real_set_have_the_same_texts_and_mentions(data_dir: Path) -> None:
    """Five composite mentions are one line with their parts in PubTator, and each part in BioC."""
    folder = data_dir / "pubtator_bioc"
    texts, marks = [], []
    for name, form in (
        ("CDR_sample.gold.PubTator", "pubtator"),
        ("CDR_sample.gold.BioC.xml", "bioc"),
    ):
        found = labelled_records((folder / name).read_bytes(), name, form)
        texts.append([record["text"] for record in found.records])
        marks.append(
            {
                (record["id"], span["start"], span["end"], span["label"])
                for record in found.records
                for span in record["spans"]
            }
        )
    assert texts[0] == texts[1]
    assert len(marks[0] - marks[1]) <= 10
    assert len(marks[0] & marks[1]) > 900
