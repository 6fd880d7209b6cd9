"""How good chosen labels are, by scikit-learn. Pure functions of label ids.

scikit-learn is imported where it is used: a server that only answers pays neither its second nor
its memory.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def single_label_metrics(
    predicted: Int[np.ndarray, "rows"],
    labels: Int[np.ndarray, "rows"],
    *,
    num_labels: int,
    out_of_scope: int | None = None,
) -> dict[str, float]:
    """`accuracy`, `macro_f1` and `matthews`; of two labels also `f1`, that of the second.

    `macro_f1` is over the labels that occur in either array; one that is never predicted counts 0.
    `matthews` is 0 where all rows have one label (Gorodkin 2004 for more than two labels).

    Args:
        out_of_scope: id of the label of rows that belong to no other; adds `in_scope_accuracy`,
            over the rows of other labels, and `out_of_scope_recall` (Larson et al. 2019, section
            4.2), each where there are such rows.
    """
    from sklearn.metrics import f1_score, matthews_corrcoef

    varies = len(np.union1d(predicted, labels)) > 1
    metrics = {
        "accuracy": float(np.mean(predicted == labels)),
        "macro_f1": float(f1_score(labels, predicted, average="macro", zero_division=0)),
        "matthews": float(matthews_corrcoef(labels, predicted)) if varies else 0.0,
    }
    if num_labels == 2:
        metrics["f1"] = float(f1_score(labels == 1, predicted == 1, zero_division=0))
    if out_of_scope is not None:
        outside = labels == out_of_scope
        for name, rows in (("in_scope_accuracy", ~outside), ("out_of_scope_recall", outside)):
            if rows.any():
                metrics[name] = float(np.mean(predicted[rows] == labels[rows]))
    return metrics


def multi_label_metrics(
    predicted: Int[np.ndarray, "rows labels"], labels: Int[np.ndarray, "rows labels"]
) -> dict[str, float]:
    """`accuracy` (rows with exactly their labels), `micro_f1` and `macro_f1` of 0 and 1 a label.

    A label that is neither predicted nor right counts 0 in `macro_f1`.
    """
    from sklearn.metrics import accuracy_score, f1_score

    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "micro_f1": float(f1_score(labels, predicted, average="micro", zero_division=0)),
        "macro_f1": float(f1_score(labels, predicted, average="macro", zero_division=0)),
    }


def by_label(
    predicted: Int[np.ndarray, "rows *labels"],
    labels: Int[np.ndarray, "rows *labels"],
    names: Sequence[str],
) -> dict[str, dict[str, float]]:
    """`precision`, `recall`, `f1` and `support` (rows that have it) of each label by itself.

    What has nothing to divide by is 0.

    Args:
        predicted: a label's id a row, or 0 and 1 a label; so are `labels`.
    """
    from sklearn.metrics import precision_recall_fscore_support

    found = {}
    for index, name in enumerate(names):
        given, wanted = (
            ids == index if ids.ndim == 1 else ids[:, index] > 0 for ids in (predicted, labels)
        )
        precision, recall, f1, _ = precision_recall_fscore_support(
            wanted, given, average="binary", zero_division=0
        )
        found[name] = {
            "precision": float(precision),
            "recall": float(recall),
            "f1": float(f1),
            "support": int(wanted.sum()),
        }
    return found


def wrong_labels(
    predicted: Int[np.ndarray, "rows *labels"], labels: Int[np.ndarray, "rows *labels"]
) -> Int[np.ndarray, "rows"]:
    """How many labels of each row are wrong; where a row has one, 1 or 0."""
    return (predicted != labels).reshape(len(labels), -1).sum(axis=1)
