"""Masked and permuted language modelling (MPNet, Song et al. 2020, section 2.2)."""

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bert_core.errors import ConfigError
from bert_core.model.config import AttentionConfig, BiasedAttentionConfig, EncoderConfig
from bert_core.model.size import training_flops
from bert_core.objectives.base import Batch, LossPart
from bert_core.objectives.mlm import MaskedLanguageModeling

TOKEN, MASK, QUERY, PADDING = range(4)
"""The kinds of places in a row."""


class PermutedMaskedLanguageModeling(MaskedLanguageModeling):
    """Predicts the chosen tokens one after another, in a random order: each from the tokens that
    are not chosen, the chosen ones before it in that order, and the masks of itself and of those
    after it, so that the model always knows how long the row is.

    In training, a row of n tokens of which m are chosen has n + 2 m places: its tokens uncorrupted;
    the masks (what `data.masking` shows there); and the queries, which begin as the masks do, read
    the others, and are read by none. The order is that of `mlm_draws`. Measured, a row is an
    ordinary masked one, as at inference, so that held-out losses compare with `mlm`'s.

    Source: Song et al. 2020, section 2.2, figures 1 and 2; which place reads which is that of its
        authors' code (microsoft/MPNet). There the tokens themselves are permuted, not only masked
        from each other, which gives the same vectors, since positions go with tokens.
    """

    def __init__(self, config: EncoderConfig) -> None:
        """Build the head. Raises: ConfigError if the encoder's attention is not BERT's or
        MPNet's, which alone can hide tokens from single others."""
        super().__init__(config)
        if type(config.attention) not in (AttentionConfig, BiasedAttentionConfig):
            raise ConfigError(
                "objectives: wanted for permuted_mlm an encoder that attends as BERT or MPNet do, "
                f"got one of the family {config.family}: use another variant, or mlm"
            )
        self._pad_id = config.embeddings.pad_token_id
        self._config = config

    def shown(self, batch: Batch) -> tuple[Batch, dict[str, LossPart]]:
        """Return the longer rows, padded, with the `positions` (B, L) of their places and what each
        may attend to, `attention_mask` (B, L, L); `mlm_positions` are the queries."""
        if not self.training:
            return batch, {}
        rows, places = rows_of_tokens(batch)
        masks, chosen = batch["input_ids"].flatten(), batch["mlm_positions"]
        tokens = masks.index_copy(0, chosen, batch["mlm_labels"])
        rank = torch.full_like(masks, -1).index_copy(0, chosen, _ranks(batch, rows[chosen]))
        mask = batch.get("attention_mask", torch.ones_like(masks))
        kinds = [mask.flatten().nonzero()[:, 0], chosen, chosen]  # tokens, masks, queries
        of = torch.cat(kinds)
        kind = torch.cat([torch.full_like(part, number) for number, part in enumerate(kinds)])
        order = torch.argsort(rows[of], stable=True)  # by row; in it tokens, masks, queries
        sizes = torch.bincount(rows[of]).tolist()

        def padded(values: Int[Tensor, "places"], filler: int) -> Int[Tensor, "batch seq"]:
            parts = values[order].split(sizes)
            return pad_sequence(parts, batch_first=True, padding_value=filler)

        ids = padded(torch.where(kind == TOKEN, tokens[of], masks[of]), self._pad_id)
        kind_of = padded(kind, PADDING)
        longer = {
            "input_ids": ids,
            "token_type_ids": padded(batch["token_type_ids"].flatten()[of], 0),
            "attention_mask": seen_by(kind_of, padded(rank[of], -1)).long(),
            "positions": padded(places[of], 0),
            "mlm_positions": (kind_of.flatten() == QUERY).nonzero()[:, 0],  # ascend as labels do
        }
        return {name: value for name, value in batch.items() if name != "offsets"} | longer, {}

    def flops(self, batch: Batch, lengths: Integer[np.ndarray, "rows"]) -> int:
        """Return the FLOPs of the masks and the queries."""
        rows = rows_of_tokens(batch)[0][batch["mlm_positions"]].cpu().numpy()
        more = lengths + 2 * np.bincount(rows, minlength=len(lengths))
        return training_flops(self._config, more) - training_flops(self._config, lengths)


def seen_by(
    kind: Int[Tensor, "batch seq"], rank: Int[Tensor, "batch seq"]
) -> Bool[Tensor, "batch seq seq"]:
    """Return whether each place may attend to each other one (query first).

    Args:
        kind: TOKEN, MASK, QUERY or PADDING.
        rank: how many chosen tokens of its row come before the one that is, or belongs, there; -1
            for tokens that are not chosen.
    """
    # The rank of the last chosen token that a place knows: a token knows itself, a query does not,
    # and a mask knows none.
    known = torch.where(kind == MASK, -1, rank - (kind == QUERY).long())[:, :, None]
    read, rank_read = kind[:, None, :], rank[:, None, :]
    return (read == TOKEN) & (rank_read <= known) | (read == MASK) & (rank_read > known)


def rows_of_tokens(batch: Batch) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "tokens"]]:
    """Return the row of each token of a batch, padding included, and its position in it."""
    ids = batch["input_ids"]
    if "offsets" in batch:
        starts, lengths = batch["offsets"][:-1], batch["offsets"].diff()
        rows = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)
        return rows, torch.arange(len(ids), device=ids.device) - starts[rows]
    flat = torch.arange(ids.numel(), device=ids.device)
    return flat // ids.shape[1], flat % ids.shape[1]


def _ranks(batch: Batch, rows: Int[Tensor, "items"]) -> Int[Tensor, "items"]:
    """Return how many chosen tokens of the same row have a lower draw than each chosen token."""
    by_draw = torch.argsort(batch["mlm_draws"], stable=True)
    order = by_draw[torch.argsort(rows[by_draw], stable=True)]
    starts = torch.searchsorted(rows[order], rows[order])
    places = torch.arange(len(order), device=rows.device) - starts
    return torch.empty_like(order).index_copy(0, order, places)
