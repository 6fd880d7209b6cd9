"""What is minimised: sums and counts, never means. Importing this package alone brings no torch."""

IGNORE = -100
"""Label of a token that is scored but has no loss, since no label of the model is right for it."""
