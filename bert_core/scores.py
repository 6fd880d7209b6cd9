"""Windows through a model: what evaluation while training, prediction and server all run."""

from collections.abc import Sequence

import numpy as np
import torch

from bert_core.batches import buckets, collate
from bert_core.data.windows import Window
from bert_core.objectives.base import ObjectiveModel

BUDGET_TOKENS = 8192
"""Most tokens, padding included, of one forward pass: what a CPU's cache and a GPU both like."""


def scores_of(
    model: ObjectiveModel,
    windows: Sequence[Window],
    pad_id: int,
    *,
    budget_tokens: int = BUDGET_TOKENS,
    packed_from: float = 1.0,
) -> list[np.ndarray]:
    """The scores of each window in fp32, in order; the model has one objective.

    Windows of like length run together, so a batch of mixed lengths spends little on padding.
    Where tokens are scored, a window has (tokens, classes); where spans are, (S, 2), S being at
    least its length.
    """
    (name,) = model.objectives
    key = model.objectives[name].position_key
    device = next(model.parameters()).device
    scores: list[np.ndarray] = [np.empty(0)] * len(windows)
    with torch.inference_mode():
        lengths = np.array([window.tokens for window in windows], dtype=np.int64)
        for group in buckets(lengths, budget_tokens):
            chosen = [windows[place] for place in group]
            batch = collate(chosen, pad_id, packed_from)
            batch = {entry: tensor.to(device) for entry, tensor in batch.items()}
            found = model.logits(batch)[name].float().cpu().numpy()
            if key is None:
                parts = list(found)
            else:
                ends = np.cumsum([len(window.positions[key]) for window in chosen])
                parts = np.split(found, ends[:-1])
            for place, part in zip(group, parts, strict=True):
                scores[place] = part
    return scores
