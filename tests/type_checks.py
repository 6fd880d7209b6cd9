"""Checks of types and shapes, which `conftest.py` gives to every function of ours.

jaxtyping's own decorator binds the arguments of each call to a signature and builds its checks anew
wherever a definition runs, which took a third of what the tests compute. Here a check is built at a
function's first call, once for all definitions of a nested function, and shapes that have passed
are not looked at again, which takes ten times as long as to recognise them.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from functools import wraps
from importlib.machinery import PathFinder
from types import FunctionType
from typing import Any, NamedTuple, get_args, get_type_hints

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, TypeCheckError, config, jaxtyped
from jaxtyping._import_hook import Typechecker, _JaxtypingFinder

# An int counts as a float.
_build = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeCheckError))

_SIZES: AbstractContextManager[None] = jaxtyped("context")  # a name stands for one size within it
_DEEPEST = 6
"""Containers in each other whose kinds are recognised; a call with more is like no other."""


class _Checks(NamedTuple):
    parameters: Callable[..., None]
    result: Callable[[Any], Any]
    passed: set[Any] | None
    """The kinds of arguments and results that have passed; None where no shapes are checked, which
    takes less than to find a call's kind."""


_checks: dict[Any, _Checks] = {}


class _Hook(Typechecker):
    """Decorates definitions with `checked` alone; jaxtyping's hook would put its own around it."""

    def __init__(self) -> None:
        self.hash = "raybert1"  # in the name of the file that keeps a module's compiled code
        Typechecker.lookup[self.hash] = checked

    def get_ast(self) -> ast.expr:
        lookup = f"jaxtyping._import_hook.Typechecker.lookup[{self.hash!r}]"
        return ast.parse(lookup, mode="eval").body


def check_types(packages: Sequence[str]) -> None:
    """From here on a wrong type or shape is an error in what is imported of the packages."""
    sys.meta_path.insert(0, _JaxtypingFinder(packages, PathFinder, _Hook()))


def checked(definition: Any) -> Any:
    """A function that checks what it is given and returns, or a dataclass that does so when one is
    made; any other class as it is."""
    if isinstance(definition, type):
        init = definition.__init__  # type: ignore[misc]  # looked up, not called
        of_dataclass = is_dataclass(definition) and isinstance(init, FunctionType)
        if of_dataclass and not hasattr(init, "__wrapped__"):
            setattr(definition, "__init__", checked(init))  # noqa: B010  # mypy forbids the other
        return definition
    if not definition.__annotations__:
        return definition
    checks: _Checks | None = None

    @wraps(definition)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checks
        if config.jaxtyping_disable:
            return definition(*args, **kwargs)
        if checks is None:
            checks = _checks_of(definition)
        if checks.passed is None:
            checks.parameters(*args, **kwargs)
            return checks.result(definition(*args, **kwargs))
        given = _kind(args), _kind(kwargs)
        if given in checks.passed:
            returned = definition(*args, **kwargs)
            if (given, _kind(returned)) in checks.passed:
                return returned
            with _SIZES:
                checks.parameters(*args, **kwargs)
                checks.result(returned)
        else:
            with _SIZES:
                checks.parameters(*args, **kwargs)
                returned = checks.result(definition(*args, **kwargs))
        checks.passed.update((given, (given, _kind(returned))))
        return returned

    return call


def _kind(value: Any, depth: int = 0) -> Any:
    """What a check of shapes reads of a value: equal kinds pass or fail alike."""
    if depth > _DEEPEST:
        return object()
    kind = type(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return kind, value.dtype, tuple(value.shape)
    if kind is tuple:
        return kind, *(_kind(each, depth + 1) for each in value)
    if kind is list or kind is dict:
        of_values = {_kind(each, depth + 1) for each in (value.values() if kind is dict else value)}
        # Of values that differ, beartype reads one at random: such a call is like no other.
        return (kind, *of_values) if len(of_values) < 2 else object()
    return kind


def _checks_of(function: FunctionType) -> _Checks:
    annotations = function.__annotations__
    key = (
        function.__module__,
        function.__qualname__,
        function.__code__,
        *annotations.items(),
    )
    try:
        if key not in _checks:
            _checks[key] = _built(function)
    except TypeError:  # an annotation that has no hash
        return _built(function)
    return _checks[key]


def _built(function: FunctionType) -> _Checks:
    hints = {name: _hint(function, text) for name, text in function.__annotations__.items()}

    def result(value: Any) -> Any:
        return value

    result.__annotations__ = {"return": hints.get("return", Any)}
    parameters = _without_body(function, hints)
    for check in (parameters, result):
        check.__module__, check.__qualname__ = function.__module__, function.__qualname__
    passed: set[Any] | None = set() if any(map(_has_shapes, hints.values())) else None
    return _Checks(_build(parameters), _build(result), passed)


class _Name:
    """What an annotation or a default is called in source."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _without_body(function: FunctionType, hints: dict[str, Any]) -> Callable[..., None]:
    """A function with the same parameters, which does nothing. beartype reads them from compiled
    code, so it is made from source."""
    names: dict[str, Any] = {}
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hints:
            names[f"__hint_{name}"] = hints[name]
            parameter = parameter.replace(annotation=_Name(f"__hint_{name}"))
        if parameter.default is not parameter.empty:
            names[f"__default_{name}"] = parameter.default
            parameter = parameter.replace(default=_Name(f"__default_{name}"))
        parameters.append(parameter)
    source = f"def {function.__name__}{inspect.Signature(parameters)}: pass"
    exec(source, names)
    check: Callable[..., None] = names[function.__name__]
    return check


def _hint(function: FunctionType, annotation: Any) -> Any:
    """The annotation with the names of strings looked up; Any where one is not to be found."""

    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    try:
        return get_type_hints(holder, function.__globals__, include_extras=True)["it"]
    except Exception:  # such as NameError: imported for the type checker alone
        return Any


def _has_shapes(hint: Any) -> bool:
    if isinstance(hint, list):  # the parameters of a Callable
        return any(map(_has_shapes, hint))
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_has_shapes, get_args(hint)))
