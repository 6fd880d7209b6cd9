"""Answers in different company: equal to the last bit where the processor computes them so."""

from typing import Any

import pytest

from bert_core.determinism import fix_products

TOLERANCE = 0.0 if fix_products() else 1e-5


def same(answer: Any) -> Any:
    """What equals the answer, with numbers as exact as this processor computes them."""
    match answer:
        case float():
            return pytest.approx(answer, rel=0, abs=TOLERANCE) if TOLERANCE else answer
        case dict():
            return {name: same(value) for name, value in answer.items()}
        case list():
            return [same(value) for value in answer]
    return answer
