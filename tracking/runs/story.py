"""Formats numbers and names of metrics as people read them."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

NO_SHARES = (
    "loss", "perplexity", "mrr", "ndcg", "spearman", "pearson", "correlation", "matthews", "mse",
    "brier", "difference", "entries",
)  # fmt: skip
"""Parts of the names of metrics that are not shares, even with values from 0 to 1."""
UNITS = ("_s", "_usd")
"""Ends of the names of figures in a unit: no shares either."""
F1_OF = "f1_of_"
"""Before the label, in the name of its F1."""
_WORDS = {"mrr": "mean reciprocal rank", "f1": "F1", "mlm": "MLM", "nsp": "NSP"}


def amount(number: float) -> str:
    """Return a large count in short: `950`, `24.4 M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= max(unit, 1e4):
            return f"{number / unit:,.1f} {name}"
    return f"{number:,.0f}"


def short_number(value: float, digits: int = 3) -> str:
    """Return a number in short, `12000` → `12k`, `0.0005` → `5e-4`: at most `digits` digits, one
    less for a tiny number."""
    if value and abs(value) < 0.01:
        mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    value = float(f"{value:.{digits}g}")  # rounding may give another unit: 999.6 is 1k
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.{digits}g}{name}"
    return f"{value:.{digits}g}"


def score(name: str, value: float) -> str:
    """Return a metric in words, `accuracy 42.3 %`; a metric that is not a share has a plain
    number."""
    return f"{words(name)} {figure(name, value)}"


def figure(name: str, value: float | None) -> str:
    """Return a share as `42.3 %`, any other metric as a number; a dash if the value is unknown."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value) if isinstance(value, bool) else f"{value:,}"
    if is_share(name, value):
        return percent(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:,.3g}"


def is_share(name: str, value: float) -> bool:
    """Whether a metric's value is a share, which is shown in percent."""
    what, _, _ = name.partition(F1_OF)  # a label may be called anything
    has_unit = what.endswith(UNITS) or any(part in what for part in NO_SHARES)
    return bool(0 <= value <= 1) and not has_unit  # a NumPy number compares as NumPy's


def words(name: str) -> str:
    """Return the name of a metric in words: `macro_f1` → `macro F1`; `f1_of_spam` →
    `F1 of spam`."""
    name, of, label = name.partition(F1_OF)
    for short, long in _WORDS.items():
        name = name.replace(short, long)
    return f"{name.replace('_', ' ')}{'F1 of ' if of else ''}{label}"


def percent(share: float) -> str:
    """Return a share as `42.3 %`, with a space that does not break at the end of a line."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def first_counts(counts: Mapping[str, Any], most: int = 3) -> str:
    """Return the first numbers with their names, `rows 1,200, accuracy 42.3 %`, for runs without a
    summary; empty if there are none."""
    numbers = (
        (name, value)
        for name, value in counts.items()
        if name != "seconds" and isinstance(value, int | float) and not isinstance(value, bool)
    )
    return ", ".join(score(name, value) for name, value in islice(numbers, most))
