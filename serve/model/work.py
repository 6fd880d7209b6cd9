"""Does the work that a request asks of a model: inputs become rows, windows, scores and answers.

`Model` decides where each step runs, on the event loop or a thread, and computes the passes.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bert_core.data.cuts import CutPlace, places_of
from bert_core.data.windows import PAD_MULTIPLE, Window
from bert_core.inference.predictor import Predictor
from bert_core.tasks.base import Parameters
from bert_core.tasks.shapes import Row
from serve.model.answer_cache import AnswerCache, CachedAnswer, keys_of, unpacked
from serve.model.answers import MOST_CUT, Computed, entries_of
from serve.model.sizes import FEW_SCORES, is_small, masks_of, padded_length
from serve.request.limits import (
    Limits,
    check_candidates,
    check_count,
    check_lists,
    check_numbers,
    check_tokens,
)


@dataclass(frozen=True)
class Pass:
    """A window's scores, with the times at which its pass began and ended."""

    scores: np.ndarray
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Encoded:
    """Inputs as rows of the task, and as windows of token ids."""

    rows: list[Row]
    windows: list[Window]


@dataclass(frozen=True)
class Decoded:
    """Answers, and what is checked against the limits of their request."""

    answers: list[Any]
    cut: list[CutPlace]
    """Where texts were cut, for the first `MOST_CUT` of them."""
    numbers: list[int]
    """Numbers in the vectors that each window gives."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The inputs of a request, the predictor and parameters that answer them, and the limits that
    apply.

    All methods raise InputError for inputs that do not fit the task, and TooLargeError beyond a
    limit.
    """

    predictor: Predictor
    inputs: Sequence[Any]
    parameters: Parameters | None
    limits: Limits
    compute: Callable[[Sequence[Window]], Awaitable[Sequence[Pass]]]
    """Gets windows their passes."""
    are_long: bool = False
    """Whether the inputs may take seconds to tokenize."""

    @property
    def all_parameters(self) -> Parameters:
        """The parameters, or the task's defaults where a request has none."""
        return self.parameters or self.predictor.task.parameters()

    @cached_property
    def is_small(self) -> bool:
        """Whether the event loop may tokenize the inputs itself. The size of the parameters counts
        once per input, since every label in them is read with each input."""
        asked = {} if self.parameters is None else vars(self.parameters)
        return is_small(self.inputs) and is_small([asked] * len(self.inputs))

    def check_inputs(self) -> None:
        check_count(self.inputs, self.limits)
        check_lists(self.inputs, self.parameters, self.limits)

    def rows(self) -> list[Row]:
        return self.predictor.rows(list(self.inputs))

    def encode(self) -> Encoded:
        rows = self.rows()
        # Checked before windows take time and memory.
        least = PAD_MULTIPLE * self.predictor.task.least_windows(rows, self.parameters)
        check_tokens(least, self.limits, at_least=True)
        return Encoded(rows, self.predictor.encode(rows, self.parameters))

    def check_windows(self, windows: Sequence[Window]) -> None:
        check_tokens(sum(map(padded_length, windows)), self.limits)
        check_candidates(sum(map(masks_of, windows)), self.all_parameters, self.limits)
        check_numbers(sum(self.predictor.task.numbers(windows, self._hidden_size)), self.limits)

    def has_few(self, scores: Sequence[np.ndarray]) -> bool:
        """Whether the scores are few enough for the event loop to turn them into answers itself."""
        return self.is_small and sum(each.size for each in scores) <= FEW_SCORES

    def decode(self, encoded: Encoded, scores: list[np.ndarray]) -> Decoded:
        task, windows = self.predictor.task, encoded.windows
        numbers = task.numbers(windows, self._hidden_size, scores, self.parameters)
        check_numbers(sum(numbers), self.limits)  # before the answers take their memory
        answers = self.predictor.decode(encoded.rows, windows, scores, self.parameters)
        cut = places_of(self.predictor.bundle.tokenizer, windows, MOST_CUT)
        return Decoded(answers, cut, numbers)

    @property
    def _hidden_size(self) -> int:
        return self.predictor.bundle.encoder_config.hidden_size


@dataclass(frozen=True)
class Lookup:
    """The rows of a request, and the answers to some of them that the cache has."""

    work: Work
    keys: list[bytes]
    """Key of each row."""
    cached: dict[bytes, CachedAnswer]
    missing: dict[bytes, Row]
    """The other rows, equal ones once."""

    @classmethod
    def of(cls, work: Work, digest: str, cache: AnswerCache) -> "Lookup":
        """Look up the rows of `work` in the cache. `digest` is the model's."""
        rows = work.rows()
        keys = keys_of(digest, work.predictor.task.name, work.all_parameters, rows)
        cached = cache.find(keys)
        rest = {key: row for key, row in zip(keys, rows, strict=True) if key not in cached}
        return cls(work, keys, cached, rest)

    @property
    def hits(self) -> int:
        """Number of rows that need not be computed."""
        return len(self.keys) - len(self.missing)

    @property
    def size_bytes(self) -> int:
        """Size of the cached answers; an answer counts once for every row that it is for."""
        return sum(self.cached[key].size_bytes for key in self.keys if key in self.cached)

    def answers(
        self, computed: Computed, cache: AnswerCache
    ) -> tuple[list[Any], list[CutPlace], int]:
        """Return the answers, where texts were cut, and how many tokens were read.

        Args:
            computed: the answers to the missing rows, which are added to the cache.
        """
        new = dict(zip(self.missing, entries_of(computed), strict=True))
        cache.keep({key: entry for key, entry in new.items() if entry.has_all_cuts})
        entries, limits = [self.cached.get(key) or new[key] for key in self.keys], self.work.limits
        # The limits of a request must not depend on what happens to be in the cache.
        check_tokens(sum(entry.padded_tokens for entry in entries), limits)
        masks = sum(entry.masks for entry in entries)
        check_candidates(masks, self.work.all_parameters, limits)
        check_numbers(sum(entry.numbers for entry in entries), limits)
        return *unpacked(entries), sum(entry.tokens for entry in entries)
