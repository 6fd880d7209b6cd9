"""SQuAD's exact match and F1, by its own rules (Rajpurkar et al. 2016, section 6.1; 2018).

Text is compared in lower case, without punctuation or the articles a, an and the, and with single
spaces. Pure functions.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """An answer in the form in which answers are compared."""
    words = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split())


def exact_match(answer: str, truths: Sequence[str], *, no_answer: bool = False) -> float:
    """1 if the answer is one of `truths`, the right ones; no answer is the empty text.

    Args:
        no_answer: follow the rules of 2.0, which ignore a right answer that is only an article.
    """
    return max(float(normalized(answer) == truth) for truth in _compared(truths, no_answer))


def token_f1(answer: str, truths: Sequence[str], *, no_answer: bool = False) -> float:
    """The best F1 of the answer's words with those of one of `truths`.

    `truths` and `no_answer` are as in `exact_match`. An answer without words scores 0, except where
    no answer is right: there it scores 1.
    """
    words = normalized(answer).split()
    compared = _compared(truths, no_answer)
    if compared == [""] and (no_answer or not truths):
        return float(not words)
    return max(_f1(words, truth.split()) for truth in compared)


def _compared(truths: Sequence[str], no_answer: bool) -> list[str]:
    """The right answers, in the form compared; a single empty one if there are none."""
    forms = map(normalized, truths)
    return [form for form in forms if form or not no_answer] or [""]


def _f1(predicted: list[str], truth: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(truth)).values())
    return 2 * common / (len(predicted) + len(truth)) if common else 0.0


def squad_metrics(columns: Mapping[str, Float[np.ndarray, "rows"]]) -> dict[str, float]:
    """`exact_match` and `f1` over all rows; with unanswerable questions also for each kind.

    Then `best_f1` and `best_exact_match` are those at the best threshold on these rows: a question
    counts as unanswerable if the answer's advantage over no answer is not above it.

    Args:
        columns: `exact_match` and `f1` of the answer as given, and `has_answer`; from a model that
            may give none also `answered_exact_match` and `answered_f1` of the best non-empty
            answer, and its `advantage` over no answer.
    """
    has = columns["has_answer"] > 0
    metrics = {name: float(columns[name].mean()) for name in ("exact_match", "f1")}
    if has.all():
        return metrics
    for kind, rows in (("answer", has), ("no_answer", ~has)):
        for name in ("exact_match", "f1") if rows.any() else ():
            metrics[f"{kind}_{name}"] = float(columns[name][rows].mean())
    for name in ("exact_match", "f1") if "advantage" in columns else ():
        metrics[f"best_{name}"] = _at_best_threshold(
            columns["advantage"], columns[f"answered_{name}"], has
        )
    return metrics


def _at_best_threshold(advantage: np.ndarray, score: np.ndarray, has: np.ndarray) -> float:
    """The best mean if the rows with the most advantage, any number of them, are answered."""
    order = np.argsort(-advantage, kind="stable")
    gains = np.where(has, score, -1.0)[order]
    sums = (~has).sum() + np.concatenate([[0.0], np.cumsum(gains)])
    # Rows with equal advantage are on the same side of any threshold.
    ranked = advantage[order]
    possible = np.concatenate([[True], ranked[1:] != ranked[:-1], [True]])
    return float(sums[possible].max() / len(score))
