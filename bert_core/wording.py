"""Parts that messages share: similar names, and shortened values."""

import difflib
import json
from collections.abc import Iterable
from typing import Any

SHOWN_CHARACTERS = 80


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing if no known word resembles `word`."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def one_of(choices: Iterable[Any]) -> str:
    """`one of a, b`, as messages list choices."""
    return f"one of {', '.join(map(str, choices))}"


def shortened(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """The text, or its beginning and `…`: at most `characters` in total."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def shown(value: Any) -> str:
    """A JSON value for a message: its kind and its beginning."""
    kinds = {dict: "an object", list: "a list", tuple: "a list", str: "text", bool: "a boolean"}
    if value is None:
        return "nothing"
    return f"{kinds.get(type(value), 'a number')} ({as_json(value)})"


def as_json(value: Any) -> str:
    """The beginning of a value as JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # a value from a caller, nested almost as deeply as can be parsed
        return "nested too deeply to be shown"
    return shortened(text)
