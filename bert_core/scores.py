"""Computes the scores of windows, for evaluation during training, for prediction and for the
server.

Here is the base class of backends, and torch, which computes from weights; the backends for graphs
are in `engines`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor

from bert_core.batches import buckets, collate, laid_out_tokens
from bert_core.data.windows import Window
from bert_core.errors import FormatError
from bert_core.objectives.base import Batch, Objective, ObjectiveModel, encoded_once

GPU_TOKENS, TOKENS_PER_THREAD = 8192, 1024
"""Most tokens, padding included, per forward pass on a GPU, and per thread on a CPU, whose cache
should hold a layer's activations."""

Precision = Literal["fp32", "bf16"]


class Backend(ABC):
    """An engine that computes a model's scores. The model has a single objective."""

    engine: ClassVar[str]
    """Its name."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """Packages that it needs besides torch."""
    precision: str
    """Precision of its matrix products."""

    def __init__(self, model: ObjectiveModel, packed_from: float, budget_tokens: int) -> None:
        """Keep what every engine needs.

        Args:
            model: defines the computation; its weights may be elsewhere (device `meta`).
            packed_from: share of padding from which sequences are packed; 1 always pads.
            budget_tokens: most tokens per forward pass, padding included.
        """
        self.model, self.packed_from, self.budget_tokens = model, packed_from, budget_tokens
        ((self.name, objective),) = model.objectives.items()
        self.objective = cast("Objective", objective)

    @property
    def encoder_key(self) -> Hashable:
        """Return a key that is equal for backends with the same encoder, so that one forward pass
        can serve them all."""
        return id(self)

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """Return the scores of `Objective.logits`, on the CPU and in fp32."""

    def joint_logits(
        self, backends: Sequence["Backend"], batches: Sequence[Batch]
    ) -> Sequence[Tensor]:
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
        with torch.inference_mode():
            for group in self._groups(windows[0]):
                chosen = [[own_windows[place] for place in group] for own_windows in windows]
                batches = [self._collated(part, pad_id) for part in chosen]
                logits = self.joint_logits(backends, batches)
                for backend, part, part_logits, own_scores in zip(
                    backends, chosen, logits, scores, strict=True
                ):
                    parts = backend._parts(part_logits, part)
                    for place, window_scores in zip(group, parts, strict=True):
                        own_scores[place] = window_scores
        return scores

    def _parts(self, scores: Tensor, windows: Sequence[Window]) -> Sequence[np.ndarray]:
        """Split a batch's scores by window. Raises: FormatError if a score is NaN."""
        logits, key = scores.numpy(), self.objective.position_key
        if np.isnan(logits).any():
            raise FormatError(
                f"wanted numbers as scores of {self.name}, got NaN: the model's weights "
                "are damaged or too large; train it again, with a lower learning rate"
            )
        if key is not None:
            ends = np.cumsum([len(window.positions[key]) for window in windows])
            return np.split(logits, ends[:-1])
        if logits.ndim == 3:  # scores of every token, padding included
            return [row[: window.tokens] for row, window in zip(logits, windows, strict=True)]
        return list(logits)

    def computed_tokens(self, windows: Sequence[Window]) -> int:
        """Return how many tokens `scores` computes for these windows, padding included."""
        return sum(
            laid_out_tokens([windows[place] for place in group], self.packed_from)
            for group in self._groups(windows)
        )

    def _collated(self, windows: Sequence[Window], pad_id: int) -> Batch:
        """Return the batch of windows that run together."""
        return collate(windows, pad_id, self.packed_from)

    def _groups(self, windows: Sequence[Window]) -> list[np.ndarray]:
        lengths = np.array([window.tokens for window in windows], dtype=np.int64)
        return buckets(lengths, self.budget_tokens)


class TorchBackend(Backend):
    """Computes with torch, on the device that the model's weights are on."""

    engine: ClassVar[str] = "torch"

    def __init__(
        self,
        model: ObjectiveModel,
        packed_from: float = 1.0,
        most_tokens: int = GPU_TOKENS,
        precision: Precision = "fp32",
    ) -> None:
        """Compute with a model's weights.

        Args:
            packed_from: share of padding from which sequences are packed; 1 always pads.
            most_tokens: most tokens per forward pass, if memory allows fewer than would be fast.
            precision: `bf16` runs matrix products in bfloat16, with autocast.
        """
        self.precision = precision
        on_gpu = next(model.parameters()).device.type != "cpu"
        fast = GPU_TOKENS if on_gpu else TOKENS_PER_THREAD * torch.get_num_threads()
        super().__init__(model, packed_from, min(most_tokens, fast))

    @property
    def encoder_key(self) -> Hashable:
        return id(self.model.encoder.layers), self.precision

    def logits(self, batch: Batch) -> Tensor:
        return self.joint_logits([self], [batch])[0]

    def joint_logits(
        self, backends: Sequence[Backend], batches: Sequence[Batch]
    ) -> Sequence[Tensor]:
        device = next(self.model.parameters()).device
        readers = [
            (each.model, each.objective, {entry: one.to(device) for entry, one in batch.items()})
            for each, batch in zip(backends, batches, strict=True)
        ]
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return [
                part.logits(read, batch, model.word_embeddings).float().cpu()
                for (model, part, batch), read in zip(readers, encoded_once(readers), strict=True)
            ]


def scores_of(
    model: ObjectiveModel,
    windows: Sequence[Window],
    pad_id: int,
    *,
    packed_from: float = 1.0,
    most_tokens: int = GPU_TOKENS,
) -> list[np.ndarray]:
    """Return `Backend.scores`, computed with torch."""
    return TorchBackend(model, packed_from, most_tokens).scores(windows, pad_id)
