"""Masking: which positions are predicted, and what the model sees there.

A strategy chooses positions, in groups (`STRATEGIES`); `corrupt` puts [MASK], a random token or the
token itself there, with one draw per group; `Masker` does both. All work on many rows at once. The
draws for a row depend on its key only, whether masks are made with the shard or at training time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Bool, Float, Integer, UInt64

from bert_core.checks import PositiveInt, Range, Share, check_fields
from bert_core.data.draws import FATE, LENGTH, ORDER, REPLACEMENT, Draws
from bert_core.data.ragged import ragged_ranges
from bert_core.errors import ConfigError

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the predicted positions; the rest keep their token
SPECIAL = -1  # in `words`: the token belongs to no word and is never predicted

Strategy = Literal["token", "whole_word", "ngram", "span"]


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Which tokens are predicted, and what is shown in their place. Defaults: Devlin et al. 2019,
    section 3.1; google-research/bert."""

    strategy: Strategy = "token"
    """How positions are chosen: each `token` separately, the pieces of a `whole_word` together, an
    `ngram` of up to 3 words (ALBERT), a `span` of up to 10 words with one fate (SpanBERT)."""
    masked_lm_prob: Annotated[float, Range(above=0, below=1)] = 0.15
    """Share of a row's tokens to predict, of its length with special tokens."""
    max_predictions_per_seq: PositiveInt = 20
    """Maximum number of positions predicted per row; about 0.15 × max_length."""
    mask_share: Share = MASK_SHARE
    """Share of the predicted positions that show [MASK]; 1 if a generator fills them (`rtd`)."""
    random_share: Share = RANDOM_SHARE
    """Share of the predicted positions that show a random token; the rest keep their token."""
    dynamic: bool = False
    """Draw new masks in every epoch, at training time (RoBERTa); shards then have none."""

    def __post_init__(self) -> None:
        check_fields(self, prefix="masking.")
        if self.mask_share + self.random_share > 1:
            raise ConfigError(
                "masking.mask_share, masking.random_share: wanted at most 1 together, got "
                f"{self.mask_share} and {self.random_share}"
            )


@dataclass(frozen=True)
class Chosen:
    """Flat `positions` to predict, ascending; those of the same group in `groups` share a draw."""

    positions: Integer[np.ndarray, "picked"]
    groups: Integer[np.ndarray, "picked"]


@dataclass(frozen=True)
class Masked:
    """`input_ids` as the model sees them; `labels` are the true ids at the flat `positions`."""

    input_ids: Integer[np.ndarray, "tokens"]
    positions: Integer[np.ndarray, "picked"]
    labels: Integer[np.ndarray, "picked"]


def budgets(
    offsets: Integer[np.ndarray, "rows_1"], config: MaskingConfig
) -> Integer[np.ndarray, "rows"]:
    """Return the number of positions to predict in each row: the share of its length, from 1 to the
    maximum."""
    wanted = np.rint(np.diff(offsets) * config.masked_lm_prob).astype(np.int64)
    return np.clip(wanted, 1, config.max_predictions_per_seq)


def number_words(
    maskable: Bool[np.ndarray, "tokens"], begins_word: Bool[np.ndarray, "tokens"]
) -> Integer[np.ndarray, "tokens"]:
    """Return the number of the word that each token belongs to, counted through all rows; SPECIAL
    if none.

    A token after a special token begins a word too: a row may be cut inside a word.
    """
    after_special = np.concatenate([[True], ~maskable[:-1]]) if len(maskable) else maskable
    starts = maskable & (begins_word | after_special)
    return np.where(maskable, np.cumsum(starts) - 1, SPECIAL)


def choose_tokens(
    words: Integer[np.ndarray, "tokens"],
    offsets: Integer[np.ndarray, "rows_1"],
    budgets: Integer[np.ndarray, "rows"],
    draws: Draws,
) -> Chosen:
    """Pick each row's budget of tokens, every set of them equally likely.

    If a row has fewer maskable tokens, all of them are picked.
    Source: R. Floyd's sampling without replacement (Bentley and Floyd 1987), all rows at once.
    """
    candidates = np.flatnonzero(words != SPECIAL)
    first_of_row = np.searchsorted(candidates, offsets)  # and one past the last
    sizes = np.diff(first_of_row)
    counts = np.minimum(sizes, budgets)
    is_chosen = np.zeros(len(candidates), dtype=bool)
    rows = np.arange(len(sizes))
    for step in range(int(counts.max(initial=0))):
        rows = rows[counts[rows] > step]
        last = sizes[rows] - counts[rows] + step
        tried = (draws(ORDER, rows, step) * (last + 1)).astype(np.int64)
        tried = first_of_row[rows] + np.where(is_chosen[first_of_row[rows] + tried], last, tried)
        is_chosen[tried] = True
    positions = candidates[is_chosen]
    return Chosen(positions, np.arange(len(positions)))


