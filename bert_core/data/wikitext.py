"""Articles of a Wikipedia dump (`pages-articles.xml`) as plain text. Pure: no files here.

mwparserfromhell parses the markup. It takes quadratic time if brackets or tags are not closed. So
all that contains no prose, and every unmatched mark, is first cut out in linear time, with a stack.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree as ET

import mwparserfromhell
from mwparserfromhell.nodes import ExternalLink, HTMLEntity, Tag, Text, Wikilink

from bert_core.errors import CorpusError

# The end of a page, so that a dump can be split between pages.
PAGE_END = re.compile(rb"</page>\s*")

# Sections of the English Wikipedia that only list and cite; their subsections go with them.
SECTIONS_WITHOUT_PROSE = frozenset(
    [
        *("references", "notes", "notes and references", "references and notes", "footnotes"),
        *("citations", "sources", "works cited", "bibliography", "general references"),
        *("see also", "external links", "further reading", "gallery", "literature"),
    ]
)

_PAGE, _END_OF_PAGE = b"<page>", b"</page>"
_TITLE = re.compile(rb"<title>(.*?)</title>")


def dump_pages(data: bytes, source: str, offset: int = 0) -> Iterator[tuple[str, str]]:
    """Yield title and wikitext of every article in `data`, a part of a dump from byte `offset` on.

    Pages of other namespaces, redirects, and pages that are not wikitext or have no text are
    skipped; so is everything outside complete `<page>` elements. If a page has several revisions,
    the last is used.
    Raises: CorpusError naming `source`, the byte and the title if a page is not well-formed.
    """
    end = 0
    while (start := data.find(_PAGE, end)) >= 0:
        end = data.find(_END_OF_PAGE, start) + len(_END_OF_PAGE)
        if end < len(_END_OF_PAGE):
            return
        # A page has no DTD, so it cannot declare entities.
        try:
            page = ET.fromstring(data[start:end])
        except ET.ParseError as error:
            title = _TITLE.search(data, start, end)
            name = f" ({title[1].decode('utf-8', 'replace')})" if title else ""
            raise CorpusError(
                f"{source}: wanted pages of well-formed XML, the one at byte "
                f"{offset + start:,}{name} is not ({error}): download the dump again, or remove "
                "the page"
            ) from error
        yield from _article(page)


def _article(page: ET.Element) -> Iterator[tuple[str, str]]:
    revision = page.find("revision[last()]")
    if page.findtext("ns") != "0" or page.find("redirect") is not None or revision is None:
        return
    of_wikitext = revision.findtext("model", "wikitext") == "wikitext"
    text = revision.findtext("text")
    if of_wikitext and revision.findtext("format", "text/x-wiki") == "text/x-wiki" and text:
        yield page.findtext("title", ""), text


_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_MAGIC_WORD = re.compile(r"__[A-Z]{3,}__")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"^(={1,6})([^\n]+)\1[ \t]*$", re.MULTILINE)
_LIST_MARKER = re.compile(r"^(?:[*#:;]+|-{4,})[ \t]*", re.MULTILINE)
_EQUALS_SIGNS = re.compile(r"^=+", re.MULTILINE)
# Marks where something was cut out. It is removed from the input, and so is NUL, at which the
# parser stops.
_GAP = "\ufffc"
_NO_TEXT = re.compile(f"[\x00{_GAP}]")


def article_text(title: str, wikitext: str) -> str:
    """Return the prose of an article: its title, then paragraphs and headings, separated by blank
    lines; empty if it has no prose.

    Templates, tables, references, images, formulas and code are left out, and so are headings
    without text under them; lists keep their lines. What templates would show (measures, words in
    other scripts) is therefore missing.
    """
    text = _COMMENT.sub("", _NO_TEXT.sub("", wikitext))
    text = _QUOTES.sub(_apostrophes, _MAGIC_WORD.sub("", text))
    # Per section: the signs of its heading, the heading, the text under it.
    lead, *sections = _HEADING.split(text)
    blocks = [_plain(lead)]
    headings: list[tuple[int, str]] = []  # no text under them so far
    left_out = 7  # the level of the section that is left out
    for signs, heading, body in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
        level, heading = len(signs), " ".join(_plain(heading).split())
        if level > left_out:
            continue
        left_out = level if heading.casefold() in SECTIONS_WITHOUT_PROSE else 7
        headings = [above for above in headings if above[0] < level]
        if left_out == 7:
            headings.append((level, heading))
            if plain := _plain(body):
                blocks += [*(above for _, above in headings), plain]
                headings = []
    prose = "\n\n".join(filter(None, blocks))
    return f"{title.strip()}\n\n{prose}" if prose else ""


def _apostrophes(quotes: re.Match[str]) -> str:
    """Return the apostrophes to show for two or more in a row: those that are left after the marks
    for italic (2), bold (3) or both (5)."""
    count = len(quotes[0])
    return "'" * (count - 5 if count > 5 else count == 4)


def _plain(wikitext: str) -> str:
    pieces: list[str] = []
    text = _LIST_MARKER.sub("", _cut_out(wikitext))
    # NOTE: a line like "=a=b=c…" with 50,000 signs makes the parser crash (segmentation fault).
    text = _EQUALS_SIGNS.sub(lambda match: "&#61;" * len(match[0]), text)
    _read(mwparserfromhell.parse(text, skip_style_tags=True).nodes, pieces)
    return _tidied("".join(pieces))


# Tags whose content is not wikitext, and except in <nowiki> not prose either.
_LITERAL = ["ce", "chem", "graph", "hiero", "maplink", "math", "nowiki", "pre", "score", "source"]
_LITERAL += ["syntaxhighlight", "timeline"]
_LITERAL_END = {name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in _LITERAL}
# Brackets and tags that are cut out with everything in them.
_CUT_OUT = {"{{", "{|", "gallery", "imagemap", "includeonly", "inputbox", "ref", "references"}
_CUT_OUT |= {"table", *_LITERAL_END} - {"nowiki"}
_LINE_BREAKS = {"br", "dd", "dt", "hr", "li", "p"}  # need not be closed
_PARTNERS = {"}}": "{{", "]]": "[[", "]": "["}
_MARK = re.compile(
    r"""
    \{\{ | \}\} | \[\[ | \]\] | \[(?=[a-z]+:|//) | \]
    | (?P<table>^[ \t:*\#;]*\{\|[^\n]*) | (?P<table_end>^[ \t]*\|\}(?!\}))
    | <(?P<slash>/?)(?P<tag>[a-z][a-z0-9]*)(?:\s[^<>]*?)?(?P<void>/?)> | <
    """,
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_MAX_DEPTH = 30  # the parser does not parse what is nested deeper than 40


class _Output:
    """The text that is kept so far, and the marks in it that are not closed yet.

    A gap replaces each dropped mark, so that its neighbours do not form a new one.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self._open: list[tuple[str, int]] = []  # kind of each open mark, and its place in `pieces`
        self._depths: Counter[str] = Counter()

    def opens(self, kind: str, mark: str) -> None:
        too_deep = len(self._open) == _MAX_DEPTH
        if not too_deep:
            self._open.append((kind, len(self.pieces)))
            self._depths[kind] += 1
        self.pieces.append(_GAP if too_deep else mark)

    def closes(self, kind: str, mark: str) -> None:
        """Close the last open mark of `kind`, and drop marks opened since. If none of that kind is
        open, drop `mark`."""
        if not self._depths[kind]:
            self.pieces.append(_GAP)
            return
        while self.innermost() != kind:
            self.drop_innermost()
        if kind in _CUT_OUT:
            start = self.drop_innermost()
            del self.pieces[start + 1 :]
        else:
            self._depths[kind] -= 1
            self._open.pop()
            self.pieces.append(mark)

    def innermost(self) -> str | None:
        return self._open[-1][0] if self._open else None

    def drop_innermost(self) -> int:
        kind, start = self._open.pop()
        self._depths[kind] -= 1
        self.pieces[start] = _GAP
        return start


def _cut_out(wikitext: str) -> str:
    """Return `wikitext` without templates, tables, references, …, and without unmatched marks.

    If marks overlap (`[[ {{ ]] }}`), the pair that closes first is kept as a pair.
    """
    output, position = _Output(), 0
    endless: set[str] = set()  # tags that are not closed from here on
    while match := _MARK.search(wikitext, position):
        output.pieces.append(wikitext[position : match.start()])
        mark, position = match[0], match.end()
        tag = (match["tag"] or "").lower()
        if mark == "]]" and output.innermost() == "[":
            mark, position = "]", position - 1
        if mark == "<":
            output.pieces.append("&lt;")
        elif mark == "]" and output.innermost() != "[":
            output.pieces.append(mark)
        elif tag in _LINE_BREAKS:
            output.pieces.append("\n")
        elif match["void"]:
            output.pieces.append(_GAP)
        elif tag in _LITERAL_END and not match["slash"]:
            end = None if tag in endless else _LITERAL_END[tag].search(wikitext, position)
            if end:
                position = end.end()
                output.pieces.append(
                    _GAP if tag in _CUT_OUT else wikitext[match.start() : position]
                )
            else:
                endless.add(tag)
                output.pieces.append(_GAP)
        elif match["slash"] or match["table_end"] or mark in _PARTNERS:
            output.closes(tag or _PARTNERS.get(mark, "{|"), mark)
        else:
            output.opens(tag or ("{|" if match["table"] else mark), mark)
    while output.innermost():
        output.drop_innermost()
    return "".join([*output.pieces, wikitext[position:]])


# Links that show nothing, by namespace, by file, by language.
_HIDDEN_NAMESPACES = frozenset(["category", "file", "image"])
_FILE = re.compile(r":.*\.(?:gif|jpe?g|oga|ogg|ogv|pdf|png|svg|tiff?|webm|webp)\Z", re.IGNORECASE)
_LANGUAGE = re.compile(r"(?:[a-z]{2,3}(?:-[a-z]+)*|simple):")
_BLOCKS = frozenset(["blockquote", "center", "div", "dl", "ol", "poem", "ul"])


def _read(nodes: Sequence[Any], pieces: list[str]) -> None:
    """Append the text that `nodes` show to `pieces`."""
    for node in nodes:
        if isinstance(node, Text):
            pieces.append(str(node))
        elif isinstance(node, HTMLEntity):
            pieces.append(_NO_TEXT.sub("", node.normalize()))
        elif isinstance(node, Wikilink):
            _read_link(node, pieces)
        elif isinstance(node, ExternalLink):
            shown = node.title if node.brackets else node.url
            _read(shown.nodes, pieces) if shown else pieces.append(_GAP)
        elif isinstance(node, Tag) and not node.wiki_markup:
            around = "\n" if str(node.tag).strip().lower() in _BLOCKS else ""
            pieces.append(around)
            _read(node.contents.nodes if node.contents else [], pieces)
            pieces.append(around)
        else:
            pieces.append(_GAP)


def _read_link(link: Wikilink, pieces: list[str]) -> None:
    shown: list[str] = []
    _read(link.title.nodes, shown)  # a target may hold entities, as in [[AT&amp;T]]
    target = "".join(shown).strip()
    namespace, colon, _ = target.partition(":")
    hidden = colon and namespace.strip().lower() in _HIDDEN_NAMESPACES
    if hidden or _FILE.search(target) or (link.text is None and _LANGUAGE.match(target)):
        pieces.append(_GAP)
    elif link.text:
        _read(link.text.nodes, pieces)
    else:
        pieces.append(target.removeprefix(":"))


# NOTE: possessive (`++`), or a long run that fails would be retried from each of its characters.
_EMPTY_BRACKETS = re.compile(rf"[(\[]([\s,;:/{_GAP}]*+)[)\]]")
_AFTER_BRACKET = re.compile(rf"\(([\s,;:{_GAP}]++)")
_BEFORE_BRACKET = re.compile(rf"(?<![\s,;:{_GAP}])([\s,;:{_GAP}]++)\)")
_BETWEEN_COMMAS = re.compile(rf"([,;])[ {_GAP}]*+\1")
_BEFORE_SIGN = re.compile(rf"(?<![ {_GAP}])([ {_GAP}]++)([,.;:!?])")
_BLANK_LINES = re.compile(r"\n{3,}")


def _tidied(text: str) -> str:
    """Return `text` without gaps and what they leave behind: "()", "(, born", " ,", blank
    lines."""
    text = _at_gaps(_EMPTY_BRACKETS, _GAP, text)
    text = _at_gaps(_AFTER_BRACKET, "(", text)
    text = _at_gaps(_BEFORE_BRACKET, ")", text)
    text = _at_gaps(_BETWEEN_COMMAS, r"\1", text)
    text = _at_gaps(_BEFORE_SIGN, r"\2", text)
    lines = []
    for line in text.split("\n"):
        shown = " ".join(line.replace(_GAP, "").split())
        # Skip cells of an unclosed table, and lines of nothing but gaps.
        if not shown.startswith("|") and (shown or _GAP not in line):
            lines.append(shown)
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def _at_gaps(pattern: re.Pattern[str], instead: str, text: str) -> str:
    """Return `text` with each match that contains a gap replaced by `instead`."""
    if _GAP not in text:
        return text
    return pattern.sub(lambda match: match.expand(instead) if _GAP in match[0] else match[0], text)
