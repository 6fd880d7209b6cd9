"""PubTator's text format and BioC's XML: annotated passages of abstracts and articles.

Source: PubTator Central, "Format"; BioC.dtd (Comeau et al. 2013).
"""

import re
from collections import Counter
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from bert_core.data.json_rows import Unread
from bert_core.data.labelled.lines import Line, Record, Unused, lines_of, with_labels
from bert_core.data.tables import not_utf8_in
from bert_core.errors import CorpusError

_TEXT = re.compile(r"([^\t|]+)\|([ta])\|(.*)")
_MENTION = re.compile(
    r"[^\t]+\t([0-9]+)\t([0-9]+)\t([^\t]*)\t([^\t]+)(?:\t([^\t]*))?(?:\t([^\t]*))?"
)
_RELATION = re.compile(r"[^\t]+\t[A-Za-z_]+\t[^\t]+\t[^\t]+(?:\t[^\t]*)*")
CONTRADICTED = "documents' offsets of passages, which the annotations' texts contradict"


def pubtator(data: bytes, source: str) -> list[Line]:
    """Read a row per document: title, a space, and abstract, with mentions as spans.

    The parts of a composite mention (a seventh column) are counted; the mention itself is a span.
    """
    lines: list[Line] = []
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*lines_of(data), ""], 1):
        if line.strip():
            block.append((number, line.rstrip("\r")))
        elif block:
            lines += _document(block)
            block = []
    return lines


def _document(block: list[tuple[int, str]]) -> Iterator[Line]:
    texts: list[str] = []
    spans: list[Record] = []
    unused = Counter[str]()
    name = ""
    for number, line in block:
        fault = not_utf8_in([line])
        if match := _TEXT.fullmatch(line):
            name = match[1]
            texts.append(match[3])
        elif match := _MENTION.fullmatch(line):
            start, end = int(match[1]), int(match[2])
            spans.append({"start": start, "end": end, "label": match[4], "text": match[3]})
            unused["identifiers"] += bool(match[5])
            unused["names of parts of composite mentions"] += bool(match[6])
        elif _RELATION.fullmatch(line):
            unused["relations"] += 1
        else:
            fault = fault or (
                f"wanted `id|t|title`, `id|a|abstract`, a mention (id, start, end, text, type, "
                f"identifier between tabs) or a relation, got {line[:80]!r}: correct the line, or "
                "remove its document"
            )
        if fault:
            yield Unread(f"line {number:,}: {fault}")
            return
    yield with_labels({"text": " ".join(texts), "id": name}, []) | {"spans": spans}
    yield from (Unused(what, count) for what, count in unused.items())


def bioc(data: bytes, source: str) -> list[Line]:
    """Read a row per document: its passages at their offsets, with spaces between, and annotations
    as spans. One with several locations is left out and counted, since a span has no gaps.

    Raises: CorpusError if the file is not XML, or not BioC's.
    """
    if b"<!ENTITY" in data:
        raise CorpusError(f"{source}: wanted BioC without entities of its own: remove <!ENTITY …>")
    try:
        root = ET.fromstring(data)
    except ET.ParseError as error:
        raise CorpusError(
            f"{source}: wanted BioC's XML, it cannot be read ({error}): copy it again"
        ) from error
    if root.tag != "collection":
        raise CorpusError(
            f"{source}: wanted BioC's collection, got the element {root.tag!r}: give a file of BioC"
        )
    lines: list[Line] = []
    for number, document in enumerate(root.iter("document"), 1):
        try:
            lines += _of_bioc(document)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            lines.append(
                Unread(
                    f"document {number:,}: wanted passages with offset and text, and annotations "
                    f"with a type and locations, got others ({error!r}): correct or remove it"
                )
            )
    return lines


def _of_bioc(document: ET.Element) -> Iterator[Line]:
    spans: list[Record] = []
    unused = Counter[str](relations=len([*document.iter("relation")]))
    for annotation in document.iter("annotation"):
        infons = {infon.get("key"): infon.text for infon in annotation.iter("infon")}
        unused["infons"] += len(infons) - 1
        places = [*annotation.iter("location")]
        if len(places) > 1:
            unused["annotations of several parts"] += 1
            continue
        start = int(places[0].attrib["offset"])
        end = start + int(places[0].attrib["length"])
        own = annotation.findtext("text")
        spans.append({"start": start, "end": end, "label": infons["type"], "text": own})
    text, offsets_are_right = _text_of([*document.iter("passage")], spans)
    unused[CONTRADICTED] += not offsets_are_right
    record = {"text": text, "id": document.findtext("id")}
    yield with_labels(record, []) | {"spans": spans}
    yield from (Unused(what, count) for what, count in unused.items())


def _text_of(passages: list[ET.Element], spans: list[Record]) -> tuple[str, bool]:
    """Return the text of a document, and whether its passages are at the offsets that they state.

    Offsets may be those of escaped text (`&apos;` for `'`), as in the sample of BioCreative V CDR.
    If more annotations have their own texts without them, passages follow each other with a space.
    """
    own = [_passage_text(passage) for passage in passages]
    stated = ""
    for passage, text in zip(passages, own, strict=True):
        stated = stated.ljust(int(passage.findtext("offset", ""))) + text
    joined = " ".join(own)

    def fitting(text: str) -> int:
        return sum(text[span["start"] : span["end"]] == span["text"] for span in spans)

    is_right = fitting(stated) >= fitting(joined)
    return (stated if is_right else joined), is_right


def _passage_text(passage: ET.Element) -> str:
    text = passage.findtext("text")
    if text is not None:
        return text
    return " ".join(sentence.findtext("text", "") for sentence in passage.iter("sentence"))
