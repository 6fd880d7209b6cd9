"""Extracts docstrings from Python sources: real technical prose, present wherever raybert is
installed."""

import ast
import re
import warnings
from collections.abc import Iterator

_SPACE = re.compile(r"\s+")


def docstrings_of(source: bytes) -> list[str]:
    """Return the docstrings of a module, its classes and its functions, in the order of the file.

    The source is parsed, never run; if it cannot be parsed, the list is empty.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deep nesting
            return []
    docstrings = (ast.get_docstring(place) for place in _places(tree))
    return [docstring for docstring in docstrings if docstring and docstring.strip()]


def _places(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the modules, classes and functions at or under a node. Expressions are not searched."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for statement in getattr(node, block, ()):
            yield from _places(statement)


def normalised(docstring: str) -> str:
    """Return a form in which duplicates are equal: lower case, with single spaces."""
    return _SPACE.sub(" ", docstring).strip().lower()


def opening(docstring: str, longest: int = 400) -> str:
    """Return at most the first `longest` characters, on one line and cut at a word."""
    line = _SPACE.sub(" ", docstring).strip()
    if len(line) <= longest:
        return line
    return line[: longest + 1].rsplit(" ", 1)[0][:longest]
