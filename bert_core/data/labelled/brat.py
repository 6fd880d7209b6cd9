"""brat's standoff: annotations in a `.ann` file, about the text in the `.txt` file beside it.

Source: brat 1.3, "brat standoff format".
"""

import re
from collections import Counter

from bert_core.data.formats import decode_utf8
from bert_core.data.json_rows import Unread
from bert_core.data.labelled.lines import Line, Record, Unused, with_labels

_KINDS = {
    "E": "events", "R": "relations", "*": "equivalences", "A": "attributes", "M": "attributes",
    "N": "normalizations", "#": "notes",
}  # fmt: skip
_ENTITY = re.compile(r"(T[^\t]*)\t(\S+) ([0-9]+ [0-9]+(?:;[0-9]+ [0-9]+)*)(?:\t(.*))?")


def brat(data: bytes, source: str, text: bytes) -> list[Line]:
    """Read the row of a document: its text with spans.

    An entity of several parts is left out and counted, since a span has no gaps.

    Args:
        text: the contents of the `.txt` file.
    """
    document = decode_utf8(text, source.rpartition(".")[0] + ".txt")
    spans: list[Record] = []
    unused = Counter[str]()
    for number, line in enumerate(decode_utf8(data, source).removeprefix("\ufeff").split("\n"), 1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        if line[0] in _KINDS:
            unused[_KINDS[line[0]]] += 1
            continue
        match = _ENTITY.fullmatch(line)
        if match is None:
            return [
                Unread(
                    f"line {number:,}: wanted an entity such as `T1\tplace 0 4\tRome`, an event "
                    f"(E), a relation (R, *), an attribute (A, M), N or #, got {line[:80]!r}: "
                    "correct or remove the line"
                )
            ]
        if ";" in match[3]:
            unused["entities of several parts"] += 1
            continue
        start, end = map(int, match[3].split(" "))
        spans.append(
            {"start": start, "end": end, "label": match[2], **_own(match[4], document[start:end])}
        )
    record = {"text": document, "id": source.rpartition("/")[2].removesuffix(".ann")}
    notes = [Unused(what, count) for what, count in unused.items()]
    return [with_labels(record, []) | {"spans": spans}, *notes]


def _own(given: str | None, text: str) -> Record:
    """Return the entity's own text, with line breaks where the document has them: the file has
    spaces for these."""
    if given is None:
        return {}
    return {"text": text if re.sub(r"[\r\n]", " ", text) == given else given}
