"""spaCy's annotated documents: its binary DocBin, and the JSONL of its examples, with `cats`.

Source: spaCy 3.8, "Data formats" and `spacy.tokens.DocBin`. A DocBin is read with spaCy itself,
since the numbers by which it stores words differ between versions.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bert_core.data.json_rows import Unread, json_rows
from bert_core.data.labelled.lines import Line, Unused, cats_of, needed, with_labels
from bert_core.errors import CorpusError
from bert_core.wording import shown

ENTITIES = "entities"


def spacy_docs(data: bytes, source: str) -> list[Line]:
    """Read a row per document: its entities as `spans`, its categories as labels, and a column for
    each group of spans.

    Raises: CorpusError for a file that is no DocBin (which is what a `.spacy` file is) and no
        JSONL; ResourceError without spaCy.
    """
    if data[:1] != b"\x78":  # as zlib's data begin
        lines: list[Line] = []
        for number, row in enumerate(json_rows(data, source, keep=True), 1):
            lines += [row] if isinstance(row, Unread) else _of_row(row, number)
        return lines
    tokens, vocab = needed("spacy.tokens", "spacy", source), needed("spacy.vocab", "spacy", source)
    try:
        docs = [*tokens.DocBin().from_bytes(data).get_docs(vocab.Vocab())]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise CorpusError(
            f"{source}: wanted a DocBin, as spaCy writes it, it cannot be read "
            f"({type(error).__name__}: {error}): copy it again, or write it with spaCy 3"
        ) from error
    return [line for doc in docs for line in _of_doc(doc)]


def _of_doc(doc: Any) -> Iterator[Line]:
    groups = {name: [_span(span) for span in spans] for name, spans in doc.spans.items()}
    record = {"text": doc.text, **groups, "spans": [_span(span) for span in doc.ents]}
    yield with_labels(record, cats_of(doc.cats))
    yield from (Unused(f"spans of the group {name}", len(each)) for name, each in groups.items())


def _span(span: Any) -> dict[str, Any]:
    return {"start": span.start_char, "end": span.end_char, "label": span.label_, "text": span.text}


def _of_row(row: Mapping[str, Any], number: int) -> Iterator[Line]:
    cats = row.get("cats", {})
    spans: Any = row.get("spans", row.get(ENTITIES, []))
    if not _are_cats(cats) or not isinstance(spans, Sequence):
        yield Unread(
            f"row {number}: wanted cats with a number for each category, and a list of spans or "
            f"entities, got {shown(cats if not _are_cats(cats) else spans)}: correct the row, or "
            "remove it"
        )
        return
    unused = Counter({name: len(row[name]) for name in ("links", "relations") if name in row})
    yield with_labels({**row, "spans": [*spans]}, cats_of(cats))
    yield from (Unused(what, count) for what, count in unused.items())


def _are_cats(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(share, int | float) for share in value.values()
    )
