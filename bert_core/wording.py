"""Helpers for messages: similar names, shortened values, lines of long texts, and addresses without
credentials."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bert_core.storage_schemes import SCHEMES

SHOWN_CHARACTERS = 80

# In schemes whose URIs may name an account, a container precedes the @, never credentials.
_NO_ACCOUNT = "".join(rf"(?<!\b{name}://)" for name, it in SCHEMES.items() if it.names_account)
# NOTE: urlsplit fails here: databases and buckets take a password with / ? # @ in it. Digits and a
# slash after the colon are a port and a path.
_CREDENTIALS = re.compile(
    rf"{_NO_ACCOUNT}(?<=://)(?!\[)[^/:@\s\"]*(?::(?!\d{{1,5}}/)[^@\s\"]*)?@(?:[^/@\s\"]*@)*",
    re.IGNORECASE,
)
# Excludes punctuation after an address in a sentence, and fragments, which are never sent.
_QUERY = re.compile(r"(https?://[^?#\s\"]*)\?[^\s\"]*?(?=[:,;.)'\]]*(?:[\s\"]|$))")


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """Return ` (did you mean …?)` with the known word that resembles `word` most; empty if none
    reaches `cutoff`."""
    close = closest(word, known, cutoff=cutoff)
    return f" (did you mean {close}?)" if close else ""


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Return the known word that resembles `word` most; None if none resembles it."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def one_of(choices: Iterable[Any]) -> str:
    """Return `one of a, b`, as messages list choices."""
    return f"one of {', '.join(map(str, choices))}"


def shortened(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """Return the text, or its beginning and `…`: at most `characters` in total."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def some_of(names: Sequence[str], most: int = 20) -> str:
    """Return the first names and the number of the others: `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank; empty if all are blank."""
    return next(iter(text.strip().splitlines()), "")


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank, such as the message of a traceback; empty
    if all are blank."""
    return next(reversed(text.strip().splitlines()), "")


def in_one_line(text: str) -> str:
    """Return the whole text with each run of whitespace, line breaks included, as a single
    space."""
    return " ".join(text.split())


def error_in_one_line(error: BaseException) -> str:
    """Return an error's class and the first line of its message; some libraries write long ones."""
    message = first_line(str(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shown(value: Any) -> str:
    """Describe a JSON value for a message: its kind and its beginning."""
    kinds = {dict: "an object", list: "a list", tuple: "a list", str: "text", bool: "a boolean"}
    if value is None:
        return "nothing"
    if isinstance(value, str) and not value.strip():
        return f"blank text ({as_json(value)})" if value else "empty text"
    other = "a number" if isinstance(value, int | float) else "a value"
    return f"{kinds.get(type(value), other)} ({as_json(value)})"


def as_json(value: Any) -> str:
    """Return the beginning of a value as JSON; half a surrogate pair, which no message can be
    written with, is escaped."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # a value from a caller, nested almost as deeply as can be parsed
        return "nested too deeply to be shown"
    return shortened(text.encode(errors="backslashreplace").decode())


def without_credentials(text: str) -> str:
    """Return the text with no user or password in its addresses: `s3://key:secret@bucket/a` loses
    `key:secret@`."""
    return _CREDENTIALS.sub("", text)


def without_secrets(text: str) -> str:
    """Return the text with no credentials in its URLs, and without the queries of http URLs, which
    may hold some."""
    return _QUERY.sub(r"\1", without_credentials(text))


def table(columns: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    """Return a Markdown table; columns of numbers are right-aligned, with thousands separators."""
    cells = [list(map(_cell, row)) for row in rows]
    texts = [
        any(cell and not cell[0].isdigit() for cell in column)
        for _, *column in zip(columns, *cells, strict=True)
    ]
    head = ["---" if text else "---:" for text in texts]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(columns), head, *cells])


def _cell(value: str | int) -> str:
    """Return the text of a table cell, without bars and line breaks, which would break the
    table."""
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(value.split()).replace("|", "\\|")
