"""Ranges and choices of a config's fields: declared with the field, checked by one function.

    num_layers: PositiveInt = 12
    decay: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        check_fields(self)

Rules about several fields are checked by the config itself, afterwards.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from math import inf
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bert_core.errors import ConfigError, RaybertError
from bert_core.wording import one_of


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a field accepts; NaN is in no range.

    Bounds are inclusive (`least`, `most`) or exclusive (`above`, `below`); None is no bound.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return all(
            (
                self.least is None or number >= self.least,
                self.above is None or number > self.above,
                self.most is None or number <= self.most,
                self.below is None or number < self.below,
            )
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
        ends = {words[name]: getattr(self, name) for name in words}
        return " and ".join(
            "finite" if end == inf else f"{word} {end}"
            for word, end in ends.items()
            if end is not None
        )

    __repr__ = __str__


TokenizerKind = Literal["wordpiece", "bpe", "unigram"]
"""The algorithms that split words into pieces."""
PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
PositiveFinite = Annotated[float, Range(above=0, below=inf)]
NonNegativeFloat = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
ShareBelowOne = Annotated[float, Range(least=0, below=1)]
Port = Annotated[int, Range(least=1, most=65535)]


def check_fields(config: Any, *, prefix: str = "", error: type[RaybertError] = ConfigError) -> None:
    """Check every field of a dataclass whose type is an annotated `Range`, a `Literal`, a tuple of
    either, or one of these or None.

    Args:
        prefix: what a user writes before the field's name, such as `corpus.`.
    Raises: `error`, naming the first field whose value is not allowed.
    """
    kind: type = type(config)
    for name, allowed in constraints(kind).items():
        value = getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and item not in allowed:
                wanted = allowed if isinstance(allowed, Range) else one_of(allowed)
                raise error(f"{prefix}{name}: wanted {wanted}, got {value!r}")


def ranges_of(config: type) -> dict[str, Range]:
    """Return the range of each field of a dataclass that has one, by the field's name."""
    return {
        name: allowed for name, allowed in constraints(config).items() if isinstance(allowed, Range)
    }


def default_of(field: "Field[Any]") -> Any:
    """Return the default of a dataclass's field, from its factory if it has one; `MISSING` if it
    has no default."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def base_type(hint: Any) -> Any:
    """Return the type without the `Range` that annotates it."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


@cache
def constraints(config: type) -> Mapping[str, Any]:
    """Return the allowed values of each constrained field of a dataclass: its `Range`, or the
    choices of its `Literal`."""
    hints = get_type_hints(config, include_extras=True)
    constraints = {field.name: _constraint(hints[field.name]) for field in fields(config)}
    return {name: allowed for name, allowed in constraints.items() if allowed is not None}


def _constraint(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return next((note for note in get_args(hint)[1:] if isinstance(note, Range)), None)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType, tuple):
        return next(filter(None, map(_constraint, get_args(hint))), None)
    return None
