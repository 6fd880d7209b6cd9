"""The signature and docstring of a function that takes the fields of a config."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from bert_core.checks import default_of
from bert_core.tasks.guide import docstrings

F = TypeVar("F", bound=Callable[..., Any])


def described(function: F, word: str, summary: str, kind: type) -> F:
    """Return the function with the name, signature and docstring of a stage."""
    hints = get_type_hints(kind)
    parameters = [inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None)]
    for field in fields(kind):
        value = default_of(field)
        parameters.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if value is MISSING else value,
                annotation=hints[field.name],
            )
        )
    parameters.sort(key=lambda each: each.default is not inspect.Parameter.empty)
    function.__name__ = function.__qualname__ = word
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    documented = docstrings(kind)
    lines = [f"    {field.name}: {documented[field.name]}" for field in fields(kind)]
    function.__doc__ = "\n".join(
        [
            f"{summary[:1].upper()}{summary[1:]}, as `raybert {word}` does it.\n",
            "Args:",
            "    config: TOML file with the fields below, which those given here override.",
            *lines,
            "Returns: the folder that was written, with its figures.",
            "Raises: ConfigError if a value cannot be right; RaybertError with the way out.",
        ]
    )
    return function
