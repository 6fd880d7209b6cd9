"""What a language model has to beat."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Integer

Labels = Iterable[Integer[np.ndarray, "_"]]


def unigram_baseline(train: Labels, held_out: Labels, vocab_size: int) -> tuple[float, float]:
    """Predict `held_out` ids by their frequency in `train`: mean loss in nats, and accuracy.

    Every id counts one more than it was seen, so that none is impossible (Laplace).
    """
    seen = np.ones(vocab_size)
    for ids in train:
        seen += np.bincount(ids, minlength=vocab_size)
    wanted = np.zeros(vocab_size)
    for ids in held_out:
        wanted += np.bincount(ids, minlength=vocab_size)
    log_share = np.log(seen) - np.log(seen.sum())
    loss = -(wanted * log_share).sum() / wanted.sum()
    return float(loss), float(wanted[seen.argmax()] / wanted.sum())


def masked_word_metrics(
    right: Integer[np.ndarray, "rows"],
    log_shares: Float[np.ndarray, "rows"],
    masks: Integer[np.ndarray, "rows"],
    asked: Integer[np.ndarray, "rows"],
) -> dict[str, float]:
    """`accuracy` over the masks of all rows, where one that was cut off counts as wrong, and
    `perplexity` over those that were asked.

    Args:
        right: masks of each row whose best candidate is the word.
        log_shares: sum over a row's masks of the logarithm of the share that the word was given.
        masks: how many a row has.
        asked: how many of them are not cut off.
    """
    loss = -log_shares.sum() / asked.sum() if asked.any() else 700.0
    return {
        "accuracy": float(right.sum() / max(1, int(masks.sum()))),
        "perplexity": float(np.exp(min(loss, 700.0))),
    }
