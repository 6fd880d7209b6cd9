"""UIMA's CAS, as INCEpTION and DKPro write it: XMI with its type system, or JSON that holds both.

Source: UIMA 3, "XMI CAS Serialization" and "JSON CAS Serialization"; read by dkpro-cassis, which
also converts positions from UTF-16 units.
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any

from bert_core.data.labelled.lines import Line, Unused, needed, with_labels
from bert_core.data.labelled.webanno import PREFERRED
from bert_core.errors import CorpusError

ANNOTATION = "uima.tcas.Annotation"
TEXT = "uima.cas.String"
_STRUCTURE = {"Token", "Sentence", "Paragraph", "DocumentAnnotation", "TagsetDescription"}
"""Types that cover the text or describe it, and label nothing."""
_ENDS_OF_RELATIONS = {"Governor", "Dependent"}


def uima_xmi(data: bytes, source: str, types: bytes) -> list[Line]:
    """Read the row of a document.

    Args:
        types: the contents of its type system, TypeSystem.xml.
    Raises: CorpusError if either file cannot be read; ResourceError without dkpro-cassis.
    """
    cassis = needed("cassis", "uima", source)
    for name, content in ((source, data), ("TypeSystem.xml", types)):
        if b"<!ENTITY" in content:
            raise CorpusError(f"{name}: wanted XML without entities of its own: remove <!ENTITY …>")
    try:
        type_system = cassis.load_typesystem(io.BytesIO(types))
        cas = cassis.load_cas_from_xmi(io.BytesIO(data), typesystem=type_system)
    except Exception as error:  # lxml's, and plain ones of dkpro-cassis
        raise CorpusError(
            f"{source}: wanted a CAS in XMI and the type system that it was exported with, they "
            f"cannot be read together ({_first_line(error)}): export as UIMA CAS XMI again, and "
            "keep TypeSystem.xml beside it"
        ) from error
    return [*_rows(cas, source)]


def uima_json(data: bytes, source: str) -> list[Line]:
    """Read the row of a document. Raises: CorpusError if the file cannot be read; ResourceError
    without dkpro-cassis."""
    cassis = needed("cassis", "uima", source)
    try:
        cas = cassis.load_cas_from_json(io.BytesIO(data))
    except Exception as error:  # plain ones of dkpro-cassis
        raise CorpusError(
            f"{source}: wanted a CAS in UIMA's JSON, it cannot be read ({_first_line(error)}): "
            "export as UIMA CAS JSON again"
        ) from error
    return [*_rows(cas, source)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {f'{error}'.partition(chr(10))[0]}"


def _rows(cas: Any, source: str) -> Iterator[Line]:
    """Yield the row of a document, with a column of spans per feature of text: `spans` are those
    of `PREFERRED`, or else of the first."""
    text = cas.sofa_string
    if not isinstance(text, str):
        raise CorpusError(f"{source}: wanted a CAS with a text (sofaString), it has none")
    found: dict[str, list[Mapping[str, Any]]] = {}
    relations = unlabelled = 0
    for annotation in sorted(cas.select(ANNOTATION), key=lambda each: (each.begin, -each.end)):
        names = {each.name: each.rangeType.name for each in annotation.type.all_features}
        short = _layer(annotation.type)
        if short is None:
            continue
        if names.keys() >= _ENDS_OF_RELATIONS:
            relations += 1
            continue
        place = {"start": annotation.begin, "end": annotation.end}
        own = annotation.get_covered_text()
        labels = {
            name: value
            for name, kind in names.items()
            if kind == TEXT and (value := getattr(annotation, name, None))
        }
        unlabelled += not labels
        for name, label in labels.items():
            found.setdefault(f"{short}.{name}", []).append(place | {"label": label, "text": own})
    chosen = PREFERRED if PREFERRED in found else next(iter(sorted(found)), None)
    spans = [] if chosen is None else found[chosen]
    yield with_labels({"text": text, "id": source.rpartition("/")[2], **found}, []) | {
        "spans": spans
    }
    for name, others in found.items():
        yield Unused(f"spans of {name}", len(others) if name != chosen else 0)
    yield Unused("relations", relations)
    yield Unused("annotations without a label", unlabelled)


def _layer(kind: Any) -> str | None:
    """Return the short name of the layer that a type belongs to: that of its topmost parent below
    `ANNOTATION`, as `NamedEntity` for `Person`; None for a type that labels nothing."""
    name = ""
    while kind is not None and kind.name != ANNOTATION:
        name = kind.name.rpartition(".")[2]
        kind = kind.supertype
    return None if name in _STRUCTURE else name
