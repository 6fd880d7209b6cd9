"""What tasks over one text or a pair of texts share: their input and its window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.windows import Window, ids_of, joined
from bert_core.tasks.base import CuttingParameters
from bert_core.tasks.rows import Row


@dataclass(frozen=True, kw_only=True)
class TextInput:
    """A text, or a pair of texts."""

    text: str
    """The first text."""
    text_pair: str | None = None
    """The second one, where the task is about two."""


def text_windows(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    max_length: int,
    labels: Mapping[str, Shaped[np.ndarray, "rows ..."]],
    parameters: CuttingParameters | None = None,
) -> list[Window]:
    """A window a row: `[CLS] text [SEP]`, or `[CLS] text [SEP] text_pair [SEP]`.

    Args:
        labels: entry of the batch → the rows' labels; nothing where there are none.
        parameters: None cuts.
    """
    limit = max_length if parameters is None or parameters.truncation else None
    first = ids_of(tokenizer, [row["text"] for row in rows])
    pairs = [row.get("text_pair") for row in rows]
    second = iter(ids_of(tokenizer, [text for text in pairs if text is not None]))
    windows = []
    for number, (ids, pair) in enumerate(zip(first, pairs, strict=True)):
        sequence = joined(tokenizer, ids, None if pair is None else next(second), limit)
        windows.append(
            Window(
                row=number,
                ids=(sequence.ids,),
                segment_b_start=(sequence.segment_b_start,),
                labels={name: each[number : number + 1] for name, each in labels.items()},
                is_cut=sequence.is_cut,
            )
        )
    return windows


def softmax(logits: Float[np.ndarray, "*rows classes"]) -> Float[np.ndarray, "*rows classes"]:
    """Shares of the classes, fp64."""
    wide = logits.astype(np.float64)
    shifted = np.exp(wide - wide.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
