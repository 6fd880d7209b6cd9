"""Computes the scores of windows, for evaluation during training, for prediction and for the
server.

Here is the base class of backends, which does not import torch. `torch_scores` computes from
weights; the backends for graphs are in `inference.engines`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

import numpy as np

from bert_core.collation import Arrays, buckets, collate, laid_out_tokens
from bert_core.data.windows import Window
from bert_core.errors import FormatError

Precision = Literal["fp32", "bf16"]
"""Precision of the matrix products of a model that is computed from weights; parameters and losses
are in fp32."""


class Backend(ABC):
    """An engine that computes a model's scores. The model has a single objective."""

    engine: ClassVar[str]
    """Its name."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """Packages that it needs besides those of every backend."""
    precision: str
    """Precision of its matrix products."""

    def __init__(
        self, name: str, position_key: str | None, packed_from: float, budget_tokens: int
    ) -> None:
        """Keep what every engine needs.

        Args:
            name, position_key: those of the objective.
            packed_from: share of padding from which sequences are packed; 1 always pads.
            budget_tokens: most tokens per forward pass, padding included.
        """
        self.name, self.position_key = name, position_key
        self.packed_from, self.budget_tokens = packed_from, budget_tokens

    @property
    def encoder_key(self) -> Hashable:
        """Return a key that is equal for backends with the same encoder, so that one forward pass
        can serve them all."""
        return id(self)

    @abstractmethod
    def logits(self, batch: Arrays) -> np.ndarray:
        """Return the scores of `Objective.logits`, in fp32."""

    def joint_logits(
        self, backends: Sequence["Backend"], batches: Sequence[Arrays]
    ) -> Sequence[np.ndarray]:
        """Return the `logits` of each backend for its batch; see `joint_scores`."""
        return [each.logits(batch) for each, batch in zip(backends, batches, strict=True)]

    def scores(self, windows: Sequence[Window], pad_id: int) -> list[np.ndarray]:
        """Return the scores of each window in fp32, in order.

        Windows of similar length run together, so a batch of mixed lengths needs little padding. A
        window's scores have the shape (tokens, classes) if tokens are scored, (its length, 2) if
        spans are.
        Raises: FormatError if a score is NaN.
        """
        return self.joint_scores([self], [windows], pad_id)[0]

    def joint_scores(
        self, backends: Sequence["Backend"], windows: Sequence[Sequence[Window]], pad_id: int
    ) -> list[list[np.ndarray]]:
        """Return the `scores` of each backend for its windows, running the encoder once for all of
        them.

        Args:
            backends: backends with the same `encoder_key` as this one.
            windows: the windows of each backend, equally many; those at the same index have the
                same ids and segments.
        """
        scores = [[np.empty(0)] * len(own_windows) for own_windows in windows]
        for group in self._groups(windows[0]):
            chosen = [[own_windows[place] for place in group] for own_windows in windows]
            batches = [self._collated(part, pad_id) for part in chosen]
            logits = self.joint_logits(backends, batches)
            for backend, part, part_logits, own_scores in zip(
                backends, chosen, logits, scores, strict=True
            ):
                parts = backend.parts_of(part_logits, part)
                for place, window_scores in zip(group, parts, strict=True):
                    own_scores[place] = window_scores
        return scores

    def parts_of(self, logits: np.ndarray, windows: Sequence[Window]) -> Sequence[np.ndarray]:
        """Split a batch's scores by window. Raises: FormatError if a score is NaN."""
        if np.isnan(logits).any():
            raise FormatError(
                f"wanted numbers as scores of {self.name}, got NaN: the model's weights "
                "are damaged or too large; train it again, with a lower learning rate"
            )
        if self.position_key is not None:
            ends = np.cumsum([len(window.positions[self.position_key]) for window in windows])
            return np.split(logits, ends[:-1])
        if logits.ndim == 3:  # scores of every token, padding included
            return [row[: window.tokens] for row, window in zip(logits, windows, strict=True)]
        if len(logits) > len(windows):  # scores of every sequence
            return np.split(logits, np.cumsum([len(window.ids) for window in windows])[:-1])
        return list(logits)

    def computed_tokens(self, windows: Sequence[Window]) -> int:
        """Return how many tokens `scores` computes for these windows, padding included."""
        return sum(
            laid_out_tokens([windows[place] for place in group], self.packed_from)
            for group in self._groups(windows)
        )

    def _collated(self, windows: Sequence[Window], pad_id: int) -> Arrays:
        """Return the batch of windows that run together."""
        return collate(windows, pad_id, self.packed_from)

    def _groups(self, windows: Sequence[Window]) -> list[np.ndarray]:
        lengths = np.array([window.tokens for window in windows], dtype=np.int64)
        return buckets(lengths, self.budget_tokens)
