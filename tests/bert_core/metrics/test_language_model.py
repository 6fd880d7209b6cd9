"""The unigram baseline against sums written out by hand, and against entropy."""

import math

import numpy as np
import pytest

from bert_core.metrics.language_model import unigram_baseline


def test_the_baseline_is_the_smoothed_frequency_of_training() -> None:
    train = [np.array([0, 0, 1], np.uint16), np.array([0], np.uint16)]
    held_out = [np.array([0, 1], np.uint16), np.array([2], np.uint16)]
    loss, accuracy = unigram_baseline(train, held_out, vocab_size=3)
    # Seen 3, 1 and 0 times, each counted one more: 4/7, 2/7, 1/7.
    assert loss == pytest.approx(-(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3)
    assert accuracy == pytest.approx(1 / 3)


def test_on_much_text_the_loss_is_the_entropy_of_the_words() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(50))
    train, held_out = ([rng.choice(50, 200_000, p=shares)] for _ in range(2))
    loss, accuracy = unigram_baseline(train, held_out, vocab_size=50)
    assert loss == pytest.approx(-(shares * np.log(shares)).sum(), abs=0.02)
    assert accuracy == pytest.approx(shares.max(), abs=0.01)
