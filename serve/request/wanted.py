"""What pydantic's complaints want, in our words: bodies, parameters and tables of a config say it
alike."""

from collections.abc import Mapping
from typing import Any

_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
    "dataclass": "a table",
    "none": "nothing",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
    "too_long": ("a list of at most", "max_length"),
}


def wanted(fault: Mapping[str, Any]) -> str:
    """What a value was to be, such as `a whole number`, from one of pydantic's `errors()`."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind == "too_short":
        return f"at least {_some(context['min_length'])}"
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind == "finite_number":
        return "a finite number"
    if kind == "literal_error":
        expected = context["expected"]
        return f"one of {expected}" if " or " in expected else expected
    known = _KINDS.get(kind.partition("_")[0])
    # pydantic's own words, such as "Input should be a valid date", without their beginning.
    return known or fault["msg"].removeprefix("Input should be ")


def _some(count: Any) -> str:
    return "one entry" if count == 1 else f"{count} entries"
