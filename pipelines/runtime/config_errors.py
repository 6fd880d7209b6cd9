"""Explains an error in a command line or config in one line: the field, what was wanted, and the
value.

jsonargparse reports such errors in terms of Python types; users know fields.
"""

import re
import types
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bert_core.wording import in_one_line, nearest
from pipelines.runtime.other_names import ELSEWHERE, Ours

NEVER_MEANT = ("force", "allow_open_cluster")
"""Names that are not suggested: what they do cannot be taken back."""
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_SEVERAL = {str: 'texts, as in ["a", "b"]', int: "whole numbers, as in [0, 1]"}
_NUMBERS = "numbers, as in [0.5, 1]"


def explained(message: str, config: type, prog: str, known: Iterable[str]) -> str:
    """Turn jsonargparse's message into one line.

    Args:
        config: dataclass of the command.
        prog: the command, as in `raybert prepare`.
        known: names of all fields, nested ones included.
    """
    # A nested config's error, as this function has already worded it.
    inner = re.search(r"- ([\w., ]+): (wanted .*)", message)
    if inner is not None:
        outer = re.findall(r'Parser key "([\w.]+)"', message)[:1]
        return f"{', '.join('.'.join([*outer, one]) for one in inner[1].split(', '))}: {inner[2]}"
    unknown = re.search(r"(?:unrecognized arguments: -*|Option ')([\w.-]+)", message)
    if unknown is not None:
        return (
            f"{unknown[1]}: wanted a field of this command, there is none with that name"
            f"{_meant(unknown[1], config, known)}; `{prog} --help` lists them"
        )
    names = list(dict.fromkeys(re.findall(r'(?:Parser key "|argument --)([\w.]+)', message)))
    # A field is named alone or in full, after the table that it is in.
    name = ".".join(n for n, inner in pairwise([*names, ""]) if not inner.startswith(f"{n}."))
    required = re.search(r"arguments are required: ([\w., ]+)", message)
    if required is not None:
        missing = (f"{name}.{field}" if name else field for field in required[1].split(", "))
        return f"{', '.join(missing)}: wanted a value, got none; `{prog} --help` explains each"
    hint = _hint(config, name)
    if hint is None:
        return in_one_line(message)
    value = re.search(r"Got value: (.*)", message) or re.search(r"Given value: (.*)", message)
    value = value or re.search(r"Unable to load config ['\"](.*)['\"]", message)
    problem = f"{name}: wanted {_wanted(hint)}, got {value[1] if value else 'nothing'}"
    table = next((each for each in alternatives(hint) if is_dataclass(each)), None)
    return (
        problem if table is None else f"{problem}: give them as --{name}.{fields(table)[0].name} …"
    )


def _meant(name: str, config: type, known: Iterable[str]) -> str:
    """Suggest a meaning for an unknown name: our name for another tool's option, or else the
    nearest of our names."""
    ours = ELSEWHERE.get(name.rpartition(".")[2].replace("-", "_"), Ours())
    flag = next((flag for flag in ours.flags if _hint(config, flag) is not None), None)
    if flag is not None:
        return f" (here it is --{flag}{ours.note and f': {ours.note}'})"
    if ours.note:
        return f" ({ours.note})"
    return nearest(name, [each for each in known if each not in NEVER_MEANT], cutoff=0.6)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types in a union, without None; for any other type, only that type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(kind for kind in kinds if kind is not type(None))


def _hint(config: Any, name: str) -> Any:
    """Return the type of a field by its dotted name; None if there is no such field."""
    hint = config
    for part in name.split("."):
        kind = next((one for one in alternatives(hint) if is_dataclass(one)), None)
        hint = get_type_hints(kind).get(part) if kind else None
    return hint


def _wanted(hint: Any) -> str:
    return " or ".join(_kind(one) for one in alternatives(hint))


def _kind(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, inside))}"
    if origin in (tuple, list):
        return f"a list of {_SEVERAL.get(inside[0], _NUMBERS)}"
    if origin is dict:
        return 'a table, as in {name = "value"}'
    if is_dataclass(hint):
        return f"a table of its fields ({', '.join(one.name for one in fields(hint))})"
    return _KINDS.get(hint, "a value")
