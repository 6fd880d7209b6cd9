"""What a language model has to beat."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Integer

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
