"""A dump as the exporter writes it: which pages are articles, and what of an article is prose."""

import bz2
import random
import subprocess
import sys
from xml.sax.saxutils import escape

import mwparserfromhell
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bert_core.data.wikitext import (
    PAGE_END,
    SECTIONS_WITHOUT_PROSE,
    article_text,
    dump_pages,
)
from bert_core.errors import CorpusError

HEADER = """\
<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" \
xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" xsi:schemaLocation="\
http://www.mediawiki.org/xml/export-0.11/ http://www.mediawiki.org/xml/export-0.11.xsd" \
version="0.11" xml:lang="en">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>enwiki</dbname>
    <base>https://en.wikipedia.org/wiki/Main_Page</base>
    <generator>MediaWiki 1.44.0</generator>
    <case>first-letter</case>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Talk</namespace>
    </namespaces>
  </siteinfo>
"""
FOOTER = "</mediawiki>\n"

LIGHTHOUSE = """\
{{Short description|Lighthouse on a rock}}
{{Infobox lighthouse
| name   = Gull Rock Light
| image  = [[File:Gull Rock.jpg|250px]]
| height = {{convert|31|m|ft|abbr=on}}
}}
<!-- The name is disputed:
== see the talk page == -->
'''Gull Rock Light''' ({{lang|cy|Goleudy}}; built 1874) is a [[lighthouse]] on \
[[Gull Rock (island)|Gull Rock]],<ref name="a">{{cite book |title=Lights}}</ref> off the \
''western'' coast.<ref name="a" /> Its keeper&nbsp;– Ann&#39;s uncle – left in 1931\
 {{citation needed}}.

It is {{val|31}} ({{abbr|m}}, {{abbr|ft}}) tall &amp; white. The '''''Petrel''''' struck \
[[reef]]s nearby, in 4&nbsp;&lt;&nbsp;5 fathoms.
[[File:Gull.jpg|thumb|upright|A [[gull]] on the [[rock|rocks]], {{circa}} 1900]]

== History ==
[[Image:Plan.svg|left]]
=== Building ===
The first stone was laid by [[:Category:Lighthouse keepers|keepers]]; see [https://example.org/a \
the ''report''] [https://example.org/b] and http://example.org/c.

{| class="wikitable"
! Year !! Event
|-
| 1874 || First {| nested
|}
|}
The lamp burns at <math>t = {x \\over 2}</math> o'clock.<br />It has
* a lens,
* two [[oil lamp|lamps]]:
** one red<sup>a</sup>
# and a horn.
; Range : 12 miles
:: indented
----
=== Empty ===
{{Empty section|date=May 2020}}
=== Pictures ===
<gallery mode="packed">
Gull.jpg|A gull
Rock.jpg|The rock
</gallery>

== See also ==
* [[Petrel Light]]
=== Lights nearby ===
* [[Tern Light]]

== Today ==
<div style="x">
Visitors land there <nowiki>[[twice]] a day</nowiki>.
</div>
__NOTOC__
== References ==
{{reflist|refs=
<ref name="b">A book.</ref>
}}
Some stray text.
== External links ==
* [https://example.org Official site]
{{Authority control}}
{{DEFAULTSORT:Gull Rock}}
[[Category:Lighthouses]]
[[de:Gull Rock]]
[[zh-yue:Gull Rock]]
"""
LIGHTHOUSE_TEXT = """\
Gull Rock Light

Gull Rock Light (built 1874) is a lighthouse on Gull Rock, off the western coast. Its keeper – \
Ann's uncle – left in 1931.

It is tall & white. The Petrel struck reefs nearby, in 4 < 5 fathoms.

History

Building

The first stone was laid by keepers; see the report and http://example.org/c.

The lamp burns at o'clock.
It has
a lens,
two lamps:
one reda
and a horn.
Range : 12 miles
indented

Today

Visitors land there [[twice]] a day."""

