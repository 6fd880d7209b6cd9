"""Figures in words."""

import numpy as np
import pytest

from tracking.runs.story import amount, figure, first_counts, short_number


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("number", "told"), [(950, "950"), (9_999, "9,999"), (12_345, "12.3 k"), (24.4e6, "24.4 M")]
)
def test_large_counts_are_rounded(number: float, told: str) -> None:
    assert amount(number) == told


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (0, "0"),
        (0.00054, "5.4e-4"),
        (0.0005, "5e-4"),
        (0.5, "0.5"),
        (999.4, "999"),
        (999.6, "1k"),
        (999_999, "1M"),
    ],
)
def test_short_numbers_have_three_digits_at_most(number: float, told: str) -> None:
    assert short_number(number) == told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("accuracy", "42.3 %"),
        ("f1_of_loss", "42.3 %"),
        ("recall_at_10", "42.3 %"),
        *((name, "0.423") for name in ("mse", "spearman", "correlation", "selection_correlation")),
        ("brier_score", "0.423"),
        ("largest_difference", "0.423"),
        ("cost_usd", "0.423"),
        ("wall_s", "0.423"),
    ],
)
def test_only_a_share_is_shown_in_percent(name: str, told: str) -> None:
    assert plain(figure(name, 0.423)) == told
    assert plain(figure(name, np.float64(0.423))) == told


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        (
            {"rows": 1200, "accuracy": 0.423, "seconds": 2.0, "f1": 0.5},
            "rows 1,200, accuracy 42.3 %, F1 50.0 %",
        ),
        ({"is_champion": True, "why": "x"}, ""),
    ],
)
def test_a_run_without_words_shows_its_first_counts(counts: dict[str, object], told: str) -> None:
    assert plain(first_counts(counts)) == told
