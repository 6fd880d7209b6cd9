"""Sparse gradients of embedding tables, for steps that read few of their rows."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from bert_core.objectives.base import ObjectiveModel
from bert_core.train.parallel import rank_of_world


class SparseGradients:
    """Gradients of tables, stored only for the rows that were read, in reused memory.

    Otherwise every step allocates a table of zeros, which the system may map and clear page by
    page: 22 of 147 ms of a step of MiniLM on 32 sentences of 12 tokens.
    """

    def __init__(self, tables: Iterable[nn.Embedding]) -> None:
        self._tables = list(tables)
        self._spread: dict[nn.Embedding, tuple[Tensor, Tensor]] = {}

    def watch(self) -> list[RemovableHandle]:
        """Gather a table's gradient whenever micro-batches have added more rows to it than the
        table has; return what ends that.

        torch concatenates the rows of sparse gradients: 2.6 GB for a step on 1.7 million tokens of
        384 numbers, copied once per micro-batch.
        """

        def bound(weight: Tensor) -> None:
            gradient = weight.grad
            if gradient is not None and gradient.is_sparse and gradient._nnz() > len(weight):
                weight.grad = gradient.coalesce()

        return [
            table.weight.register_post_accumulate_grad_hook(bound)
            for table in self._tables
            if table.weight.requires_grad  # frozen embeddings have no gradient
        ]

    def gather(self) -> None:
        """Sum each row's gradients over all places where it was read, in place."""
        for table, gradient in self._sparse():
            table.weight.grad = gradient.coalesce()

    def spread(self) -> None:
        """Make gathered gradients dense, as optimizers need them."""
        for table, gradient in self._sparse():
            if table in self._spread:
                dense, last_rows = self._spread[table]
                dense.index_fill_(0, last_rows, 0.0)
            else:
                dense = torch.zeros_like(table.weight)
            # NOTE: clipping after `gather` clears the coalesced flag, hence the private getters.
            rows = gradient._indices()[0]
            table.weight.grad = dense.index_copy_(0, rows, gradient._values())
            self._spread[table] = dense, rows

    def _sparse(self) -> Iterator[tuple[nn.Embedding, Tensor]]:
        """Yield the tables with a sparse gradient; a gradient is dense if the whole table is read
        too, as by vocabulary scores."""
        for table in self._tables:
            gradient = table.weight.grad
            if gradient is not None and gradient.is_sparse:
                yield table, gradient


@contextmanager
def sparse_gradients(model: ObjectiveModel, *, on: bool) -> Iterator[SparseGradients]:
    """Make gradients of word embeddings sparse inside the context; does nothing if `on` is False.

    If an objective reads all words too, the rows are added to its gradient, which stays dense.
    Ranks can sum only dense gradients, so with several ranks only the table of such an objective is
    included.
    """
    several = rank_of_world()[1] > 1
    tables = [
        table
        for table in {encoder.embeddings.word_embeddings for encoder in model.encoders}
        if on
        and table.weight.requires_grad  # else it is frozen
        and not parametrize.is_parametrized(table)
        and (not several or (model.reads_words and table.weight is model.word_embeddings))
    ]
    for table in tables:
        table.sparse = True
    sparse = SparseGradients(tables)
    hooks = sparse.watch()
    try:
        yield sparse
    finally:
        for hook in hooks:
            hook.remove()
        for table in tables:
            table.sparse = False
