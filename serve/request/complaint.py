"""Words messages about faults in a body, in parameters or in a table of a config.

A message says where the fault is, what was wanted and what came. pydantic finds the faults, but its
messages speak of "Input", and list the possible types of a value as parts of its place. All of
serve words them here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import pydantic

from bert_core.errors import RaybertError
from bert_core.wording import as_json, nearest, shown

Shape = type[pydantic.BaseModel]

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


def complaint(error: pydantic.ValidationError, shape: Shape = pydantic.BaseModel) -> str:
    """Return a message about the fault that says most about what was sent.

    Args:
        shape: the class that a body was read as; left out for parameters and tables, whose keys are
            checked before.
    """
    faults = error.errors(include_url=False)
    # A misspelt key is also missing under its correct name: report the misspelling.
    misspelt = [each for each in faults if each["type"] == "extra_forbidden"]
    empty = [each for each in faults if each["type"] == "too_short"]
    texts = [each for each in faults if each["type"] == "string_type"]
    # If a value may have several types, report the fault of the type that it comes nearest to.
    fault = max(misspelt or empty or texts or faults, key=lambda each: len(each["loc"]))
    own = fault.get("ctx", {}).get("error")
    if isinstance(own, RaybertError):  # from a dataclass's own checks: it names the field
        return str(own)
    if shape is not pydantic.BaseModel and fault["type"] in ("extra_forbidden", "missing"):
        return _about_key(shape, fault)
    _, place = _holder(shape, fault["loc"])
    if fault["type"] == "missing":
        return f"{place}: wanted a value, got none"
    if fault["type"] == "too_short":
        kind = "object" if isinstance(fault["input"], dict) else "list"
        return f"{place}: wanted at least one text, got an empty {kind}"
    return f"{place}: wanted {_wanted(fault)}, got {shown(fault['input'])}"


def unknown_key(where: str, key: str, names: Sequence[str]) -> str:
    """Return the message about a key that is not among these names."""
    known = f"some of {', '.join(names)}" if names else "none"
    return f"{where}: wanted {known}, got {as_json(key)}{nearest(key, names)}"


def _wanted(fault: Mapping[str, Any]) -> str:
    """Return words for the value that was wanted, such as `a whole number`, from one of pydantic's
    `errors()`."""
    kind, context = fault["type"], fault.get("ctx", {})
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


def _about_key(shape: Shape, fault: Mapping[str, Any]) -> str:
    """Return the message about a key that is missing or unknown."""
    *above, key = fault["loc"]
    holder, place = _holder(shape, above)
    where = place or "the body"
    if fault["type"] == "missing":
        return f"{where}: wanted the key {as_json(key)}, it is missing"
    names = [field.alias or name for name, field in holder.model_fields.items()]
    return unknown_key(where, str(key), names)


def _holder(shape: Shape, path: Sequence[int | str]) -> tuple[Shape, str]:
    """Return the innermost body on the way to a fault, and the path to the fault, without the types
    that a value may have: pydantic names these between the keys."""
    named, kinds = "", [shape]
    for part in path:
        inside = next((kind for kind in kinds if kind.__name__ == part), None)
        if inside is not None:
            shape = inside
        elif not _names_a_type(part):
            named += f".{part}" if named else str(part)
            if isinstance(part, str) and (field := shape.model_fields.get(part)) is not None:
                kinds = list(_bodies(field.annotation))
                shape = kinds[0] if len(kinds) == 1 else shape
    return shape, named


def _bodies(annotation: Any) -> Iterator[Shape]:
    """Yield the body classes in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _bodies(part)


def _names_a_type(part: int | str) -> bool:
    """Whether this part of a fault's path is the name of a type that a value may have."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)
