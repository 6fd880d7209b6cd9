"""CoNLL's formats: a token per line, sentences between blank lines."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from bert_core.data.json_rows import Unread
from bert_core.data.labelled.lines import Comment, Line, Unused, lines_of
from bert_core.data.tables import check_header, not_utf8_in
from bert_core.errors import CorpusError

CONLLU_COLUMNS = (
    "id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc",
)  # fmt: skip
OUTSIDE = "O"
_EXPRESSIONS = "parseme:mwe"
# Blanks and tabs separate columns, and nothing else does: a no-break space is part of a token.
_BLANK = " \t\r"
_BLANKS = re.compile(" +")
_BOUNDARY = re.compile(r"-DOCSTART-|#\s*(?:begin|end) document\b")
_COMMENT = re.compile(r"#(?:[ \t]|$)")
_ASSIGNMENT = re.compile(r"#[ \t]*[\w.:-]+[ \t]*=")
_COLUMNS = re.compile(r"#[ \t]*global\.columns[ \t]*=[ \t]*(.+)", re.IGNORECASE)


def conll(data: bytes, source: str) -> list[Line]:
    """Read sentences between blank lines, one token per line; columns `0`, `1`, … and `-1`, the
    last.

    The number of columns is that of most lines. A line with `#` and a blank at the beginning of a
    sentence is a comment (`# id 5239d808`, `# s1`), unless it looks like a token: it has that many
    columns, and another token has the same value in the last column.
    """
    lines = lines_of(data)
    sound = [row for row in map(_cells, lines) if row and not _COMMENT.match(row[0])]
    usual = Counter(map(len, sound)).most_common(1)
    columns = max(2, usual[0][0]) if usual else 2
    tags = {row[-1] for row in sound}

    def is_comment(line: str) -> bool:
        row = _cells(line)
        is_token = len(row) == columns and row[-1] in tags and not _ASSIGNMENT.match(line)
        return bool(_COMMENT.match(line)) and not is_token

    records: list[Line] = []
    for sentence in _sentences(lines, columns, is_comment):
        if isinstance(sentence, Comment | Unread):
            records.append(sentence)
            continue
        cells = [list(column) for column in zip(*sentence, strict=True)]
        record = {str(place): column for place, column in enumerate(cells)}
        records.append(record | {"-1": cells[-1]})
    return records


def conllu(data: bytes, source: str) -> list[Line]:
    """Read sentences of CoNLL-U by column name, without ranges (`1-2`) and empty nodes (`8.1`).

    CoNLL-U Plus names its columns in the first line (`# global.columns = ID FORM …`), in any order,
    and may have no ids. An attribute of MISC (`Entity=B-PER|SpaceAfter=No`) is a column too,
    `misc.entity`, with `O` for words without it.
    """
    lines = lines_of(data)
    named = _COLUMNS.match(lines[0])
    names = tuple(named[1].lower().split()) if named else CONLLU_COLUMNS
    if fault := not_utf8_in(names):
        raise CorpusError(f"{source}, line 1: {fault}")
    check_header(names, source)
    place = names.index("id") if "id" in names else None
    records: list[Line] = []
    for sentence in _sentences(lines, len(names), lambda line: line.startswith("#"), names):
        if isinstance(sentence, Unread):
            records.append(sentence)
        elif isinstance(sentence, Comment):
            continue
        elif words := [row for row in sentence if place is None or row[place].isdecimal()]:
            columns = zip(*words, strict=True)
            records.append(
                {name: list(column) for name, column in zip(names, columns, strict=True)}
            )
    return _with_attributes(records)


def _with_attributes(lines: Sequence[Line]) -> list[Line]:
    """Return the lines with a column for each attribute that MISC has somewhere in the file."""
    found: list[list[dict[str, str]]] = [
        [_attributes(cell) for cell in line.get("misc", ())] if isinstance(line, dict) else []
        for line in lines
    ]
    names = dict.fromkeys(name for words in found for word in words for name in word)
    return [
        {**line, **{name: [word.get(name, OUTSIDE) for word in words] for name in names}}
        if words and isinstance(line, dict)
        else line
        for line, words in zip(lines, found, strict=True)
    ]


def _attributes(cell: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in cell.split("|"))
    return {f"misc.{name.strip().lower()}": value for name, mark, value in pairs if mark and value}


def cupt(data: bytes, source: str) -> list[Line]:
    """Read PARSEME's files (`.cupt`), CoNLL-U Plus whose expressions are numbered in a column: with
    a column `mwe` of tags in BIO.

    The parts of an expression with a gap are tagged like expressions, and of expressions that share
    a word the first has it; both are counted.
    """
    lines: list[Line] = []
    for line in conllu(data, source):
        if not isinstance(line, dict):
            lines.append(line)
        elif _EXPRESSIONS not in line:
            raise CorpusError(
                f"{source}: wanted a column {_EXPRESSIONS.upper()}, there are: {', '.join(line)}: "
                "give a file of PARSEME, or format conllu"
            )
        else:
            tags, gaps, shared = _tags_of_expressions(line[_EXPRESSIONS])
            lines += [{**line, "mwe": tags}]
            lines += [Unused("gaps within expressions", gaps)]
            lines += [Unused("words of a second expression", shared)]
    return lines


def _tags_of_expressions(cells: Sequence[str]) -> tuple[list[str], int, int]:
    """Return tags in BIO, the number of gaps, and of words that are of another expression too.

    Source: PARSEME 1.1: `1:VID` at an expression's first word, `1` at the others, `;` between
    expressions, `*` or `_` for none.
    """
    types: dict[str, str] = {}
    last: dict[str, int] = {}
    tags, gaps, shared = [OUTSIDE] * len(cells), 0, 0
    for place, cell in enumerate(cells):
        numbers = [part for part in cell.split(";") if part not in ("*", "_")]
        shared += max(0, len(numbers) - 1)
        for part in numbers:
            number, _, kind = part.partition(":")
            types.setdefault(number, kind)
            goes_on = last.get(number) == place - 1
            gaps += number in last and not goes_on
            last[number] = place
            if part == numbers[0]:
                goes_on = goes_on and tags[place - 1].endswith(f"-{types[number]}")
                tags[place] = f"{'I' if goes_on else 'B'}-{types[number]}"
    return tags, gaps, shared


def _cells(line: str) -> list[str]:
    """Return the columns of a line, split at tabs if it has any, otherwise at blanks; empty for a
    blank line or a document boundary."""
    line = line.rstrip("\r")
    if not line.strip(_BLANK) or _BOUNDARY.match(line):
        return []
    return line.split("\t") if "\t" in line else _BLANKS.split(line.strip(" "))


def _sentences(
    lines: Sequence[str],
    columns: int,
    is_comment: Callable[[str], bool],
    names: Sequence[str] = (),
) -> Iterator[list[list[str]] | Comment | Unread]:
    """Yield the sentences, as their rows between blank lines, and the comments before them. A
    sentence with a row that does not have `columns` columns is yielded as `Unread`.

    Args:
        is_comment: whether a line is a comment. It is called only for lines that begin a sentence,
            unless there are `names`: such formats have comments anywhere.
        names: names of the columns, if the format has them; its columns are separated by tabs.
    """
    rows: list[list[str]] = []
    fault: Unread | None = None
    wanted = f"{columns} columns"
    if names:
        wanted += f" between tabs ({', '.join(names)})"
    for number, line in enumerate([*lines, ""], 1):
        if not (row := _cells(line)):
            if rows:
                yield fault or rows
            rows, fault = [], None
            continue
        if (names or not rows) and is_comment(line):
            yield Comment(line.strip(_BLANK).encode(errors="replace").decode())
            continue
        rows.append(row)
        wrong = not_utf8_in(row)
        if not wrong and len(row) != columns:
            wrong = (
                f"wanted {wanted}, got {len(row)} ({line.strip(_BLANK)[:80]!r}): correct the line, "
                "or remove its sentence"
            )
        if wrong and fault is None:
            fault = Unread(f"line {number:,}: {wrong}")