LENS = "A '''lens''' of [[glass]] bends light.\n\nMade < 1823 by [[Augustin Fresnel|Fresnel]].\n"
LENS_TEXT = "Lens\n\nA lens of glass bends light.\n\nMade < 1823 by Fresnel."


def page(
    title: str,
    text: str,
    *,
    namespace: int = 0,
    redirect: str | None = None,
    model: str = "wikitext",
    text_format: str = "text/x-wiki",
) -> str:
    """A page as MediaWiki's Special:Export and the dumps write it."""
    to = f'\n    <redirect title="{escape(redirect)}" />' if redirect else ""
    return f"""\
  <page>
    <title>{escape(title)}</title>
    <ns>{namespace}</ns>
    <id>{len(title)}</id>{to}
    <revision>
      <id>1002250816</id>
      <parentid>854851586</parentid>
      <timestamp>2021-01-23T15:15:01Z</timestamp>
      <contributor>
        <username>Someone &amp; Co</username>
        <id>20842734</id>
      </contributor>
      <minor />
      <comment>shel &lt;page&gt;</comment>
      <origin>1002250816</origin>
      <model>{model}</model>
      <format>{text_format}</format>
      <text bytes="{len(text.encode())}" sha1="42l0cvblwtb4nnupxm6wo000d27t6kf" \
xml:space="preserve">{escape(text)}</text>
      <sha1>42l0cvblwtb4nnupxm6wo000d27t6kf</sha1>
    </revision>
  </page>
"""


PAGES = [
    page("Gull Rock Light", LIGHTHOUSE),
    page("Gull Rock", "#REDIRECT [[Gull Rock Light]]", redirect="Gull Rock Light"),
    page("Talk:Gull Rock Light", "Is it true? ~~~~", namespace=1),
    page(
        "Lights & lamps", "Lights \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")
    ),
    page("Data", '{"a": 1}', model="json", text_format="application/json"),
    page("Nothing", ""),
    page("Lens", LENS),
]
ARTICLES = [
    ("Gull Rock Light", LIGHTHOUSE),
    ("Lights & lamps", "Lights 😀"),
    ("Lens", LENS),
]


def test_articles_are_distinguished_from_redirects_other_namespaces_and_other_models() -> None:
    dump = (HEADER + "".join(PAGES) + FOOTER).encode()
    assert list(dump_pages(dump, "a.xml")) == ARTICLES


def test_a_dump_of_many_streams_holds_the_pages_of_one() -> None:
    streams = [HEADER, "".join(PAGES[:2]), "".join(PAGES[2:5]), "".join(PAGES[5:]), FOOTER]
    dump = bz2.decompress(b"".join(bz2.compress(stream.encode()) for stream in streams))
    assert list(dump_pages(dump, "a.xml.bz2")) == ARTICLES


def test_a_dump_cut_where_pages_end_holds_the_same_articles() -> None:
    dump = (HEADER + "".join(PAGES) + FOOTER).encode()
    ends = [match.end() for match in PAGE_END.finditer(dump)]
    assert len(ends) == len(PAGES)
    for end in ends:
        parts = dump[:end], dump[end:]
        assert [article for part in parts for article in dump_pages(part, "a.xml")] == ARTICLES


def test_incomplete_pages_are_skipped() -> None:
    lens = page("Lens", LENS).encode()
    assert list(dump_pages(lens[40:] + lens + lens[:-20], "a.xml")) == [("Lens", LENS)]
    assert list(dump_pages(b"", "a.xml")) == []
    assert list(dump_pages(HEADER.encode(), "a.xml")) == []


def test_the_last_revision_counts() -> None:
    old, new = page("Lens", "old"), page("Lens", "new")
    revision = new[new.index("    <revision>") : new.index("  </page>")]
    both = old.replace("  </page>", revision + "  </page>")
    assert list(dump_pages(both.encode(), "a.xml")) == [("Lens", "new")]


