"""WebAnno's and INCEpTION's TSV 3: a token per line with its characters, a column per feature.

Source: WebAnno 3.6, "WebAnno TSV 3.2 File format"; INCEpTION writes 3.3, with the same columns.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bert_core.data.json_rows import Unread
from bert_core.data.labelled.lines import Line, Unused, lines_of, with_labels
from bert_core.data.positions import characters_at
from bert_core.data.tables import not_utf8_in
from bert_core.errors import CorpusError

_TOKEN = re.compile(r"[0-9]+-[0-9]+(\.[0-9]+)?\t([0-9]+)-([0-9]+)\t")
_VALUE = re.compile(r"(.*?)(?:\[([0-9]+)\])?")
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
PREFERRED = "NamedEntity.value"
"""The column of spans, if the file has it; otherwise the first feature of its first layer."""


def webanno(data: bytes, source: str) -> list[Line]:
    """Read a row per sentence, with a column of spans per feature of a layer of spans, such as
    `NamedEntity.value`; `spans` are those of `PREFERRED`.

    Raises: CorpusError if the file does not begin as WebAnno's do.
    """
    lines = lines_of(data)
    if not lines[0].startswith("#FORMAT=WebAnno TSV 3"):
        raise CorpusError(
            f"{source}: wanted WebAnno TSV 3, whose first line is #FORMAT=WebAnno TSV 3.…, got "
            f"{lines[0][:60]!r}: export as WebAnno TSV v3"
        )
    columns = _columns(lines)
    spans = [name for kind, name in columns if kind == "#T_SP" and name]
    if not spans:
        raise CorpusError(
            f"{source}: wanted a layer of spans (#T_SP=…|feature), the file has none: export a "
            "project with one"
        )
    chosen = PREFERRED if PREFERRED in spans else spans[0]
    read: list[Line] = []
    for first, texts, tokens in _sentences(lines):
        read += _sentence(first, texts, tokens, columns, chosen)
    return read


def _columns(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return kind and name (`Layer.feature`) of each column after those of the token."""
    columns: list[tuple[str, str]] = []
    for line in lines:
        kind, _, rest = line.partition("=")
        if kind in ("#T_SP", "#T_CH", "#T_RL"):
            layer, *features = rest.rstrip("\r").split("|")
            short = layer.rpartition(".")[2]
            # A layer without features has a column that says `*` where it is.
            names = [f"{short}.{feature}" for feature in features if not feature.startswith("BT_")]
            columns += [(kind, name) for name in names or [short]]
            columns += [(kind, "")] if kind == "#T_RL" else []
        elif line and not line.startswith("#"):
            break
    return columns


def _sentences(lines: Sequence[str]) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield the number of the first line of each sentence, its `#Text=` lines, and its tokens."""
    texts: list[str] = []
    tokens: list[str] = []
    first = 1
    for number, line in enumerate([*lines, ""], 1):
        line = line.rstrip("\r")
        if line.startswith("#Text="):
            if not texts and not tokens:
                first = number
            texts.append(line.removeprefix("#Text="))
        elif line and not line.startswith("#"):
            tokens.append(line)
        elif not line and tokens:
            yield first, texts, tokens
            texts, tokens = [], []


def _sentence(
    first: int,
    texts: Sequence[str],
    tokens: Sequence[str],
    columns: Sequence[tuple[str, str]],
    chosen: str,
) -> Iterator[Line]:
    text = "\n".join(_ESCAPED.sub(lambda at: _ESCAPES.get(at[1], at[1]), each) for each in texts)
    fault = not_utf8_in([*texts, *tokens])
    rows = [line.rstrip("\t").split("\t") for line in tokens]
    places = [_TOKEN.match(line) for line in tokens]
    if not fault and (None in places or any(len(row) < 3 for row in rows)):
        wrong = tokens[places.index(None)] if None in places else min(tokens, key=len)
        fault = (
            f"wanted tokens such as `1-1`, their characters `0-5`, and the word, between tabs, got "
            f"{wrong[:60]!r}: correct the line, or remove its sentence"
        )
    if fault:
        yield Unread(f"line {first:,}: {fault}")
        return
    ends = [(int(place[2]), int(place[3])) for place in places if place is not None]
    start = ends[0][0]
    flat = characters_at(text, [each - start for pair in ends for each in pair], "UTF-16 units")
    found: dict[str, list[dict[str, Any]]] = {name: [] for kind, name in columns if kind == "#T_SP"}
    unused = Counter[str]()
    begun: dict[tuple[str, str], dict[str, Any]] = {}
    for place, row in enumerate(rows):
        for (kind, name), cell in zip(columns, row[3:], strict=False):
            for value in [] if cell == "_" else re.split(r"(?<!\\)\|", cell):
                if kind != "#T_SP":
                    unused["relations" if kind == "#T_RL" else "links of chains"] += bool(name)
                    continue
                match = _VALUE.fullmatch(value)
                assert match is not None
                label = _ESCAPED.sub(r"\1", match[1])
                if match[2] and (name, match[2]) in begun:
                    begun[name, match[2]]["end"] = flat[2 * place + 1]
                    continue
                span = {"start": flat[2 * place], "end": flat[2 * place + 1], "label": label}
                found[name].append(span)
                if match[2]:
                    begun[name, match[2]] = span
    for name, spans in found.items():
        unused[f"spans of {name}"] += len(spans) if name != chosen else 0
    yield with_labels({"text": text, **found}, []) | {"spans": found[chosen]}
    yield from (Unused(what, count) for what, count in unused.items())
