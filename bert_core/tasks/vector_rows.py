"""The rows that vectors are trained on: which loss they are for, and their labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bert_core.errors import ConfigError, CorpusError
from bert_core.objectives import VectorLoss
from bert_core.tasks.base import numbered
from bert_core.tasks.compared_texts import check_pairs, texts_of
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import numbers_of

RowKind = Literal["", "score", "scores"]
"""What rows have besides texts: a score of their pair, or a teacher's scores of all texts."""
WORDS: Mapping[RowKind, str] = {"": "none", "score": "a score", "scores": "a teacher's scores"}
LOSSES_OF: Mapping[RowKind, tuple[VectorLoss, ...]] = {
    "": ("contrastive",),
    "score": ("cosine",),
    "scores": ("kl", "margin_mse"),
}
"""The losses for each kind of rows, the default first."""


def kind_of(rows: Sequence[Row], check: Callable[[Row], Any]) -> RowKind:
    """Return the kind of these rows.

    Args:
        check: raises InputError for a row that does not fit.
    Raises: CorpusError if a row has no `text_pair`, does not fit, or is of another kind than the
        first.
    """
    check_pairs(rows)
    kinds: list[RowKind] = [
        "score" if row.get("score") is not None else "scores" if row.get("scores") else ""
        for row in rows
    ]
    for number, (row, kind) in enumerate(zip(rows, kinds, strict=True), 1):
        if kind != kinds[0]:
            raise CorpusError(
                f"row {number}: wanted {WORDS[kind or kinds[0]]} in every row or in none, row 1 "
                f"has {WORDS[kinds[0]]}: use separate files for the two kinds"
            )
        with numbered(number):
            check(row)
    return kinds[0]


def loss_of(
    kind: RowKind, options: Any, usual: Any, unread: Mapping[VectorLoss, tuple[str, ...]]
) -> VectorLoss:
    """Return the loss that rows of this kind train: that of the options, or the default one.

    Args:
        options, usual: the task's options, and their defaults.
        unread: loss → the options that it does not read.
    Raises: ConfigError for an option that the loss does not read; CorpusError if the rows are not
        for the loss of the options.
    """
    loss = options.loss if options.loss in LOSSES_OF[kind] else LOSSES_OF[kind][0]
    for name in unread.get(loss, ()):
        if getattr(options, name) != getattr(usual, name):
            raise ConfigError(
                f"options.{name}: wanted none with the loss {loss}, which the rows are for and "
                f"which does not use it, got {getattr(options, name)}: leave it out"
            )
    if options.loss not in (None, loss):
        has = f"have {WORDS[kind]}" if kind else "have no score"
        raise CorpusError(
            f"training rows: wanted rows for the loss {options.loss}, got rows that {has}, "
            f"which are for {' or '.join(LOSSES_OF[kind])}: leave the option out, or give other "
            "rows"
        )
    return loss


def labels_of(
    rows: Sequence[Row], kind: RowKind, highest_score: float | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yield for every row, for each of its texts, the similarity to the first text, or its score by
    a teacher, and a number that identifies the text.

    Args:
        highest_score: the score of texts with the same meaning.
    """
    texts = [texts_of(row) for row in rows]
    text_ids = numbers_of(text for row_texts in texts for text in row_texts)
    ends = np.cumsum([len(row_texts) for row_texts in texts])
    for row, row_ids in zip(rows, np.split(text_ids, ends[:-1]), strict=True):
        similarities = np.zeros(len(row_ids), dtype=np.float32)
        similarities[:2] = 1
        if kind == "score":
            similarities[1] = row["score"] / (highest_score or 1.0)
        elif kind == "scores":
            similarities[1:] = row["scores"]
        yield {"similarities": similarities, "texts": row_ids}
