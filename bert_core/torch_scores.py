"""Computes the scores of windows from weights, with torch."""

from collections.abc import Hashable, Sequence
from typing import ClassVar, cast

import numpy as np
import torch

from bert_core.batches import tensors
from bert_core.collation import Arrays
from bert_core.data.windows import Window
from bert_core.objectives.base import Objective, ObjectiveModel, encoded_once
from bert_core.scores import Backend, Precision

GPU_TOKENS, TOKENS_PER_THREAD = 8192, 1024
"""Most tokens, padding included, per forward pass on a GPU, and per thread on a CPU, whose cache
should hold a layer's activations."""


class TorchBackend(Backend):
    """Computes with torch, on the device that the model's weights are on."""

    engine: ClassVar[str] = "torch"
    requirements: ClassVar[tuple[str, ...]] = ("torch",)

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
        self.model, self.precision = model, precision
        ((name, objective),) = model.objectives.items()
        self.objective = cast("Objective", objective)
        on_gpu = next(model.parameters()).device.type != "cpu"
        fast = GPU_TOKENS if on_gpu else TOKENS_PER_THREAD * torch.get_num_threads()
        super().__init__(name, self.objective.position_key, packed_from, min(most_tokens, fast))

    @property
    def encoder_key(self) -> Hashable:
        return id(self.model.encoder.layers), self.precision

    def logits(self, batch: Arrays) -> np.ndarray:
        return self.joint_logits([self], [batch])[0]

    def joint_logits(
        self, backends: Sequence[Backend], batches: Sequence[Arrays]
    ) -> Sequence[np.ndarray]:
        device = next(self.model.parameters()).device
        heads = cast("Sequence[TorchBackend]", backends)
        readers = [
            (
                each.model,
                each.objective,
                {entry: one.to(device) for entry, one in tensors(batch).items()},
            )
            for each, batch in zip(heads, batches, strict=True)
        ]
        with (
            torch.inference_mode(),
            torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16"),
        ):
            return [
                part.logits(read, batch, model.word_embeddings).float().cpu().numpy()
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
