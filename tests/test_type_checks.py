"""The checks of types and shapes that every other test relies on."""

from collections.abc import Callable

import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped

from tests.type_checks import checked


def scaled_by(factor: float) -> Callable[..., np.ndarray]:
    @jaxtyped(typechecker=checked)
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
        @jaxtyped(typechecker=checked)
        def same(value: kind, default: list = []) -> kind:  # type: ignore[valid-type]  # noqa: B006
            return value

        return same

    assert (returns(int)(1), returns(str)("a")) == (1, "a")
    with pytest.raises(TypeCheckError):
        returns(int)("a")
    with pytest.raises(TypeCheckError):
        returns(str)(1)
