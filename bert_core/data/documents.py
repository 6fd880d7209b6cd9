"""Documents: clean text, an id that does not depend on a path, sentence boundaries.

Where documents come from is for `pipelines.sources`, what is made of sentences for `pairs`.
"""

import hashlib
import re

# NUL and the other control characters, but for tab and line feed; a byte order mark; and halves of
# surrogate pairs, which JSON can hold and UTF-8 cannot.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufeff\ud800-\udfff]")
# NOTE: what stands before a run of characters is looked at, or a long run takes quadratic time.
_TRAILING_SPACE = re.compile(r"(?<![ \t])[ \t]+(?=\n|$)")
# A line that goes on in the next one: neither a full stop before the break nor a list item after.
_WRAPPED = re.compile(r"(?<![.!?:;])\n[ \t]*(?=[a-z0-9(\"'“‘])")
_SENTENCE_END = re.compile(r"""(?<![.!?])[.!?]+["'”’)\]]*[ \t]+(?=["'“‘(\[]*[A-Z0-9À-ÖØ-Þ])""")
_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof sr jr st mt gen col capt lt sgt rev hon gov sen rep pres
    vs etc cf e.g i.e viz approx ca no nos vol vols fig figs eq eqs sec ch pp ed eds al
    inc ltd co corp bros dept univ assn
    jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun
    """.split()  # noqa: SIM905
)
LONGEST_ABBREVIATION = 20  # characters, with quotes and brackets before it


def clean(text: str) -> str:
    """`text` with line feeds only, without control characters, trailing and outer white space."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    if " \n" in text or "\t\n" in text:  # rare, and the search takes ten times as long
        text = _TRAILING_SPACE.sub("", text)
    return text.strip()


def document_digest(cleaned: str) -> bytes:
    """sha256 of the cleaned text, 32 bytes: the id but for the ordinal among equal texts."""
    return hashlib.sha256(cleaned.encode()).digest()


def document_fraction(digest: bytes, seed: int, purpose: str) -> float:
    """A number in [0, 1) that depends on the document, the seed and what it is drawn for."""
    hashed = hashlib.sha256(f"{purpose}:{seed}:".encode() + digest).digest()
    return int.from_bytes(hashed[:8], "big") / 2**64


def split_sentences(text: str) -> list[str]:
    """The sentences of a cleaned text, in order, none empty.

    A blank line always ends a sentence; a line break does so unless the line is visibly wrapped;
    `.`, `!` and `?` do so before white space and a capital or a digit, unless they end a known
    abbreviation or an initial.
    """
    unwrapped = _WRAPPED.sub(" ", text)
    lines = _SENTENCE_END.sub(_with_line_break, unwrapped).split("\n")
    return [sentence for sentence in map(str.strip, lines) if sentence]


def _with_line_break(end: re.Match[str]) -> str:
    before = end.string[max(0, end.start() - LONGEST_ABBREVIATION) : end.start()]
    if end[0][0] == "." and _is_abbreviation(before):
        return end[0]
    return f"{end[0]}\n"


def _is_abbreviation(before: str) -> bool:
    word = before.rsplit(maxsplit=1)[-1].lstrip("\"'“‘([") if before.strip() else ""
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper())
