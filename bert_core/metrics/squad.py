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
    """Return an answer in the form in which answers are compared."""
    words = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split())


def exact_match(answer: str, truths: Sequence[str], *, no_answer: bool = False) -> float:
    """Return 1 if the answer is one of `truths`, the accepted answers, otherwise 0. The empty text
    means "no answer".

    Args:
        no_answer: whether to follow the rules of SQuAD 2.0, which ignore an accepted answer that is
            empty after normalization, such as a single article.
    """
    return max(float(normalized(answer) == truth) for truth in _compared(truths, no_answer))


def token_f1(answer: str, truths: Sequence[str], *, no_answer: bool = False) -> float:
    """Return the highest F1 between the answer's words and those of any of `truths`.

    `truths` and `no_answer` are as in `exact_match`. An answer without words scores 0, except if
    "no answer" is right: then it scores 1.
    """
    words = normalized(answer).split()
    compared = _compared(truths, no_answer)
    if compared == [""] and (no_answer or not truths):
        return float(not words)
    return max(_f1(words, truth.split()) for truth in compared)


def _compared(truths: Sequence[str], no_answer: bool) -> list[str]:
    """Return the accepted answers in the form in which they are compared; a single empty text if
    there are none."""
    forms = map(normalized, truths)
    return [form for form in forms if form or not no_answer] or [""]


def _f1(predicted: list[str], truth: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(truth)).values())
    return 2 * common / (len(predicted) + len(truth)) if common else 0.0


def squad_metrics(columns: Mapping[str, Float[np.ndarray, "rows"]]) -> dict[str, float]:
    """Return `exact_match` and `f1` over all rows. If some questions are unanswerable, also for
    answerable and unanswerable questions separately, and at the best threshold.

    `best_f1` and `best_exact_match` are the values at the best threshold on these rows: a question
    counts as unanswerable if the answer's advantage over "no answer" is not above it.

    Args:
        columns: `exact_match` and `f1` of the answer as given, and `has_answer`; from a model that
            may give no answer also `answered_exact_match` and `answered_f1` of the best non-empty
            answer, and its `advantage` over "no answer".
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
    """Return the highest mean score over all thresholds: the rows with an advantage above the
    threshold are answered, the others are not."""
    order = np.argsort(-advantage, kind="stable")
    gains = np.where(has, score, -1.0)[order]
    sums = (~has).sum() + np.concatenate([[0.0], np.cumsum(gains)])
    # Rows with equal advantage are on the same side of any threshold.
    ranked = advantage[order]
    possible = np.concatenate([[True], ranked[1:] != ranked[:-1], [True]])
    return float(sums[possible].max() / len(score))
