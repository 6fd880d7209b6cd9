"""How good chosen labels are. Pure functions of label ids."""

import numpy as np
from jaxtyping import Int


def accuracy(predictions: Int[np.ndarray, "rows"], labels: Int[np.ndarray, "rows"]) -> float:
    """Share of rows whose prediction is their label; at least one row."""
    return float(np.mean(predictions == labels))


def macro_f1(predictions: Int[np.ndarray, "rows"], labels: Int[np.ndarray, "rows"]) -> float:
    """Mean of the classes' F1, each class alike however rare; at least one row.

    The classes are those that occur in either array. One that is never predicted counts 0.
    """
    # Imported here: a server that only answers pays neither its second nor its memory.
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, average="macro", zero_division=0))