def choose_runs(
    words: Integer[np.ndarray, "tokens"],
    offsets: Integer[np.ndarray, "rows_1"],
    budgets: Integer[np.ndarray, "rows"],
    draws: Draws,
    *,
    length_shares: Float[np.ndarray, "longest"],
    one_draw: bool = False,
) -> Chosen:
    """Pick runs of whole words, as many as a row's budget holds.

    A row's words are tried in random order as the first of a run, whose length in words is drawn
    from `length_shares` (entry n - 1: the share of length n). A run ends before a special token
    and before a word that is taken; it is shortened to the whole words that fit into the rest of
    the budget, and skipped if none fits, so fewer than the budget may come back, never more.

    Args:
        one_draw: whether the positions of a run form one group; otherwise each is its own group.
    """
    longest = len(length_shares)
    starts = np.flatnonzero((words != SPECIAL) & (np.diff(words, prepend=SPECIAL - 1) != 0))
    total = len(starts)
    # Where each word ends, and the first word after it that is not directly adjacent.
    is_last = np.append(words[1:] != words[:-1], True) if len(words) else np.zeros(0, bool)
    ends = np.flatnonzero((words != SPECIAL) & is_last) + 1
    breaks = np.flatnonzero(np.append(ends[:-1] != starts[1:], True)) + 1 if total else starts
    run_limit = np.repeat(breaks, np.diff(breaks, prepend=0))
    row_of_word = np.searchsorted(offsets, starts, side="right") - 1
    places = starts - offsets[row_of_word]
    # NOTE: a stable sort of one nearly sorted key takes a tenth of the time of lexsort. 0.999 keeps
    # a key from being rounded up into the next row.
    order = np.argsort(row_of_word + 0.999 * draws(ORDER, row_of_word, places), kind="stable")
    shares_up_to = np.cumsum(length_shares[:-1])
    lengths = np.searchsorted(shares_up_to, draws(LENGTH, row_of_word, places), side="right") + 1
    next_try = np.searchsorted(row_of_word, np.arange(len(budgets)))
    last_try = np.searchsorted(row_of_word, np.arange(len(budgets)), side="right")
    budget_left = budgets.copy()
    # Entries past the end count as used, so that a run stops at the last word.
    is_used = np.zeros(total + longest, dtype=bool)
    is_used[total:] = True
    run_of_word = np.full(total, -1, dtype=np.int64)
    active = np.flatnonzero((next_try < last_try) & (budget_left > 0))
    while len(active):  # every row tries its next word
        first = order[next_try[active]]
        run_end = np.minimum(first + lengths[first], run_limit[first])
        end, going = first.copy(), np.ones(len(active), dtype=bool)
        for _ in range(longest):
            going &= (end < run_end) & ~is_used[end]
            going &= ends[np.minimum(end, total - 1)] - starts[first] <= budget_left[active]
            end += going
        has_words = end > first
        rows, first, run_words = active[has_words], first[has_words], (end - first)[has_words]
        budget_left[rows] -= ends[first + run_words - 1] - starts[first]
        chosen = ragged_ranges(first, run_words)
        is_used[chosen] = True
        run_of_word[chosen] = np.repeat(first, run_words)
        next_try[active] += 1
        active = active[(next_try[active] < last_try[active]) & (budget_left[active] > 0)]
    picked = np.flatnonzero(run_of_word >= 0)
    word_lengths = ends[picked] - starts[picked]
    positions = ragged_ranges(starts[picked], word_lengths)
    groups = np.repeat(run_of_word[picked], word_lengths) if one_draw else np.arange(len(positions))
    return Chosen(positions, np.unique(groups, return_inverse=True)[1])


def _renormalised(shares: Float[np.ndarray, "longest"]) -> Float[np.ndarray, "longest"]:
    return shares / shares.sum()


