"""What every masking strategy keeps, and the shares that the papers name."""

from functools import partial
from typing import get_args

import numpy as np
import pytest

from bert_core.data.draws import LENGTH, ORDER, Draws, row_keys
from bert_core.data.masking import (
    MASK_SHARE,
    NGRAM,
    RANDOM_SHARE,
    SPAN,
    STRATEGIES,
    WHOLE_WORD,
    Chosen,
    Masker,
    MaskingConfig,
    Strategy,
    budgets,
    choose_runs,
    choose_tokens,
    corrupt,
    number_words,
    span_lengths,
)
from bert_core.data.ragged import offsets_of
from bert_core.errors import ConfigError

SIGMAS = 4.5  # a fair draw lies further out once in 150,000 seeds; the seeds here are fixed
VOCABULARY, MASK_ID = 1000, 4
SPECIAL = np.arange(5)
ORDINARY = np.arange(5, VOCABULARY)


def draws_of(seed: int, rows: int) -> Draws:
    return Draws(row_keys(seed, np.arange(rows)))


def rows_of(
    lengths: np.ndarray, seed: int = 0, continued: float = 0.3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, offsets and words: rows `[CLS] A [SEP] B [SEP]` of the given lengths.

    `continued` is the share of pieces that go on with the word before.
    """
    rng = np.random.default_rng(seed)
    offsets = offsets_of(lengths)
    ids = rng.choice(ORDINARY, offsets[-1]).astype(np.uint16)
    middle = offsets[:-1] + lengths // 2
    maskable = np.ones(len(ids), dtype=bool)
    for positions, token in ((offsets[:-1], 2), (middle, 3), (offsets[1:] - 1, 3)):
        ids[positions], maskable[positions] = token, False
    return ids, offsets, number_words(maskable, rng.random(len(ids)) >= continued)


def of_all_lengths(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rows_of(np.random.default_rng(seed).integers(5, 129, 400), seed)


def run_oracle(
    words: np.ndarray,
    offsets: np.ndarray,
    budgets: np.ndarray,
    draws: Draws,
    *,
    length_shares: np.ndarray,
) -> list[list[int]]:
    """The runs that `choose_runs` is to pick, row by row and word by word, ordered by place."""
    pieces: dict[int, list[int]] = {}
    for position, word in enumerate(words):
        if word >= 0:
            pieces.setdefault(int(word), []).append(position)
    found = []
    for row, budget in enumerate(budgets):
        inside = [w for w, at in pieces.items() if offsets[row] <= at[0] < offsets[row + 1]]

        def drawn(purpose: int, word: int, row: int = row) -> float:
            place = pieces[word][0] - offsets[row]
            return float(draws(purpose, np.array([row]), np.array([place]))[0])

        taken: set[int] = set()
        left = int(budget)
        for first in sorted(inside, key=lambda word: drawn(ORDER, word)):
            run: list[int] = []
            up_to = np.cumsum(length_shares)
            longer = int((drawn(LENGTH, first) >= up_to[:-1]).sum())
            for word in range(first, first + longer + 1):
                follows = not run or (word in inside and pieces[word][0] == run[-1] + 1)
                if not follows or word in taken or len(run) + len(pieces[word]) > left:
                    break
                run += pieces[word]
                taken.add(word)
            if run:
                found.append(run)
                left -= len(run)
    return sorted(found)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(3))
def test_picks_keep_to_the_budget_of_their_row_and_to_ordinary_tokens(
    strategy: str, seed: int
) -> None:
    _, offsets, words = of_all_lengths(seed)
    wanted = budgets(offsets, MaskingConfig())
    chosen = STRATEGIES[strategy](words, offsets, wanted, draws_of(seed, len(wanted)))
    assert (np.diff(chosen.positions) > 0).all()  # ascending, none twice
    assert (words[chosen.positions] >= 0).all()
    assert len(chosen.groups) == len(chosen.positions)
    assert sorted(set(chosen.groups.tolist())) == list(range(chosen.groups.max() + 1))
    per_row = np.diff(np.searchsorted(chosen.positions, offsets))
    assert (per_row <= wanted).all()
    assert per_row.sum() > 0.9 * wanted.sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_picks_follow_from_the_keys_alone(strategy: str) -> None:
    _, offsets, words = of_all_lengths()
    wanted = budgets(offsets, MaskingConfig())
    first, again, other = (
        STRATEGIES[strategy](words, offsets, wanted, draws_of(seed, 400)).positions.tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rows_and_rows_of_special_tokens_give_no_picks(strategy: str) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    for words, offsets, wanted in [
        (nothing, np.zeros(1, np.int64), nothing),
        (np.full(6, -1), np.array([0, 3, 6]), np.array([2, 2])),
    ]:
        chosen = STRATEGIES[strategy](words, offsets, wanted, draws_of(0, len(wanted)))
        assert chosen.positions.tolist() == chosen.groups.tolist() == []


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "token"])
@pytest.mark.parametrize("seed", range(3))
def test_no_word_is_split(strategy: str, seed: int) -> None:
    _, offsets, words = of_all_lengths(seed)
    wanted = budgets(offsets, MaskingConfig())
    chosen = STRATEGIES[strategy](words, offsets, wanted, draws_of(seed, len(wanted)))
    touched = np.unique(words[chosen.positions])
    assert np.isin(words, touched).sum() == len(chosen.positions)


@pytest.mark.drill
@pytest.mark.parametrize("shares", [WHOLE_WORD, NGRAM, SPAN], ids=["whole_word", "ngram", "span"])
@pytest.mark.parametrize("seed", range(4))
def test_runs_are_those_of_the_oracle(shares: np.ndarray, seed: int) -> None:
    _, offsets, words = rows_of(
        np.random.default_rng(seed).integers(5, 70, 60), seed, continued=seed / 4
    )
    wanted = np.random.default_rng(seed).integers(1, 30, 60)
    choose = partial(choose_runs, words, offsets, wanted, length_shares=shares)
    chosen = choose(draws_of(seed, 60), one_draw=True)
    oracle = run_oracle(words, offsets, wanted, draws_of(seed, 60), length_shares=shares)
    runs = [chosen.positions[chosen.groups == n].tolist() for n in range(chosen.groups.max() + 1)]
    assert sorted(runs) == oracle
    apart = choose(draws_of(seed, 60))
    assert apart.positions.tolist() == chosen.positions.tolist()
    assert apart.groups.tolist() == list(range(len(apart.positions)))


def test_a_run_ends_before_a_special_token_and_with_its_row() -> None:
    maskable = np.array([False, True, True, False, True, True, False] * 2)
    words = number_words(maskable, np.ones(14, dtype=bool))
    whole = 0
    for seed in range(50):
        chosen = choose_runs(
            words,
            np.array([0, 7, 14]),
            np.array([2, 2]),
            draws_of(seed, 2),
            length_shares=np.array([0.0, 0.0, 0.0, 1.0]),
            one_draw=True,
        )
        assert np.bincount(chosen.positions // 7).tolist() == [2, 2]
        for group in range(chosen.groups.max() + 1):
            run = chosen.positions[chosen.groups == group].tolist()
            assert run in [
                [1],
                [2],
                [1, 2],
                [4],
                [5],
                [4, 5],
                [8],
                [9],
                [8, 9],
                [11],
                [12],
                [11, 12],
            ]
            whole += len(run) == 2
    assert whole > 20  # a run that begins at a segment's first word is both of its words


@pytest.mark.parametrize("shares", [NGRAM, SPAN], ids=["ngram", "span"])
def test_lengths_of_runs_have_the_shares_of_their_paper(shares: np.ndarray) -> None:
    rows, length = 20_000, 61
    words = number_words(np.tile(np.arange(length) > 0, rows), np.ones(rows * length, dtype=bool))
    chosen = choose_runs(
        words,
        np.arange(rows + 1) * length,
        np.full(rows, 10),
        draws_of(0, rows),
        length_shares=shares,
        one_draw=True,
    )
    # The first run of a row is never cut: the budget holds the longest, and nothing is taken yet.
    # It begins where the row's smallest key is, too near to the row's end in some.
    row, place = np.divmod(np.arange(rows * (length - 1)), length - 1)
    keys = draws_of(0, rows)(ORDER, row, place + 1).reshape(rows, length - 1)
    first = keys.argmin(axis=1)
    rows_with_room = np.flatnonzero(first + len(shares) <= length - 1)
    starts = rows_with_room * length + 1 + first[rows_with_room]
    group = chosen.groups[np.searchsorted(chosen.positions, starts)]
    lengths = np.bincount(chosen.groups)[group]
    observed = np.bincount(lengths, minlength=len(shares) + 1)[1:]
    expected = len(lengths) * shares
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    degrees = len(shares) - 1
    assert abs(chi_squared - degrees) < SIGMAS * np.sqrt(2 * degrees)


def test_the_shares_are_those_of_the_papers() -> None:
    assert NGRAM.tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert (np.arange(1, 11) * SPAN).sum() == pytest.approx(3.797, abs=1e-3)  # SpanBERT says 3.8
    assert (SPAN[1:] / SPAN[:-1]).tolist() == pytest.approx([0.8] * 9)


def test_a_word_begins_after_a_special_token_also_where_it_is_cut() -> None:
    maskable = np.array([False, True, True, True, False, True, False])
    begins = np.array([True, False, False, True, True, False, True])
    assert number_words(maskable, begins).tolist() == [-1, 0, 0, 1, -1, 2, -1]
    assert number_words(maskable[:0], begins[:0]).tolist() == []


def test_tokens_fill_the_budget_as_far_as_a_row_goes() -> None:
    _, offsets, words = rows_of(np.array([5, 40, 5, 128]))
    words[offsets[2] : offsets[3]] = -1
    wanted = np.array([7, 6, 1, 20])
    picked = choose_tokens(words, offsets, wanted, draws_of(0, 4)).positions
    assert np.diff(np.searchsorted(picked, offsets)).tolist() == [2, 6, 0, 20]


@pytest.mark.parametrize("strategy", ["token", "whole_word"])
def test_every_position_is_as_likely_as_another(strategy: str) -> None:
    rows, length, budget = 6000, 20, 3
    _, offsets, words = rows_of(np.full(rows, length), continued=0.0)
    chosen = STRATEGIES[strategy](words, offsets, np.full(rows, budget), draws_of(0, rows))
    counts = np.bincount(chosen.positions % length, minlength=length)
    open_positions = words[:length] >= 0
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


def test_the_original_token_is_the_label_and_everything_else_stays() -> None:
    ids, offsets, words = of_all_lengths()
    before = ids.copy()
    draws = draws_of(0, len(offsets) - 1)
    chosen = choose_tokens(words, offsets, budgets(offsets, MaskingConfig()), draws)
    positions = chosen.positions
    masked = corrupt(ids, offsets, chosen, draws, mask_id=MASK_ID, replacement_ids=ORDINARY)
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
        np.arange(0, count + 1, 100),
        Chosen(np.arange(count), np.arange(count)),
        draws_of(0, count // 100),
        mask_id=MASK_ID,
        replacement_ids=ORDINARY,
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


def test_a_group_shares_one_draw_and_draws_80_10_10() -> None:
    groups, size = 20_000, 3
    ids = np.full(groups * size, 7, dtype=np.uint16)
    masked = corrupt(
        ids,
        np.arange(0, groups * size + 1, 60),
        Chosen(np.arange(groups * size), np.repeat(np.arange(groups), size)),
        draws_of(0, groups * size // 60),
        mask_id=MASK_ID,
        replacement_ids=np.arange(8, VOCABULARY),  # without the true one
    )
    seen = masked.input_ids.reshape(groups, size)
    kinds = np.where(seen == MASK_ID, 0, np.where(seen == 7, 2, 1))
    assert (kinds == kinds[:, :1]).all()
    shares = np.bincount(kinds[:, 0], minlength=3)
    for observed, share in zip(shares, (0.8, 0.1, 0.1), strict=True):
        assert abs(observed - groups * share) < SIGMAS * np.sqrt(groups * share * (1 - share))
    replaced = seen[kinds[:, 0] == 1]
    assert (replaced[:, 0] != replaced[:, 1]).mean() > 0.99  # each its own token


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mask_follows_from_the_key_of_its_row_whatever_rows_stand_beside_it(
    strategy: Strategy,
) -> None:
    ids, offsets, words = of_all_lengths()
    begins_word = np.diff(words, prepend=-2) != 0
    keys = row_keys(3, np.arange(len(offsets) - 1))
    config = MaskingConfig(strategy=strategy)
    masker = Masker(config, vocab_size=VOCABULARY, special_ids=SPECIAL, mask_id=MASK_ID)
    together = masker(ids, offsets, begins_word, keys)
    assert (together.input_ids != ids).any()
    for row in range(0, len(keys), 7):
        inside = slice(offsets[row], offsets[row + 1])
        alone = masker(
            ids[inside],
            offsets[row : row + 2] - offsets[row],
            begins_word[inside],
            keys[row : row + 1],
        )
        assert (alone.input_ids == together.input_ids[inside]).all()
    other = masker(ids, offsets, begins_word, row_keys(4, np.arange(len(offsets) - 1)))
    assert (other.input_ids != together.input_ids).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_masker_never_predicts_a_special_token_and_inserts_none_but_mask(
    strategy: Strategy,
) -> None:
    ids = np.random.default_rng(0).integers(0, 12, 20_000).astype(np.uint16)  # many are special
    masker = Masker(
        MaskingConfig(strategy=strategy, masked_lm_prob=0.5, max_predictions_per_seq=100),
        vocab_size=12,
        special_ids=SPECIAL,
        mask_id=MASK_ID,
    )
    masked = masker(
        ids, np.arange(0, 20_001, 50), np.ones(20_000, bool), row_keys(0, np.arange(400))
    )
    assert len(masked.positions) > 5000
    assert masked.labels.min() >= len(SPECIAL)
    put = masked.input_ids[masked.positions]
    assert set(put[put < len(SPECIAL)].tolist()) == {MASK_ID}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"masked_lm_prob": 0.0}, r"masked_lm_prob: wanted above 0 and below 1, got 0\.0"),
        ({"masked_lm_prob": 1.0}, r"masked_lm_prob: wanted above 0 and below 1, got 1\.0"),
        ({"max_predictions_per_seq": 0}, "max_predictions_per_seq: wanted at least 1, got 0"),
        ({"mask_share": 0.95}, r"wanted at most 1 together, got 0\.95 and 0\.1"),
        ({"random_share": -0.1}, r"random_share: wanted 0 to 1, got -0\.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskingConfig(**settings)


def test_an_unknown_strategy_is_refused_with_the_known_ones() -> None:
    assert set(get_args(Strategy)) == set(STRATEGIES)
    config = MaskingConfig()
    object.__setattr__(config, "strategy", "words")  # past the types, which are checked here
    with pytest.raises(
        ConfigError, match=f"strategy: wanted one of {', '.join(STRATEGIES)}, got 'words'"
    ):
        config.__post_init__()


def test_shares_may_be_others_and_positions_stay_the_same() -> None:
    ids, offsets = np.arange(5, 995).astype(np.uint16), np.arange(0, 991, 99)
    begins, keys = np.ones(len(ids), dtype=bool), row_keys(np.arange(10))
    usual, masked, random = (
        Masker(
            MaskingConfig(mask_share=mask, random_share=rest),
            vocab_size=VOCABULARY,
            special_ids=SPECIAL,
            mask_id=MASK_ID,
        )(ids, offsets, begins, keys)
        for mask, rest in ((0.8, 0.1), (1.0, 0.0), (0.0, 1.0))
    )
    for other in (masked, random):
        np.testing.assert_array_equal(other.positions, usual.positions)
    assert (masked.input_ids[masked.positions] == MASK_ID).all()
    assert (random.input_ids[random.positions] != MASK_ID).all()
    assert 0.7 < (usual.input_ids[usual.positions] == MASK_ID).mean() < 0.9


@pytest.mark.parametrize("seed", range(3))
def test_spans_are_what_a_walk_along_the_tokens_finds(seed: int) -> None:
    masked = np.random.default_rng(seed).random(300) < 0.4
    wanted, length = [], 0
    for is_masked in [*masked.tolist(), False]:
        if not is_masked and length:
            wanted.append(length)
        length = length + 1 if is_masked else 0
    assert span_lengths(np.flatnonzero(masked)).tolist() == wanted
    assert span_lengths(np.zeros(0, dtype=np.int64)).tolist() == []
