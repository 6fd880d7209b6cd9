"""Which positions are predicted, and what the model sees there.

A strategy chooses positions (`STRATEGIES`); `corrupt` puts [MASK], a random token or the token
itself there. Both work on all rows of a shard at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Integer

from bert_core.errors import ConfigError

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the predicted positions; the rest keep their token

Strategy = Literal["token"]


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """How much is predicted. Defaults: Devlin et al. 2019, section 3.1; google-research/bert."""

    strategy: Strategy = "token"
    """How positions are chosen: `token` takes each on its own."""
    masked_lm_prob: float = 0.15
    """Share of a row's ids that are predicted, special tokens counted in."""
    max_predictions_per_seq: int = 20
    """Most positions predicted in a row; some 0.15 × max_length."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(
                f"strategy: wanted one of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        if not 0.0 < self.masked_lm_prob < 1.0:
            raise ConfigError(
                f"masked_lm_prob: wanted above 0 and below 1, got {self.masked_lm_prob}"
            )
        if self.max_predictions_per_seq < 1:
            raise ConfigError(
                f"max_predictions_per_seq: wanted at least 1, got {self.max_predictions_per_seq}"
            )


@dataclass(frozen=True)
class Masked:
    """`input_ids` as the model sees them; `labels` are the true ids at the flat `positions`."""

    input_ids: Integer[np.ndarray, "tokens"]
    positions: Integer[np.ndarray, "picked"]
    labels: Integer[np.ndarray, "picked"]


def budgets(
    offsets: Integer[np.ndarray, "rows_1"], config: MaskingConfig
) -> Integer[np.ndarray, "rows"]:
    """Positions to predict in each row: the share of its length, 1 to the maximum."""
    wanted = np.rint(np.diff(offsets) * config.masked_lm_prob).astype(np.int64)
    return np.clip(wanted, 1, config.max_predictions_per_seq)


def choose_tokens(
    offsets: Integer[np.ndarray, "rows_1"],
    maskable: Bool[np.ndarray, "tokens"],
    budgets: Integer[np.ndarray, "rows"],
    rng: np.random.Generator,
) -> Integer[np.ndarray, "picked"]:
    """Pick each row's budget of maskable positions, every one as likely as another.

    Fewer come back from a row that has fewer maskable positions.
    Returns: flat positions, ascending.
    """
    candidates = np.flatnonzero(maskable)
    rows = np.searchsorted(offsets, candidates, side="right") - 1
    order = np.lexsort((rng.random(len(candidates)), rows))
    first_of_row = np.searchsorted(rows, np.arange(len(budgets)))  # `rows` is ascending
    rank = np.arange(len(candidates)) - first_of_row[rows]  # of the ordered candidates in their row
    return np.sort(candidates[order[rank < budgets[rows]]])


STRATEGIES: dict[str, Callable[..., np.ndarray]] = {"token": choose_tokens}


def corrupt(
    input_ids: Integer[np.ndarray, "tokens"],
    positions: Integer[np.ndarray, "picked"],
    *,
    mask_id: int,
    replacement_ids: Integer[np.ndarray, "ordinary"],
    rng: np.random.Generator,
) -> Masked:
    """Put [MASK] at 80 % of the positions, a random ordinary token at 10 %, leave 10 %.

    Args:
        replacement_ids: what a random token is drawn from; never special tokens.
    Source: Devlin et al. 2019, section 3.1.
    """
    labels = input_ids[positions]
    kind = rng.random(len(positions))
    random_ids = rng.choice(replacement_ids, size=len(positions)).astype(input_ids.dtype)
    seen = np.where(kind < MASK_SHARE, input_ids.dtype.type(mask_id), labels)
    seen = np.where((kind >= MASK_SHARE) & (kind < MASK_SHARE + RANDOM_SHARE), random_ids, seen)
    corrupted = input_ids.copy()
    corrupted[positions] = seen
    return Masked(corrupted, positions, labels)
