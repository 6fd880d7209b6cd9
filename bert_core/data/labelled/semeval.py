"""SemEval-2010 task 8: the relation between two marked nominals, four lines a record.

Source: Hendrickx et al. 2010, and the README of the data: a number, a tab and the quoted sentence
with `<e1>` and `<e2>`; the relation; a comment; an empty line.
"""

import re

from bert_core.data.json_rows import Unread
from bert_core.data.labelled.lines import Line, Unused, lines_of
from bert_core.data.tables import not_utf8_in

_SENTENCE = re.compile(r'([0-9]+)\t"(.*)"')
_COMMENT = "Comment:"


def semeval_relations(data: bytes, source: str) -> list[Line]:
    """Read a row per sentence, with its marks, its relation and its number as `id`."""
    read: list[Line] = []
    block: list[str] = []
    first = 1
    for number, line in enumerate([*lines_of(data), ""], 1):
        line = line.strip()
        if line:
            first = first if block else number
            block.append(line)
        elif block:
            match = _SENTENCE.fullmatch(block[0])
            fault = not_utf8_in(block)
            if not fault and (match is None or len(block) < 2 or block[1].startswith(_COMMENT)):
                fault = (
                    'wanted a number, a tab and a sentence in "…", then a line with its relation, '
                    f"got {' / '.join(block)[:80]!r}: correct the record, or remove it"
                )
            if fault or match is None:
                read.append(Unread(f"line {first:,}: {fault}"))
            else:
                read.append({"id": match[1], "text": match[2], "label": block[1]})
                comments = [each.removeprefix(_COMMENT).strip() for each in block[2:]]
                read.append(Unused("comments", sum(map(bool, comments))))
            block = []
    return read
