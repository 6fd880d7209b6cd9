"""Names of the sets that rows are divided into."""

from typing import Final

TRAIN: Final = "train"
SELECTION: Final = "selection"
"""Training rows that are kept out, to choose the weights by."""
HELD_OUT: Final = "held_out"
"""Rows that neither train nor select, to measure on."""