def test_dumps_from_before_models_are_read() -> None:
    old = page("Lens", LENS).replace("<model>wikitext</model>", "")
    old = old.replace("<format>text/x-wiki</format>", "")
    assert list(dump_pages(old.encode(), "a.xml")) == [("Lens", LENS)]


@pytest.mark.parametrize(
    ("damage", "instead"),
    [
        ("</revision>", "</revison>"),
        ("Fresnel", "Fres&nbsp;nel"),  # no entity of XML
        ("Fresnel", "Fres\x00nel"),
        ("<revision>", "<!DOCTYPE a [<!ENTITY b 'c'>]><revision>"),
        ("  </page>\n", ""),  # two pages run into each other
    ],
)
def test_a_page_that_is_not_xml_is_named_with_its_place(damage: str, instead: str) -> None:
    before = page("Gull Rock", "A rock.").encode()
    dump = before + page("Lens & light", LENS).replace(damage, instead).encode()
    pages = dump_pages(dump + before, "s3://b/a.xml", offset=1_000_000)
    assert next(pages) == ("Gull Rock", "A rock.")
    said = (
        rf"^s3://b/a\.xml: wanted pages .* at byte {1_000_002 + len(before):,} \(Lens &amp; light\)"
    )
    with pytest.raises(CorpusError, match=rf"{said} is not \(.*\): download the dump again, or "):
        next(pages)


def test_a_page_that_is_not_utf8_is_named() -> None:
    with pytest.raises(CorpusError, match=r"at byte 2 \(Lens\) is not \(not well-formed"):
        list(dump_pages(page("Lens", "é").encode("latin-1"), "a.xml"))


def test_an_article_comes_out_as_its_prose() -> None:
    assert article_text("Gull Rock Light", LIGHTHOUSE) == LIGHTHOUSE_TEXT
    assert article_text("Lens", LENS) == LENS_TEXT


@pytest.mark.parametrize(
    ("wikitext", "prose"),
    [
        # What a template leaves behind.
        ("Ann ({{IPA|x}}) sang.", "Ann sang."),
        ("Ann ({{IPA|x}}, {{respell|y}}; born 1900) sang.", "Ann (born 1900) sang."),
        ("Ann (born 1900, {{age|x}}) sang.", "Ann (born 1900) sang."),
        ("Oslo, {{x}}, Norway {{y}}, a city {{z}}.", "Oslo, Norway, a city."),
        ("f() is , as written ; a [] ( ) too", "f() is , as written ; a [] ( ) too"),
        ("{{a|{{b|[[c]]}}|d={{e}}}} Text", "Text"),
        ("A{{a}}\n{{b}}\nB\n\n{{c}}\n\nC", "A\nB\n\nC"),
        # References, formulas, code, comments.
        ("A.<ref>x</ref> B<ref name=y/>, C.<references/>", "A. B, C."),
        ("A.<REF group=n>x [[y]]</REF> B", "A. B"),
        ("A <math>{x</math> B <source lang=c>[[</source>C", "A B C"),
        ("A<!-- x --> B <!-- no end", "A B"),
        # Links.
        ("[[a]]s, [[a|b]]s, [[:Category:A]], [[a#b|'''c''']]", "as, bs, Category:A, c"),
        ("[[File:a.png|thumb|b [[c]] {{d}}]] A [[image:b|c]]", "A"),
        ("[[Datei:Haus.JPG|mini|Ein Haus]]Text [[fr:Phare]] [[category : x]]", "Text"),
        ("[[Blade Runner: The Game|game]] [[Alien: Isolation]]", "game Alien: Isolation"),
        ("[http://a.org] [http://a.org b [[c]]] [//a.org d] [sic] a[1]", "b c d [sic] a[1]"),
        ("[[a|{{b}}]] and [[{{c}}]]", "and"),
        # Quotes.
        ("'''A''' ''b'' '''''c''''' L''''Été''' d'accord", "A b c L'Été d'accord"),
        # Tags and entities.
        ("H<sub>2</sub>O, <span class=x>a</span><br>b<br/>c <u>d</u>", "H2O, a\nb\nc d"),
        ("&eacute;&#233;&#xe9; &lt;b&gt; AT&T &nosuch; &amp;amp;", "ééé <b> AT&T &nosuch; &amp;"),
        ("<nowiki>''a'' {{b}}</nowiki> 3 < 4 > 2 <3", "a {{b}} 3 < 4 > 2 <3"),
        ("<blockquote>Said she.</blockquote>", "Said she."),
        ("A\u200b b\xa0c\td", "A\u200b b c d"),
        # Marks without a partner, and such that overlap.
        ("A {{b c", "A b c"),
        ("A [[b c", "A b c"),
        ("A }} b ]] c </ref> d |} e", "A b c d |} e"),
        ("A <ref>b. C", "A b. C"),
        ("A [[ b {{ c ]] d }} e", "A b c d e"),
        ("{| class=x\n| a\n\n== Sights ==\nText", "Sights\n\nText"),
        ("[http://a.org A", "http://a.org A"),
        ("{[[{a}}", "{{a"),
        ("[[File:a.png|[http://b.org c]]] D", "D"),
        # Headings.
        ("== ''A'' [[b]] ==\nText\n=B=\n==C==", "A b\n\nText"),
        ("==A==\n===B===\n====C====\nText\n==D==\nMore", "A\n\nB\n\nC\n\nText\n\nD\n\nMore"),
        ("a == b\n== c\nd ==", "a == b\n== c\nd =="),
    ],
)  # fmt: skip
def test_markup_comes_out_as_what_it_shows(wikitext: str, prose: str) -> None:
    assert article_text("T", wikitext) == f"T\n\n{prose}"


