"""How long it takes to refuse a wrong key says nothing about the right one."""

import random
import string
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest

from serve.request import auth
from serve.request.auth import Keys
from serve.request.errors import UnauthorizedError

pytestmark = pytest.mark.guard

SEED, ROUNDS, BLOCK = 20261125, 4_000, 10
FALSE_ALARM = 1e-6
"""The probability of a false alarm in all comparisons of a test."""


SHARED = (0, 1, 10, 21, 42)
"""How many of the 43 characters of the secret a wrong key has right, from the first on."""


def wrong_keys(key: str) -> list[list[str]]:
    """For each number of `SHARED` as many keys as there are rounds.

    They are made in random order, so that where a key lies in memory, which takes a few
    nanoseconds more or less, has nothing to do with what it shares with the right one.
    """
    rng, letters = random.Random(SEED), string.ascii_letters + string.digits
    found = [[""] * ROUNDS for _ in SHARED]
    places = list(product(range(len(SHARED)), range(ROUNDS)))
    rng.shuffle(places)
    for at, number in places:
        same = len("rb-alice-") + SHARED[at]
        other = rng.choice([letter for letter in letters if letter != key[same]])
        rest = "".join(rng.choices(letters, k=len(key) - same - 1))
        found[at][number] = key[:same] + other + rest
    return found


def nanoseconds(ask: Callable[[str], object], keys: list[list[str]]) -> np.ndarray:
    """How long each key takes, (kinds, rounds); the kinds in another order every round.

    What the machine does besides, and its clock's changes, fall on all kinds alike.
    """
    rng = np.random.default_rng(SEED)
    taken = np.empty((len(keys), ROUNDS))
    for number in range(ROUNDS):
        for at in rng.permutation(len(keys)):
            key = keys[at][number]
            began = time.perf_counter_ns()
            ask(key)
            taken[at, number] = time.perf_counter_ns() - began
    return taken


def that_differ(taken: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of kinds of which one takes longer.

    Of every `BLOCK` rounds a kind's median counts, so that moments in which the machine does
    something else do not hide a difference. If what two kinds of keys share with the right one
    takes no time, they could change places in any round, since their order there and in memory is
    drawn: the difference of their medians is as likely as its negative, in every block, however
    noisy the machine is and however its noise changes from block to block. That is all that
    Wilcoxon's signed-rank test asks for: then a p as small as p comes with probability p. With k
    pairs, and a pair that counts only below FALSE_ALARM / k, the probability that any of them
    counts is at most FALSE_ALARM (Bonferroni). Noise makes the test weaker, and no false alarm
    likelier.
    """
    from scipy.stats import wilcoxon

    medians = np.median(taken.reshape(len(taken), -1, BLOCK), axis=-1)
    pairs = list(combinations(range(len(taken)), 2))
    return [
        (one, other)
        for one, other in pairs
        if wilcoxon(medians[one], medians[other]).pvalue < FALSE_ALARM / len(pairs)
    ]


def naive(wanted: str, given: str) -> bool:
    """What leaks: it ends at the first character that differs."""
    return all(one == other for one, other in zip(wanted, given, strict=True))


def test_a_comparison_that_ends_early_is_found_out() -> None:
    key, _ = auth.create("alice")
    found = that_differ(nanoseconds(partial(naive, key), wrong_keys(key)))
    assert {(0, 2), (0, 3), (0, 4), (2, 4)} <= set(found)


def test_wrong_keys_are_refused_in_the_same_time_whatever_they_share_with_a_right_one() -> None:
    key, stored = auth.create("alice")
    keys = Keys([stored, auth.create("bob")[1]])

    def refuse(given: str) -> None:
        try:
            keys.admit({"authorization": f"Bearer {given}"}, "docs")
        except UnauthorizedError:
            return
        raise AssertionError("a wrong key was admitted")

    assert that_differ(nanoseconds(refuse, wrong_keys(key))) == []
