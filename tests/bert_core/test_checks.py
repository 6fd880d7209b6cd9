from dataclasses import dataclass
from math import inf, nan
from typing import Annotated, Any, Literal

import pytest

from bert_core.checks import PositiveInt, Range, ShareBelowOne, base_type, check_fields
from bert_core.errors import ConfigError, InputError


@dataclass(frozen=True, kw_only=True)
class Base:
    layers: PositiveInt = 2

    def __post_init__(self) -> None:
        check_fields(self, prefix="model.")


@dataclass(frozen=True, kw_only=True)
class Config(Base):
    dropout: ShareBelowOne | None = None
    betas: tuple[ShareBelowOne, ...] = ()
    decay: Literal["linear", "cosine"] | None = None
    weight: Annotated[float, Range(least=0, below=inf)] = 1.0
    name: str = ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "model.layers: wanted at least 1, got 0"),
        ({"dropout": 1.0}, "model.dropout: wanted at least 0 and below 1, got 1.0"),
        ({"dropout": nan}, "model.dropout: wanted at least 0 and below 1, got nan"),
        ({"betas": (0.9, 1.5)}, r"model.betas: wanted .* below 1, got \(0.9, 1.5\)"),
        ({"decay": "steep"}, "model.decay: wanted one of linear, cosine, got 'steep'"),
        ({"weight": inf}, "model.weight: wanted at least 0 and finite, got inf"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        # Not checked by beartype here: what a user gives may be anything.
        check_fields(_unchecked(fields), prefix="model.")


def _unchecked(fields: dict[str, Any]) -> Config:
    config = Config()
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    return config


def test_the_fields_of_a_base_class_and_of_its_subclass_are_checked() -> None:
    assert Config(layers=1, dropout=0.0, betas=(0.9, 0.0), decay="cosine").layers == 1
    with pytest.raises(ConfigError, match="layers"):
        Config(layers=0)


def test_the_error_may_be_another_one() -> None:
    with pytest.raises(InputError, match=r"^layers: wanted at least 1, got -1$"):
        check_fields(_unchecked({"layers": -1}), error=InputError)


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (Range(least=1), "at least 1"),
        (Range(above=0), "above 0"),
        (Range(least=1, most=65535), "1 to 65535"),
        (Range(above=0, most=1), "above 0 and at most 1"),
    ],
)
def test_a_range_says_what_it_accepts(allowed: Range, words: str) -> None:
    assert str(allowed) == words


def test_a_type_comes_without_its_range() -> None:
    assert base_type(PositiveInt) is int
    assert base_type(str) is str
