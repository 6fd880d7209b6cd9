"""Parts that messages share: similar names, shortened values, lines of long texts, and addresses
without credentials."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from bert_core.schemes import SCHEMES

SHOWN_CHARACTERS = 80

# Where a URI may name an account, a container is before its @, and credentials cannot be.
_NO_ACCOUNT = "".join(rf"(?<!\b{name}://)" for name, it in SCHEMES.items() if it.names_account)
# NOTE: not by urlsplit: databases and buckets take a password with / ? # @ in it. Digits and a
# slash after the colon are a port and a path.
_CREDENTIALS = re.compile(
    rf"{_NO_ACCOUNT}(?<=://)(?!\[)[^/:@\s\"]*(?::(?!\d{{1,5}}/)[^@\s\"]*)?@(?:[^/@\s\"]*@)*",
    re.IGNORECASE,
)
# Not what follows an address in a sentence, nor a place in a page, which is sent to nobody.
_QUERY = re.compile(r"(https?://[^?#\s\"]*)\?[^\s\"]*?(?=[:,;.)'\]]*(?:[\s\"]|$))")


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """` (did you mean …?)`, or nothing if no known word resembles `word` as `cutoff` asks for."""
    close = closest(word, known, cutoff=cutoff)
    return f" (did you mean {close}?)" if close else ""


def closest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The known word that resembles `word` most; None if none resembles it."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def one_of(choices: Iterable[Any]) -> str:
    """`one of a, b`, as messages list choices."""
    return f"one of {', '.join(map(str, choices))}"


def shortened(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """The text, or its beginning and `…`: at most `characters` in total."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def first_line(text: str) -> str:
    """The first line of a text that has something in it; empty if there is none."""
    return next(iter(text.strip().splitlines()), "")


def last_line(text: str) -> str:
    """The last line of a text that has something in it, as of a traceback; empty if there is
    none."""
    return next(reversed(text.strip().splitlines()), "")


def in_one_line(text: str) -> str:
    """The whole text with its line ends as spaces."""
    return " ".join(text.split())


def error_in_one_line(error: BaseException) -> str:
    """An error's class, and the first line of its message, which libraries make long."""
    message = first_line(str(error))
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shown(value: Any) -> str:
    """A JSON value for a message: its kind and its beginning."""
    kinds = {dict: "an object", list: "a list", tuple: "a list", str: "text", bool: "a boolean"}
    if value is None:
        return "nothing"
    if isinstance(value, str) and not value.strip():
        return f"blank text ({as_json(value)})" if value else "empty text"
    other = "a number" if isinstance(value, int | float) else "a value"
    return f"{kinds.get(type(value), other)} ({as_json(value)})"


def as_json(value: Any) -> str:
    """The beginning of a value as JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # a value from a caller, nested almost as deeply as can be parsed
        return "nested too deeply to be shown"
    return shortened(text)


def without_credentials(text: str) -> str:
    """The text with no user or password in its addresses: `s3://key:secret@bucket/a` loses
    `key:secret@`."""
    return _CREDENTIALS.sub("", text)


def without_secrets(text: str) -> str:
    """The text with no credentials in its URLs, and without the queries of http ones, which may
    hold some."""
    return _QUERY.sub(r"\1", without_credentials(text))


def table(columns: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    """A Markdown table; columns of numbers are right-aligned, with thousands separators."""
    cells = [list(map(_cell, row)) for row in rows]
    texts = [
        any(cell and not cell[0].isdigit() for cell in column)
        for _, *column in zip(columns, *cells, strict=True)
    ]
    head = ["---" if text else "---:" for text in texts]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(columns), head, *cells])


def _cell(value: str | int) -> str:
    """A value for a table cell, which a bar or a line break would break."""
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(value.split()).replace("|", "\\|")
