"""The checks of types and shapes that every other test relies on."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError

from tests.type_checks import check_types, checked

Array = Float[np.ndarray, "n"]


def scaled_by(factor: float) -> Callable[..., np.ndarray]:
    @checked
    def scaled(values: Float[np.ndarray, "n"], other: Float[np.ndarray, "n"]) -> np.ndarray:
        return factor * (values + other)

    return scaled


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_every_definition_of_a_nested_function_is_checked_and_keeps_what_it_closes_over(
    factor: float,
) -> None:
    scaled = scaled_by(factor)
    assert scaled(np.ones(2), np.ones(2)).tolist() == [2 * factor, 2 * factor]
    with pytest.raises(TypeCheckError):
        scaled(np.ones(2), np.ones(3))
    with pytest.raises(TypeCheckError):
        scaled(np.ones(2), "other")


def test_functions_of_one_name_with_other_types_have_other_checks() -> None:
    def returns(kind: type) -> Callable[..., object]:
        @checked
        def same(value: kind, default: list = []) -> kind:  # type: ignore[valid-type]  # noqa: B006
            return value

        return same

    assert (returns(int)(1), returns(str)("a")) == (1, "a")
    with pytest.raises(TypeCheckError):
        returns(int)("a")
    with pytest.raises(TypeCheckError):
        returns(str)(1)


@checked
def every_kind(
    first: int, /, second: "str", *rest: float, flag: bool = False, **more: list[int]
) -> dict[str, Array] | None:
    return cast("Any", (first, second, rest, flag, more))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("1", "a"), {}),
        ((1, 2), {}),
        ((1, "a", "b"), {}),
        ((1, "a"), {"flag": 1}),
        ((1, "a"), {"other": ["1"]}),
        ((1, "a"), {}),  # what is returned
    ],
)
def test_every_kind_of_parameter_and_what_is_returned_are_checked(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeCheckError):
        every_kind(*args, **kwargs)


def test_a_size_in_what_is_returned_is_that_of_the_argument() -> None:
    @checked
    def padded(values: Array, by: int) -> list[Array]:
        return [np.pad(values, by)]

    assert padded(np.ones(2), 0)[0].shape == (2,)
    with pytest.raises(TypeCheckError):
        padded(np.ones(2), 1)
    assert padded(np.ones(3), 0)[0].shape == (3,)  # a call has sizes of its own


def test_a_call_like_one_that_passed_passes_and_no_other() -> None:
    @checked
    def first(values: list[Array], name: str = "") -> Array:
        return values[0]

    for _ in range(2):
        assert first([np.ones(2), np.ones(2)]).shape == (2,)
    for wrong in ([np.ones(3), np.ones((2, 1))], [np.ones(2, int)] * 2):
        with pytest.raises(TypeCheckError):
            [first(wrong) for _ in range(20)]  # of a list, one value is read at random
    with pytest.raises(TypeCheckError):
        first([np.ones(2), np.ones(2)], name=2)


def test_a_dataclass_is_checked_when_it_is_made() -> None:
    @checked
    @dataclass
    class Pair:
        left: Array
        right: Array

    @checked
    @dataclass
    class Named(Pair):
        name: str = "pair"

    assert Named(np.ones(2), np.ones(2)).name == "pair"
    with pytest.raises(TypeCheckError):
        Pair(np.ones(2), np.ones(3))
    with pytest.raises(TypeCheckError):
        Named(np.ones(2), np.ones(2), name=3)  # type: ignore[arg-type]


MODULE = """
class Owner:
    @staticmethod
    def doubled(value: int) -> int:
        def inner(value: int) -> int:
            return 2 * value
        return inner(value) if value < 10 else inner(str(value))

    def renamed(self, other: "Owner") -> "Owner":
        return other
"""


@pytest.fixture
def of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "checked_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    check_types(["checked_package"])
    import checked_package

    yield checked_package
    del sys.modules["checked_package"]


def test_functions_imported_by_a_package_are_checked(of_a_package: Any) -> None:
    owner = of_a_package.Owner()
    assert (owner.doubled(2), owner.renamed(owner)) == (4, owner)
    for wrong in (lambda: owner.doubled("2"), lambda: owner.doubled(11), lambda: owner.renamed(2)):
        with pytest.raises(TypeCheckError):
            wrong()
