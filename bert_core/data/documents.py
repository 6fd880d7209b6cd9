"""Documents: clean text, an id that does not depend on a path, sentence boundaries.

Documents are read by `pipelines.corpus`; `pairs` makes rows of their sentences. Accuracy and speed
of the boundaries: `benchmarks.sentences`.
"""

import hashlib
import re
from collections.abc import Callable
from itertools import groupby

# NUL and the other control characters, but for tab and line feed.
_CONTROL = bytes([*range(0x09), *range(0x0B, 0x20), 0x7F])
_BYTE_ORDER_MARK = "\ufeff".encode()


def clean(text: str) -> str:
    """Return `text` with line feeds as its only line ends, and without control characters, white
    space at line ends, and white space around the whole text.

    Lone surrogates, which JSON can hold and UTF-8 cannot, are removed too.
    """
    data = text.encode("utf-8", "ignore")  # bytes, whose `translate` deletes many kinds at once
    data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    data = data.translate(None, _CONTROL).replace(_BYTE_ORDER_MARK, b"")
    if b" \n" in data or b"\t\n" in data:
        data = b"\n".join([line.rstrip(b" \t") for line in data.split(b"\n")])
    return data.decode().strip()


def document_digest(cleaned: str) -> bytes:
    """Return the sha256 of the cleaned text, 32 bytes. A document's id is this digest and its
    ordinal among equal texts."""
    return hashlib.sha256(cleaned.encode()).digest()


def document_fraction(digest: bytes, seed: int, purpose: str) -> float:
    """Return a number in [0, 1) that depends on the document, the seed and the purpose only."""
    hashed = hashlib.sha256(f"{purpose}:{seed}:".encode() + digest).digest()
    return int.from_bytes(hashed[:8], "big") / 2**64


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a cleaned text, in order, none empty; tabs become spaces.

    A blank line always ends a sentence; a line break does so unless the line is visibly wrapped:
    the next one begins in lower case, or this one is as long as lines of wrapped prose are.

    `.`, `!`, `?` and `…`, with any closing quotes and brackets, end a sentence before white space
    and a capital, a digit or an opening quote or bracket; not after a title, an initial or the
    number of a list item; after "etc.", "p.m." or "U.S." only before a word that often begins a
    sentence. Before lower case they end one after a plain word (`It works. try it`), not after
    quotes (`"What?" he said`) or dots (`wait ... then go`). Scripts without white space between
    sentences are not split.

    The word lists are English: in other languages boundaries may be missing or superfluous.
    """
    unwrapped = _WRAPPED.sub(" ", text).replace("\t", " ")
    return list(filter(None, map(str.strip, _BREAK.sub("\n", unwrapped).split("\n"))))


_TITLES = """
    mr mrs ms messrs mme mlle dr prof hon rev fr gen col capt cmdr maj lt sgt adm gov sen rep pres
    supt vs cf viz approx esp incl vol vols fig figs eq eqs ch pp attn tel ext e.g i.e
"""  # never end a sentence
_AMBIGUOUS = """
    jr sr st mt ft ave blvd rd inc ltd co corp bros dept univ assn ca cent ed eds al etc a.m p.m
    jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat sun
"""  # end a sentence only before an opener, like initials
_OPENERS = """
    the this that these those there a an i he she it we you they my his her its our your their
    in on at by to for from with of as if when while after before since but and or so yet not
    what who how why where which however although though because please thanks no yes let
    is are was were do does did have has had can could will would should
"""
_NUMBERED = "no nos art para sec sect p c l"  # do not end a sentence before a number
_SAID = "said says asked cried replied answered exclaimed inquired demanded shouted"
_UPPER = "A-ZÀ-ÖØ-ÞΑ-ΩЀ-Я"
_OPENING = r"\"'“‘«¿¡(\[<*_~$£€#@\-"
_CLOSING = r"\"'”’»)\]>*_"


def _any(words: str, *cases: Callable[[str], str]) -> str:
    return "|".join(sorted({re.escape(case(word)) for word in words.split() for case in cases}))


def _after(words: str, *cases: Callable[[str], str]) -> str:
    """Return a pattern that matches after any of `words` with a full stop and a space. Words are
    grouped by length, since a lookbehind has a fixed width."""
    groups = groupby(sorted(words.split(), key=len), key=len)
    return "|".join(rf"(?<=\b(?:{_any(' '.join(group), *cases)})\.[ ])" for _, group in groups)


# A line feed within a sentence: before lower case, or after 55 to 100 characters.
_WRAPPED = re.compile(
    r"""\n (?<![:;\n]\n)
    (?: (?<![.!?]\n) (?=[ \t]*+[a-z0-9("'“‘])
      | (?<=[^\n]{55}\n) (?<![^\n]{101}\n) (?=[ \t]*+["'“‘(]?\w) )
    [ \t]*+""",
    re.VERBOSE,
)
# The white space between two sentences.
# NOTE: it begins with a literal, which `re` finds several times faster than a lookbehind, and no
# repetition covers what an earlier attempt covered, or a long run would take quadratic time.
_BREAK = re.compile(
    rf"""[ ](?<=[^a-z,;\ ][ ])  # most spaces need no further look
    (?: {"|".join(f"(?<=[.!?…][{_CLOSING}]{{{count}}}[ ])" for count in range(4))} )
    (?= [ ]*+ (?: [{_UPPER}\d] | [{_OPENING}]+\w | --?[ ] | https?: )
      # Exclamations in mid-sentence are short: Oh! what a day.
      | (?: (?<=[^\W\d_]{{4}}\.[ ]) | (?<=[^.!?,;:"'“\n]{{15}}\w[!?][ ]) ) [ ]*+ [^\W\d_] )
    (?: (?<!\w\.[ ]) | (?<=[a-z]{{7}}\.[ ])  # no full stop, or after too long a word
      | (?! {_after(_TITLES, str.lower, str.capitalize, str.upper)} )
        (?! (?: {_after(_AMBIGUOUS, str.lower, str.capitalize)}
                | (?<=\b[^\W\d_]\.[ ])(?<!['’]\w\.[ ]) )  # an initial, not what ends "it's."
            (?! [ ]*+ [{_OPENING}]*(?:{_any(_OPENERS, str.capitalize)})(?![\w.]) ) )
        (?! (?=[ ]*+\d) (?: {_after(_NUMBERED, str.lower, str.capitalize)} ) )
        # The number of an item, at the start of a line or after a sentence.
        (?! (?<=\d\.[ ]) (?: (?<=^\d\.[ ]) | (?<=^\d\d\.[ ])
            | (?<=[a-z]{{3}}[.!?:][ ]\d\.[ ]) | (?<=[a-z]{{3}}[.!?:][ ]\d\d\.[ ]) ) ) )
    (?! (?<=[!?…]["'”’][ ]) [ ]*+ (?:[\w.]+[ ]){{1,3}} (?:{_any(_SAID, str.lower)})\b )""",
    re.VERBOSE | re.MULTILINE,
)
