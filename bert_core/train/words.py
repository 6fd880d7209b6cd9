"""Word embeddings of which the rows that are trained on read a part.

What labelled rows read is known before the first step, and seldom half of a vocabulary; the table
is half of a small encoder's weights, and more of one for many languages. What nobody reads has no
gradient, and an optimizer that goes through it all the same takes memory and time for it.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from bert_core.data.windows import Window
from bert_core.objectives.base import ObjectiveModel


def train_read_words(model: ObjectiveModel, windows: Iterable[Window], pad_id: int) -> None:
    """Train, of the word embeddings of `model`, those that `windows` read; before its optimizer is
    made. It can read no others then, but its state has all, and is that of the model as it was.

    A model that stays as it is, or scores all words, is left alone.

    Args:
        windows: all that the model will be shown.
        pad_id: what they are filled up with.
    """
    parts = model.encoder.embeddings
    scored = any(each.reads_words for each in model.objectives.values())  # if but when measured
    if scored or not parts.word_embeddings.weight.requires_grad:
        return
    read = np.zeros(parts.word_embeddings.num_embeddings, dtype=bool)
    read[[pad_id, model.encoder.config.embeddings.pad_token_id]] = True
    for window in windows:
        for ids in window.ids:
            read[ids] = True
    if not read.all():
        parts.word_embeddings = ReadWords(parts.word_embeddings, torch.from_numpy(read))


class ReadWords(nn.Embedding):
    """The embeddings that are read, and one of the others: of these AdamW moves every row by its
    decay alone, and as it moves the witness it would have moved all. State dicts have them all.
    """

    def __init__(self, table: nn.Embedding, read: Bool[Tensor, "vocab"]) -> None:
        """`read` is not True for all."""
        whole = table.weight.detach().cpu().clone()
        # The longest says best by how much it was shortened.
        lengths = whole.norm(dim=1)
        witness = lengths.masked_fill(read | ~lengths.isfinite(), -1.0).argmax()
        words = torch.cat([read.nonzero()[:, 0], witness[None]])
        places = torch.full((len(read),), len(words))  # where there is no row
        places[words[:-1]] = torch.arange(len(words) - 1)
        pad = table.padding_idx
        super().__init__(
            len(words),
            table.embedding_dim,
            padding_idx=None if pad is None else int(places[pad]),
            _weight=table.weight.detach()[words.to(table.weight.device)],
        )
        self._whole, self._words, self._places = whole, words, places
        self.weight.table = self  # type: ignore[attr-defined]  # for its moments

    def forward(self, input_ids: Int[Tensor, "*tokens"]) -> Float[Tensor, "*tokens embedding"]:
        """Raises: IndexError, on a CPU, of a word that is not among those that are read."""
        if self._places.device != input_ids.device:
            self._places = self._places.to(input_ids.device)
        places = self._places[input_ids]
        return functional.embedding(places, self.weight, self.padding_idx, sparse=self.sparse)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        rows = self.weight.detach().cpu()
        before, after = self._whole[self._words[-1]].double(), rows[-1].double()
        left = float(after @ before) / (float(before @ before) or 1.0)
        destination[f"{prefix}weight"] = (self._whole * left).index_copy_(0, self._words, rows)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        key = f"{prefix}weight"
        given = state_dict.get(key)  # of another shape it is refused as it came
        whole = given is not None and given.shape == self._whole.shape
        rows = {} if given is None else {key: given[self._words] if whole else given}
        super()._load_from_state_dict(rows, prefix, *args)

    def moments_of_all(self, moments: Float[Tensor, "read embedding"]) -> Tensor:
        """With those of the words that are not read, which have none; on the CPU."""
        whole = torch.zeros(self._whole.shape, dtype=moments.dtype)
        return whole.index_copy_(0, self._words[:-1], moments[:-1].cpu())

    def moments_of_read(self, moments: Float[Tensor, "vocab embedding"]) -> Tensor:
        """The reverse."""
        return moments[self._words]


def table_of(weight: Tensor) -> ReadWords | None:
    """The table whose weight it is, where it is one of words that are read."""
    return getattr(weight, "table", None)
