"""Training objectives: loss sums and counts, never means. Importing this package alone does not
import torch."""

IGNORE = -100
"""Label of a token that is scored but not in the loss, because none of the model's labels is right
for it."""
