"""Windows to scores, for evaluation during training, for prediction and for the server.

A backend computes them: here torch, from weights; those for graphs are in `engines`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from torch import Tensor

from bert_core.batches import buckets, collate, laid_out_tokens
from bert_core.data.windows import Window
from bert_core.errors import FormatError
from bert_core.objectives.base import Batch, Objective, ObjectiveModel

GPU_TOKENS, TOKENS_PER_THREAD = 8192, 1024
"""Most tokens, padding included, per forward pass on a GPU, and per thread on a CPU, whose cache
should hold a layer's activations."""

Precision = Literal["fp32", "bf16"]


class Backend(ABC):
    """What computes a model's scores. The model has one objective."""

    engine: ClassVar[str]
    """Its name."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """Packages that it needs besides torch."""
    precision: str
    """Of its matrix products."""

    def __init__(self, model: ObjectiveModel, packed_from: float, budget_tokens: int) -> None:
        """`model` defines the computation; its weights may be elsewhere (device `meta`)."""
        self.model, self.packed_from, self.budget_tokens = model, packed_from, budget_tokens
        ((self.name, objective),) = model.objectives.items()
        self.objective = cast("Objective", objective)

    @abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """The scores of `Objective.logits`, on the CPU and in fp32."""

    def scores(self, windows: Sequence[Window], pad_id: int) -> list[np.ndarray]:
        """The scores of each window in fp32, in order.

        Windows of similar length run together, so a batch of mixed lengths needs little padding.
        If tokens are scored, a window has (tokens, classes); if spans are, (its length, 2).
        Raises: FormatError if a score is NaN.
        """
        key = self.objective.position_key
        scores: list[np.ndarray] = [np.empty(0)] * len(windows)
        with torch.inference_mode():
            for group in self._groups(windows):
                chosen = [windows[place] for place in group]
                logits = self.logits(self._collated(chosen, pad_id)).numpy()
                if np.isnan(logits).any():
                    raise FormatError(
                        f"wanted numbers as scores of {self.name}, got NaN: the model's weights "
                        "are damaged or too large; train it again, with a lower learning rate"
                    )
                if key is None and logits.ndim == 3:  # of every token, padding included
                    parts = [its[: one.tokens] for its, one in zip(logits, chosen, strict=True)]
                elif key is None:
                    parts = list(logits)
                else:
                    ends = np.cumsum([len(window.positions[key]) for window in chosen])
                    parts = np.split(logits, ends[:-1])
                for place, part in zip(group, parts, strict=True):
                    scores[place] = part
        return scores

    def computed_tokens(self, windows: Sequence[Window]) -> int:
        """Tokens that `scores` computes for these windows, padding included."""
        return sum(
            laid_out_tokens([windows[place] for place in group], self.packed_from)
            for group in self._groups(windows)
        )

    def _collated(self, windows: Sequence[Window], pad_id: int) -> Batch:
        """The batch of windows that run together."""
        return collate(windows, pad_id, self.packed_from)

    def _groups(self, windows: Sequence[Window]) -> list[np.ndarray]:
        lengths = np.array([window.tokens for window in windows], dtype=np.int64)
        return buckets(lengths, self.budget_tokens)


class TorchBackend(Backend):
    """torch, on the device that the model's weights are on."""

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
            most_tokens: per forward pass, if memory allows fewer than would be fast.
            precision: `bf16` runs matrix products in bfloat16, with autocast.
        """
        self.precision = precision
        on_gpu = next(model.parameters()).device.type != "cpu"
        fast = GPU_TOKENS if on_gpu else TOKENS_PER_THREAD * torch.get_num_threads()
        super().__init__(model, packed_from, min(most_tokens, fast))

    def logits(self, batch: Batch) -> Tensor:
        device = next(self.model.parameters()).device
        batch = {entry: tensor.to(device) for entry, tensor in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.model.logits(batch)[self.name].float().cpu()


def scores_of(
    model: ObjectiveModel,
    windows: Sequence[Window],
    pad_id: int,
    *,
    packed_from: float = 1.0,
    most_tokens: int = GPU_TOKENS,
) -> list[np.ndarray]:
    """`Backend.scores` with torch."""
    return TorchBackend(model, packed_from, most_tokens).scores(windows, pad_id)