@pytest.mark.parametrize("heading", sorted(SECTIONS_WITHOUT_PROSE))
def test_a_section_of_references_is_left_out_with_its_subsections(heading: str) -> None:
    wikitext = f"A\n== {heading.title()} ==\nx\n=== Of them ===\ny\n== Life ==\nB"
    assert article_text("T", wikitext) == "T\n\nA\n\nLife\n\nB"


@pytest.mark.parametrize(
    "wikitext", ["", "{{a}}", "== A ==\n\n== B ==", "[[Category:A]]\n__NOTOC__"]
)
def test_an_article_without_prose_is_empty(wikitext: str) -> None:
    assert article_text("T", wikitext) == ""


MARKS = [
    *("{{", "}}", "[[", "]]", "{|", "|}", "[http://a ", "]", "|", "\n", "=", "==", "'''", "''"),
    *("<ref>", "</ref>", "<ref/>", "<b>", "</b>", "<nowiki>", "</nowiki>", "<!--", "-->", "<", ">"),
    *("*", ":", ";", "#", "----", "&", "&#0;", "&#xfffc;", "&lt;", "__A__", "\x00", "\ufffc", "a"),
    *(" ", ",", "(", ")", "File:", "http://", "~", "<math>", "</math>", "</", "<br", "\ud800", "{"),
]
THOROUGH = settings(max_examples=150, deadline=None, derandomize=True)


@given(st.lists(st.sampled_from(MARKS), max_size=60).map("".join) | st.text(max_size=60))
@example("[[&#xfffc;|&#0;]]")
@THOROUGH
def test_no_markup_is_refused_and_none_of_ours_is_left(wikitext: str) -> None:
    text = article_text("T", wikitext)
    assert text == "" or text.startswith("T\n\n")
    assert "\ufffc" not in text
    assert "\x00" not in text
    assert "\n\n\n" not in text


WORDS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=9)
SIGNS = [" ", ", ", ". ", "; ", ": ", " (", ") ", "() ", "? ", "!\n", ".\n\n", "\u2019s ", " , "]
SIGNS += [" – ", '" ', "'s ", " / ", "% ", " 5-", " @", "$ "]


