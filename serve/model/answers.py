"""Holds a model's answers to a request, their cost, and their form in the cache."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_core.data.cuts import CutPlace
from bert_core.data.windows import Window
from serve.model.answer_cache import CachedAnswer
from serve.model.sizes import masks_of, padded_length, real_length

MOST_CUT = 100
"""Texts of which an answer says where they were cut."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Answers to a request, and their cost."""

    answers: list[Any]
    """One per input, in the task's own schema."""
    tokens: int
    """Tokens that were read, special ones included."""
    cut: list[CutPlace]
    """Where texts were cut, for the first `MOST_CUT` of them."""
    tokenize_s: float
    queue_s: float
    """Time that the last window waited for its pass."""
    compute_s: float
    hits: int | None = None
    """Answers that came from the cache; None without one."""
    space: str | None = None
    """Digest of the space of its vectors (`bert_core.inference.vector_spaces`); None for other
    answers."""

    @property
    def model_s(self) -> float:
        """Seconds that the model took, waiting included."""
        return self.tokenize_s + self.queue_s + self.compute_s


@dataclass(frozen=True)
class Computed:
    """Answers, with the windows and scores that they were computed from."""

    answered: Answered
    windows: list[Window]
    scores: list[np.ndarray]
    numbers: list[int]
    """Numbers in the vectors that each window gives."""


NOTHING = Computed(
    Answered(answers=[], tokens=0, cut=[], tokenize_s=0.0, queue_s=0.0, compute_s=0.0), [], [], []
)
"""For a request that needs no pass."""


def entries_of(computed: Computed) -> list[CachedAnswer]:
    """Return the cache entry of each row."""
    windows: list[list[Window]] = [[] for _ in computed.answered.answers]
    numbers = [0] * len(windows)
    for window, size in zip(computed.windows, computed.numbers, strict=True):
        windows[window.row].append(window)
        numbers[window.row] += size
    cuts: list[list[CutPlace]] = [[] for _ in windows]
    for place in computed.answered.cut:
        cuts[place.row].append(place)
    return [
        CachedAnswer.of(
            answer,
            places,
            tokens=sum(map(real_length, of_row)),
            padded_tokens=sum(map(padded_length, of_row)),
            masks=sum(map(masks_of, of_row)),
            numbers=size,
            # It is only known where the first `MOST_CUT` texts were cut.
            has_all_cuts=len(places) == len({cut.name for window in of_row for cut in window.cuts}),
        )
        for answer, places, of_row, size in zip(
            computed.answered.answers, cuts, windows, numbers, strict=True
        )
    ]
