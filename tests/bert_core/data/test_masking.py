"""What every masking strategy keeps, and the shares that the BERT paper names."""

from typing import get_args

import numpy as np
import pytest

from bert_core.data.masking import (
    MASK_SHARE,
    RANDOM_SHARE,
    STRATEGIES,
    MaskingConfig,
    Strategy,
    budgets,
    choose_tokens,
    corrupt,
)
from bert_core.errors import ConfigError

SIGMAS = 4.5  # a fair draw lies further out once in 150,000 seeds; the seeds here are fixed
VOCABULARY, MASK_ID = 1000, 4
SPECIAL = np.arange(5)
ORDINARY = np.arange(5, VOCABULARY)


def rows_of(lengths: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, offsets and what may be masked: rows `[CLS] A [SEP] B [SEP]` of the given lengths."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.choice(ORDINARY, offsets[-1]).astype(np.uint16)
    middle = offsets[:-1] + lengths // 2
    maskable = np.ones(len(ids), dtype=bool)
    for positions, token in ((offsets[:-1], 2), (middle, 3), (offsets[1:] - 1, 3)):
        ids[positions], maskable[positions] = token, False
    return ids, offsets, maskable


def of_all_lengths(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rows_of(np.random.default_rng(seed).integers(5, 129, 400), seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(3))
def test_picks_keep_to_the_budget_of_their_row_and_to_ordinary_tokens(
    strategy: str, seed: int
) -> None:
    _, offsets, maskable = of_all_lengths(seed)
    wanted = budgets(offsets, MaskingConfig())
    picked = STRATEGIES[strategy](offsets, maskable, wanted, np.random.default_rng(seed))
    assert (np.diff(picked) > 0).all()  # ascending, none twice
    assert maskable[picked].all()
    per_row = np.diff(np.searchsorted(picked, offsets))
    assert (per_row <= wanted).all()
    assert per_row.sum() > 0.9 * wanted.sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_picks_follow_from_the_generator_alone(strategy: str) -> None:
    _, offsets, maskable = of_all_lengths()
    wanted = budgets(offsets, MaskingConfig())
    first, again, other = (
        STRATEGIES[strategy](offsets, maskable, wanted, np.random.default_rng(seed)).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rows_give_no_picks(strategy: str) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    picked = STRATEGIES[strategy](
        np.zeros(1, np.int64), np.zeros(0, bool), nothing, np.random.default_rng(0)
    )
    assert picked.tolist() == []


def test_tokens_fill_the_budget_as_far_as_a_row_goes() -> None:
    _, offsets, maskable = rows_of(np.array([5, 40, 5, 128]))
    maskable[offsets[2] : offsets[3]] = False
    wanted = np.array([7, 6, 1, 20])
    picked = choose_tokens(offsets, maskable, wanted, np.random.default_rng(0))
    assert np.diff(np.searchsorted(picked, offsets)).tolist() == [2, 6, 0, 20]


def test_every_maskable_position_is_as_likely_as_another() -> None:
    rows, length, budget = 6000, 20, 3
    _, offsets, maskable = rows_of(np.full(rows, length))
    picked = choose_tokens(offsets, maskable, np.full(rows, budget), np.random.default_rng(0))
    counts = np.bincount(picked % length, minlength=length)
    open_positions = maskable[:length]
    share = budget / open_positions.sum()
    spread = np.sqrt(rows * share * (1 - share))
    assert np.abs(counts[open_positions] - rows * share).max() < SIGMAS * spread
    assert counts[~open_positions].sum() == 0


@pytest.mark.parametrize(
    ("length", "budget"),
    [(5, 1), (16, 2), (17, 3), (64, 10), (128, 19), (129, 19), (134, 20), (512, 20)],
)
def test_the_budget_is_15_percent_of_the_row_within_its_limits(length: int, budget: int) -> None:
    # int(round(length * 0.15)), at least 1 and at most 20: google-research/bert.
    assert budgets(np.array([0, length]), MaskingConfig()).tolist() == [budget]


def test_the_share_and_the_limit_can_be_set() -> None:
    config = MaskingConfig(masked_lm_prob=0.4, max_predictions_per_seq=76)
    assert budgets(np.array([0, 100, 600]), config).tolist() == [40, 76]


def test_what_was_there_is_the_label_and_all_else_stays() -> None:
    ids, offsets, maskable = of_all_lengths()
    before = ids.copy()
    positions = choose_tokens(
        offsets, maskable, budgets(offsets, MaskingConfig()), np.random.default_rng(0)
    )
    masked = corrupt(
        ids, positions, mask_id=MASK_ID, replacement_ids=ORDINARY, rng=np.random.default_rng(0)
    )
    assert (ids == before).all()
    assert (masked.positions == positions).all()
    assert (masked.labels == before[positions]).all()
    assert masked.input_ids.dtype == masked.labels.dtype == ids.dtype
    untouched = np.setdiff1d(np.arange(len(ids)), positions)
    assert (masked.input_ids[untouched] == before[untouched]).all()


def test_80_10_10_holds_and_replacements_are_ordinary_and_uniform() -> None:
    count = 60_000
    ids = np.full(count, 7, dtype=np.uint16)
    masked = corrupt(
        ids,
        np.arange(count),
        mask_id=MASK_ID,
        replacement_ids=ORDINARY,
        rng=np.random.default_rng(0),
    )
    seen = np.bincount(masked.input_ids, minlength=VOCABULARY)
    # One random token in 995 is the true one, which then counts as kept.
    by_chance = RANDOM_SHARE / len(ORDINARY)
    kept_share = 1 - MASK_SHARE - RANDOM_SHARE
    for observed, share in [
        (seen[MASK_ID], 0.8),
        (seen[7], kept_share + by_chance),
        (np.delete(seen[5:], 2).sum(), 0.1 - by_chance),
    ]:
        assert abs(observed - count * share) < SIGMAS * np.sqrt(count * share * (1 - share))
    assert seen[SPECIAL].sum() == seen[MASK_ID]
    replaced = np.delete(seen[5:], 2)
    expected = replaced.sum() / len(replaced)
    chi_squared = ((replaced - expected) ** 2 / expected).sum()
    degrees = len(replaced) - 1
    assert abs(chi_squared - degrees) < SIGMAS * np.sqrt(2 * degrees)


def test_corruption_follows_from_the_generator_alone() -> None:
    ids = rows_of(np.full(10, 100))[0]
    first, again, other = (
        corrupt(
            ids,
            np.arange(0, 1000, 3),
            mask_id=MASK_ID,
            replacement_ids=ORDINARY,
            rng=np.random.default_rng(seed),
        ).input_ids.tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"masked_lm_prob": 0.0}, r"masked_lm_prob: wanted above 0 and below 1, got 0\.0"),
        ({"masked_lm_prob": 1.0}, r"masked_lm_prob: wanted above 0 and below 1, got 1\.0"),
        ({"max_predictions_per_seq": 0}, "max_predictions_per_seq: wanted at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskingConfig(**settings)


def test_an_unknown_strategy_is_refused_with_those_there_are() -> None:
    assert set(get_args(Strategy)) == set(STRATEGIES)
    config = MaskingConfig()
    object.__setattr__(config, "strategy", "words")  # past the types, which are checked here
    with pytest.raises(
        ConfigError, match=f"strategy: wanted one of {', '.join(STRATEGIES)}, got 'words'"
    ):
        config.__post_init__()
