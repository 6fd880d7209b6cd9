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
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
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
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _TRAILING_SPACE.sub("", _CONTROL.sub("", text)).strip()


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
    sentences = []
    for paragraph in _PARAGRAPH.split(text):
        for line in _WRAPPED.sub(" ", paragraph).split("\n"):
            sentences.extend(_split_line(line.strip()))
    return sentences


def _split_line(line: str) -> list[str]:
    sentences, start = [], 0
    for end in _SENTENCE_END.finditer(line):
        word = line[max(start, end.start() - LONGEST_ABBREVIATION) : end.start()]
        if line[end.start()] == "." and _is_abbreviation(word):
            continue
        sentences.append(line[start : end.end()].strip())
        start = end.end()
    sentences.append(line[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _is_abbreviation(before: str) -> bool:
    word = before.rsplit(maxsplit=1)[-1].lstrip("\"'“‘([") if before.strip() else ""
    return word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper())
