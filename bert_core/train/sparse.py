"""Gradients of tables of which a step reads few rows."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bert_core.objectives.base import ObjectiveModel
from bert_core.train.parallel import rank_of_world


class SparseGradients:
    """Gradients of tables, by the rows that were read, in memory that stays.

    Else every step asks for a table of zeros, and the system may map and clear it page by page: 22
    of 147 ms of a step of MiniLM on 32 sentences of 12 tokens.
    """

    def __init__(self, tables: Iterable[nn.Embedding]) -> None:
        self._tables = list(tables)
        self._spread: dict[nn.Embedding, tuple[Tensor, Tensor]] = {}

    def gather(self) -> None:
        """Sum what each row got, once for every place where it was read."""
        for table, gradient in self._sparse():
            table.weight.grad = gradient.coalesce()

    def spread(self) -> None:
        """Make gathered gradients dense, as optimizers take them."""
        for table, gradient in self._sparse():
            if table in self._spread:
                dense, before = self._spread[table]
                dense.index_fill_(0, before, 0.0)
            else:
                dense = torch.zeros_like(table.weight)
            # NOTE: scaled since it was gathered, it no longer says that it is.
            rows = gradient._indices()[0]
            table.weight.grad = dense.index_copy_(0, rows, gradient._values())
            self._spread[table] = dense, rows

    def _sparse(self) -> Iterator[tuple[nn.Embedding, Tensor]]:
        """Not those of tables that are read whole as well, as scores of words do."""
        for table in self._tables:
            gradient = table.weight.grad
            if gradient is not None and gradient.is_sparse:
                yield table, gradient


@contextmanager
def sparse_gradients(model: ObjectiveModel, *, on: bool) -> Iterator[SparseGradients]:
    """Inside, the word embeddings' gradients come by rows; `on` False leaves all as it is.

    Where an objective reads all words as well, the rows are added to the gradient from there, which
    stays dense. Ranks sum dense gradients, so several have this one alone.
    """
    several = rank_of_world()[1] > 1
    tables = [
        table
        for table in {encoder.embeddings.word_embeddings for encoder in model.encoders}
        if on
        and not parametrize.is_parametrized(table)
        and (not several or (model.reads_words and table.weight is model.word_embeddings))
    ]
    for table in tables:
        table.sparse = True
    try:
        yield SparseGradients(tables)
    finally:
        for table in tables:
            table.sparse = False