@given(st.lists(st.tuples(WORDS, st.sampled_from(SIGNS)), min_size=1, max_size=30))
@THOROUGH
def test_prose_without_markup_comes_back_as_it_is(words: list[tuple[str, str]]) -> None:
    prose = "".join(word + sign for word, sign in words)
    paragraphs = [part.split() for part in prose.strip().split("\n\n")]
    text = article_text("Title", prose)
    assert [part.split() for part in text.split("\n\n")] == [["Title"], *paragraphs]


@pytest.mark.drill
@pytest.mark.parametrize(
    "mark",
    [
        *MARKS,
        "{| a\n| {{x|[[y\n",
        "<ref>{{a|",
        "}}{|\n",
        "=a=b",
        "''a '''b ",
        " ,",
        "({{x}} ",
        "<a b=",
    ],
)
@pytest.mark.timeout(60)  # what grows with the square of the length takes many minutes
def test_broken_markup_takes_time_in_proportion(mark: str) -> None:
    text = article_text("T", "a\n" + mark * (200_000 // len(mark)))
    assert text == "" or text.startswith("T")


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("{{a|", "}}"), ("[[a|", "]]"), ("<b>", "</b>"), ("{|\n|", "\n|}\n"), ("[[a|<b>", "</b>]]")],
)
def test_deep_markup_is_read(opening: str, closing: str) -> None:
    text = article_text("T", f"Before {opening * 5000}x{closing * 5000} after")
    assert text.startswith("T\n\nBefore")
    assert text.endswith("after")


def test_a_line_of_equals_signs_does_not_end_the_process() -> None:
    code = "from bert_core.data.wikitext import article_text as a; a('T', '*=a=b' * 200_000)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


ENTITIES = {
    "&amp;": "&", "&nbsp;": " ", "&#43;": "+", "&#x3b1;": "α", "&lt;": "<", "&quot;": '"',
    "&amp;lt;": "&lt;", "&amp;amp;": "&amp;", "<": "<", "&bogus;": "&bogus;",
}  # fmt: skip
AROUND = (
    "[[{}]]", "[[Target|{}]]", "[[:{}]]", "''{}''", "'''{}'''", "<b>{}</b>", "<i class='a'>{}</i>",
    "[http://a.org {}]", "\n* {}\n", "<nowiki>{}</nowiki>", "<div>{}</div>", "{{{{t}}}}{}",
    "<ref>x</ref> {}", "[[A (b)|{}]]",
)  # fmt: skip


def test_an_entity_is_decoded_once_wherever_it_stands() -> None:
    rng = random.Random(0)
    for _ in range(300):
        entity, shown = rng.choice([*ENTITIES.items()])
        wikitext = f"q{entity}w"
        for _ in range(rng.randrange(4)):
            around = rng.choice(AROUND)
            # Links do not nest, and nothing is a mark within <nowiki>.
            is_plain = wikitext == f"q{entity}w"
            if is_plain or not around.startswith(("[", "<nowiki")):
                wikitext = around.format(wikitext)
        assert f"q{shown}w" in article_text("T", f"Of {wikitext} here."), wikitext


@pytest.mark.parametrize("entity", [each for each in ENTITIES if each not in ("<", "&nbsp;")])
def test_a_link_without_a_label_shows_what_mwparserfromhell_makes_of_it(entity: str) -> None:
    wikitext = f"About [[a{entity}b]]."
    shown = mwparserfromhell.parse(wikitext).strip_code()  # version 0.7.2
    assert article_text("T", wikitext) == f"T\n\n{shown}"


def test_a_namespace_that_is_written_with_an_entity_is_one() -> None:
    assert article_text("T", "Some.[[Category&#58;Ducks]] [[File&#58;a.png]]") == "T\n\nSome."
