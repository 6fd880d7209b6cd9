"""Docstrings of Python sources: real technical prose that every machine with raybert has."""

import ast
import re
import warnings

_SPACE = re.compile(r"\s+")


def docstrings_of(source: bytes) -> list[str]:
    """The docstrings of a module, its classes and its functions, in the order of the file.

    The source is parsed, never run; one that cannot be parsed has none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's code
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: deep nesting
            return []
    places = [node for node in ast.walk(tree) if isinstance(node, _WITH_DOCSTRING)]
    places.sort(key=lambda node: getattr(node, "lineno", 0))
    found = (ast.get_docstring(node) for node in places)
    return [docstring for docstring in found if docstring and docstring.strip()]


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def normalised(docstring: str) -> str:
    """What two docstrings share that count as duplicates: the words, not case or white space."""
    return _SPACE.sub(" ", docstring).strip().lower()


def summary(docstring: str, longest: int = 400) -> str:
    """The first paragraph on one line, cut at a word to `longest` characters."""
    paragraph = _SPACE.sub(" ", docstring.strip().split("\n\n", 1)[0]).strip()
    if len(paragraph) <= longest:
        return paragraph
    return paragraph[:longest].rsplit(" ", 1)[0]
