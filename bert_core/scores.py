"""Windows to scores: what evaluation while training, prediction and server all run.

What computes is a backend: here torch, from weights; `graph` has the other.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from bert_core.batches import buckets, collate
from bert_core.data.windows import Window
from bert_core.errors import FormatError
from bert_core.objectives.base import Batch, Objective, ObjectiveModel

GPU_TOKENS, TOKENS_PER_THREAD = 8192, 1024
"""Most tokens, padding included, of one forward pass on a GPU, and for each thread of a CPU, whose
cache is to hold what a layer makes of them."""


class Backend(ABC):
    """What computes a model's scores. The model has one objective."""

    requirements: ClassVar[tuple[str, ...]] = ()
    """Packages that it needs beside torch."""

    def __init__(self, model: ObjectiveModel, packed_from: float, budget_tokens: int) -> None:
        """`model` says what is computed; its weights may be elsewhere (device `meta`)."""
        self.model, self.packed_from, self.budget_tokens = model, packed_from, budget_tokens
        ((self.name, objective),) = model.objectives.items()
        self.objective = cast("Objective", objective)

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """The scores of `Objective.logits`, on the CPU and in fp32."""

    def scores(self, windows: Sequence[Window], pad_id: int) -> list[np.ndarray]:
        """The scores of each window in fp32, in order.

        Windows of like length run together, so a batch of mixed lengths spends little on padding.
        Where tokens are scored, a window has (tokens, classes); where spans are, (its length, 2).
        Raises: FormatError if a score is NaN.
        """
        key = self.objective.position_key
        scores: list[np.ndarray] = [np.empty(0)] * len(windows)
        with torch.inference_mode():
            lengths = np.array([window.tokens for window in windows], dtype=np.int64)
            for group in buckets(lengths, self.budget_tokens):
                chosen = [windows[place] for place in group]
                found = self.logits(collate(chosen, pad_id, self.packed_from)).numpy()
                if np.isnan(found).any():
                    raise FormatError(
                        f"wanted numbers as scores of {self.name}, the model gave NaN: its weights "
                        "are damaged or too large; train it again, at a lower learning rate"
                    )
                if key is None and found.ndim == 3:  # of every token of a row, padding too
                    parts = [its[: one.tokens] for its, one in zip(found, chosen, strict=True)]
                elif key is None:
                    parts = list(found)
                else:
                    ends = np.cumsum([len(window.positions[key]) for window in chosen])
                    parts = np.split(found, ends[:-1])
                for place, part in zip(group, parts, strict=True):
                    scores[place] = part
        return scores


class TorchBackend(Backend):
    """torch, on the device that the model's weights are on."""

    def __init__(
        self, model: ObjectiveModel, packed_from: float = 1.0, most_tokens: int = GPU_TOKENS
    ) -> None:
        """`most_tokens`: of one forward pass, where memory allows fewer than would be fast."""
        on_gpu = next(model.parameters()).device.type != "cpu"
        fast = GPU_TOKENS if on_gpu else TOKENS_PER_THREAD * torch.get_num_threads()
        super().__init__(model, packed_from, min(most_tokens, fast))

    def logits(self, batch: Batch) -> Tensor:
        device = next(self.model.parameters()).device
        batch = {entry: tensor.to(device) for entry, tensor in batch.items()}
        return self.model.logits(batch)[self.name].float().cpu()


def scores_of(
    model: ObjectiveModel,
    windows: Sequence[Window],
    pad_id: int,
    *,
    packed_from: float = 1.0,
    most_tokens: int = GPU_TOKENS,
) -> list[np.ndarray]:
    """`Backend.scores` by torch."""
    return TorchBackend(model, packed_from, most_tokens).scores(windows, pad_id)
