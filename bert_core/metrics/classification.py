"""Metrics of predicted labels: pure functions of label ids.

They use NumPy, since a bootstrap calls them thousands of times: scikit-learn 1.9 spends longer
checking its arguments than counting, and an evaluation of 401 rows took 18 s instead of 2.
"""

import re
from collections.abc import Mapping, Sequence
from typing import overload

import numpy as np
from jaxtyping import Bool, Int

LONGEST_NAME = 100
"""Characters of a label in the name of a metric."""
_POSITIVE: dict[tuple[str, ...], str] = {
    ("0", "1"): "1",
    ("False", "True"): "True",
    ("false", "true"): "true",
}
"""Two labels of which it is known which one is asked for, as in scikit-learn."""


def f1_names(labels: Sequence[str], positive: str | None = None) -> dict[int, str]:
    """Return label id → the name of its F1 metric (`f1_of_spam`), for the positive label.

    If `positive` is None and there are two labels, the positive label is 1 (of 0 and 1) or true (of
    true and false); of two other labels either may be, so both get a name. Empty if there are more
    labels.
    """
    if positive is None and len(labels) == 2:
        positive = _POSITIVE.get(tuple(sorted(labels)))
        asked = list(labels) if positive is None else [positive]
    else:
        asked = [] if positive is None else [positive]
    names: dict[int, str] = {}
    for label in asked:
        # MLflow takes no other characters.
        name = "f1_of_" + re.sub(r"[^\w. -]", "_", label)[:LONGEST_NAME]
        place = list(labels).index(label)
        names[place] = f"{name}_{place}" if name in names.values() else name
    return names


def single_label_metrics(
    predicted: Int[np.ndarray, "rows"],
    labels: Int[np.ndarray, "rows"],
    *,
    f1_of: Mapping[int, str] | None = None,
    out_of_scope: int | None = None,
) -> dict[str, float]:
    """Return `accuracy`, `macro_f1`, `matthews`, and the F1 of single labels.

    `macro_f1` is over the labels that occur in either array; a label that is never predicted counts
    as 0. `matthews` is 0 if all rows have the same label (Gorodkin 2004 for more than two labels).

    Args:
        f1_of: label id → the name of its F1, from `f1_names`.
        out_of_scope: id of the label for rows that belong to no other; adds `in_scope_accuracy`,
            over the rows of other labels, and `out_of_scope_recall` (Larson et al. 2019, section
            4.2), each if there are such rows.
    """
    ids, places = np.unique(np.concatenate([predicted, labels]), return_inverse=True)
    guesses, support = (np.bincount(part, minlength=len(ids)) for part in np.split(places, 2))
    is_right = predicted == labels
    hits = np.bincount(places[: len(labels)][is_right], minlength=len(ids))
    f1 = _f1(hits, guesses, support)
    metrics = {
        "accuracy": float(np.mean(is_right)),
        "macro_f1": float(np.mean(f1)),
        "matthews": _matthews(hits, guesses, support),
    }
    metrics |= {name: float(f1[ids == label].sum()) for label, name in (f1_of or {}).items()}
    if out_of_scope is not None:
        outside = labels == out_of_scope
        for name, rows in (("in_scope_accuracy", ~outside), ("out_of_scope_recall", outside)):
            if rows.any():
                metrics[name] = float(np.mean(predicted[rows] == labels[rows]))
    return metrics


def selective_metrics(
    predicted: Int[np.ndarray, "rows"],
    label: Int[np.ndarray, "rows"],
    answered: Bool[np.ndarray, "rows"],
) -> dict[str, float]:
    """Return `coverage`, the share of rows that are answered, and `answered_accuracy`, the share of
    those whose answer is right (El-Yaniv and Wiener 2010); 0 if none is answered.

    Args:
        answered: whether the model answers a row rather than abstains.
    """
    right = predicted[answered] == label[answered]
    return {
        "coverage": float(np.mean(answered)),
        "answered_accuracy": float(np.mean(right)) if len(right) else 0.0,
    }


def multi_label_metrics(
    predicted: Int[np.ndarray, "rows labels"],
    labels: Int[np.ndarray, "rows labels"],
    *,
    f1_of: Mapping[int, str] | None = None,
) -> dict[str, float]:
    """Return `accuracy` (the share of rows with exactly the right labels), `micro_f1`, `macro_f1`,
    and the F1 of single labels.

    A label that is neither predicted nor right in any row counts as 0 in `macro_f1`.

    Args:
        predicted: 0 or 1 per label; so are `labels`.
        f1_of: label id → the name of its F1, from `f1_names`.
    """
    hits, guesses, support = (
        (table > 0).sum(axis=0) for table in (predicted * labels, predicted, labels)
    )
    f1 = _f1(hits, guesses, support)
    return {
        "accuracy": float(np.mean((predicted == labels).all(axis=1))),
        "micro_f1": _f1(int(hits.sum()), int(guesses.sum()), int(support.sum())),
        "macro_f1": float(np.mean(f1)),
        **{name: float(f1[label]) for label, name in (f1_of or {}).items()},
    }


def by_label(
    predicted: Int[np.ndarray, "rows *labels"],
    labels: Int[np.ndarray, "rows *labels"],
    names: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Return `precision`, `recall`, `f1` and `support` (rows that have it) of each label.

    A ratio is 0 if its denominator is 0.

    Args:
        predicted: one label id per row, or 0 or 1 per label; so are `labels`.
    """
    metrics = {}
    for index, name in enumerate(names):
        is_guessed, is_right = (
            ids == index if ids.ndim == 1 else ids[:, index] > 0 for ids in (predicted, labels)
        )
        hits, guesses, support = (
            int(rows.sum()) for rows in (is_guessed & is_right, is_guessed, is_right)
        )
        metrics[name] = {
            "precision": hits / guesses if guesses else 0.0,
            "recall": hits / support if support else 0.0,
            "f1": _f1(hits, guesses, support),
            "support": support,
        }
    return metrics


@overload
def _f1(hits: int, guesses: int, support: int) -> float: ...
@overload
def _f1(hits: np.ndarray, guesses: np.ndarray, support: np.ndarray) -> np.ndarray: ...
def _f1(
    hits: int | np.ndarray, guesses: int | np.ndarray, support: int | np.ndarray
) -> float | np.ndarray:
    """Return F1 from numbers of rows, or arrays of them: rows for which a label is predicted
    correctly, rows for which it is predicted, and rows that have it. 0 if all are 0."""
    f1 = 2 * hits / np.maximum(guesses + support, 1)
    return f1 if isinstance(f1, np.ndarray) else float(f1)


def _matthews(hits: np.ndarray, guesses: np.ndarray, support: np.ndarray) -> float:
    """Return the Matthews correlation coefficient (Gorodkin 2004, equation 8) from the same counts
    per label."""
    hits, guesses, support = (counts.astype(float) for counts in (hits, guesses, support))
    rows = support.sum()
    below = (rows**2 - guesses @ guesses) * (rows**2 - support @ support)
    return float((hits.sum() * rows - guesses @ support) / np.sqrt(below)) if below else 0.0


def wrong_labels(
    predicted: Int[np.ndarray, "rows *labels"], labels: Int[np.ndarray, "rows *labels"]
) -> Int[np.ndarray, "rows"]:
    """Return the number of wrong labels of each row; 0 or 1 if rows have one label each."""
    return (predicted != labels).reshape(len(labels), -1).sum(axis=1)
