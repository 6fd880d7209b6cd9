"""Word embeddings restricted to the words that the training rows read.

The words that labelled rows read are known before the first step and are seldom half of the
vocabulary, while the table is half of a small encoder's weights, and more of a multilingual one's.
Unread words have no gradient, but would cost the optimizer memory and time.
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
    """Train only the word embeddings that `windows` read; call this before creating the optimizer,
    which must be AdamW (`build_optimizer` checks it).

    The model can then read no other words, but its state dict has all of them, as if all had been
    trained. Does nothing if the encoder is frozen, or if an objective scores all words.

    Args:
        windows: all windows that the model will read.
        pad_id: the id that pads them.
    """
    parts = model.encoder.embeddings
    # This includes objectives that score all words only when they are measured.
    scored = any(objective.reads_words for objective in model.objectives.values())
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
    """The embeddings that are read, plus that of one unread word, the witness: AdamW changes unread
    rows by weight decay only, by the same factor as the witness. State dicts have all rows."""

    def __init__(self, table: nn.Embedding, read: Bool[Tensor, "vocab"]) -> None:
        """Keep the rows of `table` that are read.

        Args:
            read: which words are read; must not be True for all.
        """
        whole = table.weight.detach().cpu().clone()
        # The longest unread vector measures the decay most precisely.
        lengths = whole.norm(dim=1)
        witness = lengths.masked_fill(read | ~lengths.isfinite(), -1.0).argmax()
        words = torch.cat([read.nonzero()[:, 0], witness[None]])
        places = torch.full((len(read),), len(words))  # out of range for unread words
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
        """Return the words' embeddings. Raises: IndexError, on a CPU, for a word that is not among
        the read ones."""
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
        weight = state_dict.get(key)  # torch rejects it if its shape differs
        whole = weight is not None and weight.shape == self._whole.shape
        rows = {} if weight is None else {key: weight[self._words] if whole else weight}
        super()._load_from_state_dict(rows, prefix, *args)

    def moments_of_all(self, moments: Float[Tensor, "read embedding"]) -> Tensor:
        """Return the moments of all words, on the CPU; zero for unread words."""
        whole = torch.zeros(self._whole.shape, dtype=moments.dtype)
        return whole.index_copy_(0, self._words[:-1], moments[:-1].cpu())

    def moments_of_read(self, moments: Float[Tensor, "vocab embedding"]) -> Tensor:
        """Do the reverse of `moments_of_all`."""
        return moments[self._words]


def table_of(weight: Tensor) -> ReadWords | None:
    """Return the `ReadWords` table that owns this weight; None if none does."""
    return getattr(weight, "table", None)
