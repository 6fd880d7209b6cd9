"""The bootstrap beside scipy's, and the level at which it errs."""

import numpy as np
import pytest

from bert_core.errors import ConfigError
from bert_core.metrics.bootstrap import Columns, Verdict, intervals, not_worse

RIGHT, WRONG = [1.0] * 40, [0.0] * 40


def mean(columns: Columns) -> dict[str, float]:
    return {"mean": float(columns["value"].mean())}


def compared(new: np.ndarray, old: np.ndarray, samples: int = 1000, seed: int = 0) -> Verdict:
    return not_worse("mean", mean, {"value": new}, {"value": old}, samples=samples, seed=seed)


def test_an_interval_is_scipys_percentile_bootstrap() -> None:
    from scipy import stats

    rng = np.random.default_rng(2)
    values = rng.exponential(size=200)
    low, high = intervals(mean, {"value": values}, samples=20_000)["mean"]
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=rng, batch=1000
    ).confidence_interval
    width = theirs.high - theirs.low
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=0.05 * width)


def test_the_interval_is_scipys_percentile_bootstrap() -> None:
    from scipy import stats

    rng = np.random.default_rng(1)
    new, old = rng.random(300), rng.random(300)
    verdict = compared(new, old, samples=20_000)
    theirs = stats.bootstrap(
        (new - old,), np.mean, n_resamples=20_000, method="percentile", rng=rng, batch=1000
    ).confidence_interval
    assert verdict.difference == pytest.approx((new - old).mean())
    # Each end is a quantile of 20,000 draws: its error is some 1 % of the interval's width.
    width = theirs.high - theirs.low
    assert (verdict.low, verdict.high) == pytest.approx((theirs.low, theirs.high), abs=0.05 * width)


@pytest.mark.drill
def test_an_equal_model_is_called_worse_no_more_often_than_the_level_says() -> None:
    rng = np.random.default_rng(0)
    trials = 400
    refused = 0
    for trial in range(trials):
        new, old = rng.random((2, 200)) < 0.8
        verdict = compared(new.astype(float), old.astype(float), samples=200, seed=trial)
        refused += not verdict.not_worse
    # 2.5 % by the level; four standard errors of a binomial above it.
    level = 0.025
    assert refused / trials < level + 4 * np.sqrt(level * (1 - level) / trials)


@pytest.mark.parametrize(
    ("new", "old", "verdict"),
    [
        (RIGHT, RIGHT, True),
        (RIGHT, WRONG, True),
        (WRONG, RIGHT, False),
        (RIGHT[:37] + WRONG[:3], RIGHT, True),  # three of forty may be chance
        (RIGHT[:30] + WRONG[:10], RIGHT, False),
    ],
)
def test_a_model_is_worse_only_beyond_chance(
    new: list[float], old: list[float], verdict: bool
) -> None:
    assert compared(np.array(new), np.array(old)).not_worse is verdict


def test_draws_without_a_rare_kind_of_row_do_not_count() -> None:
    rare = np.zeros(100, dtype=bool)
    rare[:3] = True

    def metrics(columns: Columns) -> dict[str, float]:
        some = columns["value"][columns["rare"]]
        return {"recall": float(some.mean())} if len(some) else {}

    new, old = ({"value": np.full(100, value), "rare": rare} for value in (1.0, 0.0))
    assert not_worse("recall", metrics, new, old).low == 1.0
    with pytest.raises(ConfigError, match="metric: wanted one that both models have"):
        not_worse("other", metrics, new, old)


@pytest.mark.parametrize(("new", "old"), [([], []), ([1.0], [1.0, 0.0])])
def test_scores_of_different_rows_are_not_compared(new: list[float], old: list[float]) -> None:
    with pytest.raises(ConfigError, match="wanted answers of both models on the same rows"):
        compared(np.array(new), np.array(old))
