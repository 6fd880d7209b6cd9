"""Training objectives: loss sums and counts, never means. Importing this package alone does not
import torch."""

from typing import Literal

IGNORE = -100
"""Label of a token that is scored but not in the loss, because none of the model's labels is right
for it."""
VectorLoss = Literal["contrastive", "cosine", "kl", "margin_mse"]
"""Losses of `vector_losses.LOSSES`."""
ListLoss = Literal["listnet", "lambda"]
"""Losses of `listwise.LOSSES`."""
EntryPooling = Literal["max", "sum"]
"""How a row's tokens share an entry of a sparse vector."""
EntryWeight = Literal["relu", "log1p_relu"]
"""How a score becomes the weight of an entry: log(1 + ReLU(score)), or the logarithm twice."""
