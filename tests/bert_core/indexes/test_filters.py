"""Filters of a search: what they let through is what Python would, and nothing else is read."""

from typing import Any

import pyarrow as pa
import pytest

from bert_core.errors import InputError
from bert_core.indexes.filters import MOST_VALUES, expression
from bert_core.indexes.fusion import fused

SCHEMA = pa.schema(
    {
        "kind": pa.string(),
        "year": pa.int32(),
        "size": pa.uint64(),
        "weight": pa.float64(),
        "is new": pa.bool_(),
        "tags": pa.list_(pa.string()),
    }
)
KNOWN = SCHEMA.names


@pytest.mark.parametrize(
    ("conditions", "wanted"),
    [
        ({}, None),
        ({"kind": "a'; DROP"}, "`kind` = 'a''; DROP'"),
        ({"kind": ["a", "b"]}, "`kind` IN ('a', 'b')"),
        ({"kind": None, "year": {"not": None}}, "`kind` IS NULL AND `year` IS NOT NULL"),
        ({"year": {"at_least": 3, "below": 9}}, "`year` >= 3 AND `year` < 9"),
        ({"weight": {"above": 1, "at_most": 2.5}}, "`weight` > 1 AND `weight` <= 2.5"),
        ({"is new": True, "kind": {"not": "a"}}, "`is new` = true AND `kind` <> 'a'"),
    ],
)
def test_a_filter_becomes_an_expression_of_names_and_values(
    conditions: dict[str, Any], wanted: str | None
) -> None:
    assert expression(conditions, SCHEMA, KNOWN) == wanted


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"knd": "a"}, "filter.knd: wanted one of the columns kind, year, .* got 'knd'.*kind"),
        ({"tags": "a"}, "filter.tags: wanted a column of texts, numbers or booleans, got one of l"),
        ({"kind": 3}, "filter.kind: wanted a text, got a number"),
        ({"year": 2.5}, "filter.year: wanted a whole number from .*, got a number"),
        ({"year": True}, "filter.year: wanted a whole number from .*, got"),
        ({"year": 2**31}, "filter.year: wanted a whole number from -2147483648 to 2147483647, got"),
        ({"size": {"above": -1}}, "filter.size.above: wanted a whole number from 0 to 922337.*807"),
        ({"size": 2**63}, "filter.size: wanted a whole number from 0 to 9223372036854775807, got"),
        ({"weight": float("nan")}, "filter.weight: wanted a number, got"),
        ({"is new": 1}, "filter.is new: wanted true or false, got a number"),
        ({"year": {"over": 3}}, "filter.year: wanted some of at_least, above, .*, got 'over'"),
        ({"year": {"above": None}}, "filter.year.above: wanted a whole number from .*, got"),
        ({"year": []}, f"filter.year: wanted 1 to {MOST_VALUES} values, got 0"),
        ({"kind": ["a", 1]}, r"filter.kind\[1\]: wanted a text, got a number"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused(conditions: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        expression(conditions, SCHEMA, KNOWN)


def test_ranks_are_fused_by_their_reciprocals() -> None:
    (first, of_both), (second, of_one) = fused([[7, 3], [3, 5]], 2)
    assert (first, second) == (3, 7)
    assert (of_both, of_one) == pytest.approx((1 / 62 + 1 / 61, 1 / 61))
    assert [row for row, _ in fused([[9, 1], [1, 9]], 5)] == [1, 9], "equal scores: by number"
    assert fused([[], []], 3) == []
