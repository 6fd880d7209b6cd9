"""Names of the sets that rows are divided into."""

from typing import Final

TRAIN: Final = "train"
SELECTION: Final = "selection"
"""Training rows that are kept out, to choose weights by."""
HELD_OUT: Final = "held_out"
"""Rows for measurement, used neither to train nor to select."""
