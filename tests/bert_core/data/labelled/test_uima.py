"""UIMA's CAS in XMI and JSON: spans of layers, at positions of characters."""

from pathlib import Path

import pytest

from bert_core.data.labelled_formats import LabelledFile, labelled_records
from bert_core.errors import CorpusError

cassis = pytest.importorskip("cassis", reason="dkpro-cassis (the extra uima) is not installed")
TEXT = "\N{HUGGING FACE} Ada left Rome."
ENTITY = "de.tudarmstadt.ukp.dkpro.core.api.ner.type.NamedEntity"


def made(*, preferred: bool = True) -> tuple[bytes, bytes, bytes]:
    """Return the XMI, the type system and the JSON of one document."""
    types = cassis.TypeSystem()
    entity = types.create_type(ENTITY if preferred else "custom.Name")
    types.create_feature(entity, "value", "uima.cas.String")
    person = types.create_type("custom.Person", entity.name)
    event = types.create_type("custom.Event")
    types.create_feature(event, "kind", "uima.cas.String")
    relation = types.create_type("custom.Relation")
    for name in ("Governor", "Dependent"):
        types.create_feature(relation, name, "uima.tcas.Annotation")
    cas = cassis.Cas(types)
    cas.sofa_string = TEXT
    ada, rome = person(begin=2, end=5, value="PER"), entity(begin=11, end=15, value="LOC")
    left = event(begin=2, end=15, kind="travel")
    bound = relation(begin=11, end=15, Governor=ada, Dependent=rome)
    cas.add_all([ada, rome, left, entity(begin=6, end=10), bound])
    return cas.to_xmi().encode(), types.to_xml().encode(), cas.to_json().encode()


def read(form: str, *, preferred: bool = True) -> LabelledFile:
    xmi, types, as_json = made(preferred=preferred)
    if form == "uima_json":
        return labelled_records(as_json, "a.json", form)
    assert b'begin="3"' in xmi, "UIMA counts UTF-16 units"
    return labelled_records(xmi, "a.xmi", form, types)


@pytest.mark.parametrize("form", ["uima_xmi", "uima_json"])
def test_spans_are_those_of_the_preferred_layer_and_others_are_columns(form: str) -> None:
    found = read(form)
    [record] = found.records
    assert record["text"] == TEXT
    assert [(span["start"], span["end"], span["label"]) for span in record["spans"]] == [
        (2, 5, "PER"),
        (11, 15, "LOC"),
    ]
    assert all(span["text"] == TEXT[span["start"] : span["end"]] for span in record["spans"])
    assert [span["label"] for span in record["Event.kind"]] == ["travel"]
    assert found.unused == {
        "spans of Event.kind": 1, "relations": 1, "annotations without a label": 1,
    }  # fmt: skip
    [record] = read(form, preferred=False).records
    assert [span["label"] for span in record["spans"]] == ["travel"], "the first layer"


def test_a_cas_that_does_not_fit_its_types_is_refused() -> None:
    xmi, types, as_json = made()
    with pytest.raises(CorpusError, match=r"a\.xmi: wanted a CAS in XMI and the type system that"):
        labelled_records(xmi, "a.xmi", "uima_xmi", cassis.TypeSystem().to_xml().encode())
    with pytest.raises(CorpusError, match=r"a\.xmi: wanted a CAS in XMI"):
        labelled_records(xmi[:-40], "a.xmi", "uima_xmi", types)
    with pytest.raises(CorpusError, match=r"a\.json: wanted a CAS in UIMA's JSON"):
        labelled_records(as_json[:-40], "a.json", "uima_json")
    with pytest.raises(CorpusError, match=r"TypeSystem\.xml: wanted XML without entities"):
        labelled_records(xmi, "a.xmi", "uima_xmi", b"<!ENTITY a 'b'>")
    cas = cassis.Cas()
    with pytest.raises(CorpusError, match=r"a\.json: wanted a CAS with a text"):
        labelled_records(cas.to_json().encode(), "a.json", "uima_json")


@pytest.mark.parametrize(
    ("name", "types", "spans", "unused"),
    [
        (
            "cas_with_smileys",
            "inception_typesystem",
            ["Transformers", "Transformers", "Transformers", "PyTorch", "TensorFlow"],
            {},
        ),
        ("small_cas", "small_typesystem", [], {}),
    ],
)
def test_real_exports_have_their_published_counts(
    name: str, types: str, spans: list[str], unused: dict[str, int], data_dir: Path
) -> None:
    folder = data_dir / "inception_uima"
    data = (folder / f"{name}.xmi").read_bytes()
    found = labelled_records(data, "a.xmi", "uima_xmi", (folder / f"{types}.xml").read_bytes())
    [record] = found.records
    assert [record["text"][span["start"] : span["end"]] for span in record["spans"]] == spans
    assert found.unused == unused
