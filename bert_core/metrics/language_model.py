"""Metrics of masked language models, and the baseline that they have to beat."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Integer

Labels = Iterable[Integer[np.ndarray, "_"]]


def unigram_baseline(train: Labels, held_out: Labels, vocab_size: int) -> tuple[float, float]:
    """Predict `held_out` ids by their frequency in `train`; return the mean loss in nats, and the
    accuracy.

    Every id counts once more than it was seen, so that none has probability 0 (Laplace).
    """
    seen = np.ones(vocab_size)
    for ids in train:
        seen += np.bincount(ids, minlength=vocab_size)
    predicted = np.zeros(vocab_size)
    for ids in held_out:
        predicted += np.bincount(ids, minlength=vocab_size)
    log_share = np.log(seen) - np.log(seen.sum())
    loss = -(predicted * log_share).sum() / predicted.sum()
    return float(loss), float(predicted[seen.argmax()] / predicted.sum())


def masked_word_metrics(
    hits: Integer[np.ndarray, "rows"],
    log_shares: Float[np.ndarray, "rows"],
    masks: Integer[np.ndarray, "rows"],
    answered: Integer[np.ndarray, "rows"],
) -> dict[str, float]:
    """Return `accuracy` over the masks of all rows, where a mask that was cut off counts as wrong,
    and `perplexity` over the masks that were not cut off.

    Args:
        hits: per row, the number of masks whose best candidate is the right word.
        log_shares: per row, the sum over its masks of the log probability of the right word.
        masks: the number of masks per row.
        answered: the number of masks per row that were not cut off.
    """
    loss = -log_shares.sum() / answered.sum() if answered.any() else 700.0
    return {
        "accuracy": float(hits.sum() / max(1, int(masks.sum()))),
        "perplexity": float(np.exp(min(loss, 700.0))),
    }
