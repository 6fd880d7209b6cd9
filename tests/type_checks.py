"""Checks of types and shapes for the import hook of `conftest.py`."""

import inspect
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_build = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int counts as a float
_checks: dict[tuple[str, str, inspect.Signature], Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype's check of a signature, built once.

    jaxtyping asks for it whenever a definition runs, so at every call of what a nested function is
    defined in, and always on an empty function with the signature of the real one: equal signatures
    have equal checks.
    """
    key = function.__module__, function.__qualname__, inspect.signature(function)
    try:
        if key not in _checks:
            _checks[key] = _build(function)
    except TypeError:  # a default that has no hash
        return _build(function)
    return _checks[key]