WHOLE_WORD = np.ones(1)
"""google-research/bert, May 2019: the pieces of a word together or not at all."""
NGRAM = _renormalised(1 / np.arange(1, 4))
"""Lan et al. 2020, section 3.1: up to 3 words, p ∝ 1/n."""
SPAN = _renormalised(0.2 * 0.8 ** np.arange(10))
"""Joshi et al. 2020, section 3.1: a geometric with p = 0.2, renormalised on 1 to 10 words."""

STRATEGIES: dict[str, Callable[..., Chosen]] = {
    "token": choose_tokens,
    "whole_word": partial(choose_runs, length_shares=WHOLE_WORD),
    "ngram": partial(choose_runs, length_shares=NGRAM),
    "span": partial(choose_runs, length_shares=SPAN, one_draw=True),
}


def corrupt(
    input_ids: Integer[np.ndarray, "tokens"],
    offsets: Integer[np.ndarray, "rows_1"],
    chosen: Chosen,
    draws: Draws,
    *,
    mask_id: int,
    replacement_ids: Integer[np.ndarray, "ordinary"],
    mask_share: Share = MASK_SHARE,
    random_share: Share = RANDOM_SHARE,
) -> Masked:
    """Put [MASK] at 80 % of the groups, random ordinary tokens at 10 %, leave 10 % (the defaults).

    Args:
        replacement_ids: what random tokens are drawn from; never special tokens.
    Source: Devlin et al. 2019, section 3.1; Joshi et al. 2020, section 3.1, for spans as groups.
    """
    positions = chosen.positions
    labels = input_ids[positions]
    rows = np.searchsorted(offsets, positions, side="right") - 1
    places = positions - offsets[rows]
    first_of_group = np.unique(chosen.groups, return_index=True)[1]
    fate = draws(FATE, rows[first_of_group], places[first_of_group])[chosen.groups]
    drawn = (draws(REPLACEMENT, rows, places) * len(replacement_ids)).astype(np.int64)
    random_ids = replacement_ids[drawn].astype(input_ids.dtype)
    seen = np.where(fate < mask_share + random_share, random_ids, labels)
    seen = np.where(fate < mask_share, input_ids.dtype.type(mask_id), seen)
    corrupted = input_ids.copy()
    corrupted[positions] = seen
    return Masked(corrupted, positions, labels)


def span_lengths(positions: Integer[np.ndarray, "picked"]) -> Integer[np.ndarray, "spans"]:
    """Return the length of each span: each run of consecutive numbers in `positions`, which are
    ascending.

    Adjacent spans count as one, as in SpanBERT's code, so that the neighbours of a span are never
    predicted themselves (Joshi et al. 2020, section 3.2). No span crosses rows, since these have
    special tokens at their ends.
    """
    begins = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return np.diff(np.append(begins, len(positions)))


class Masker:
    """Masks rows as its config says; the draws are a function of each row's key."""

    def __init__(
        self,
        config: MaskingConfig,
        *,
        vocab_size: int,
        special_ids: Integer[np.ndarray, "special"],
        mask_id: int,
    ) -> None:
        """Prepare masking for a vocabulary. `special_ids` are never predicted, and never drawn as a
        random replacement."""
        self._config = config
        self._mask_id = mask_id
        self._is_special = np.zeros(vocab_size, dtype=bool)
        self._is_special[special_ids] = True
        self._replacement_ids = np.flatnonzero(~self._is_special)

    def __call__(
        self,
        input_ids: Integer[np.ndarray, "tokens"],
        offsets: Integer[np.ndarray, "rows_1"],
        begins_word: Bool[np.ndarray, "tokens"],
        keys: UInt64[np.ndarray, "rows"],
    ) -> Masked:
        """Choose positions in every row and corrupt them.

        Args:
            begins_word: whether each token is the first piece of a word.
            keys: the key of each row, from `draws.row_keys`.
        """
        draws = Draws(keys)
        words = number_words(~self._is_special[input_ids], begins_word)
        choose = STRATEGIES[self._config.strategy]
        return corrupt(
            input_ids,
            offsets,
            choose(words, offsets, budgets(offsets, self._config), draws),
            draws,
            mask_id=self._mask_id,
            replacement_ids=self._replacement_ids,
            mask_share=self._config.mask_share,
            random_share=self._config.random_share,
        )
