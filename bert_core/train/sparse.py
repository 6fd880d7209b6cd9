"""Gradients of tables of which a step reads few rows."""

from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bert_core.objectives.base import ObjectiveModel


class SparseGradients:
    """While it is open, gradients of the word embeddings are made of the rows that were read, and
    laid into memory that stays.

    Else every step asks for a table of zeros, which for rows of few tokens costs a CPU as much as
    the layers do: a sixth of a step of MiniLM on sentences of 13 tokens.
    """

    def __init__(self, model: ObjectiveModel, *, on: bool) -> None:
        """`on` False changes nothing: for ranks that sum dense gradients, and for GPUs."""
        self._tables = {
            encoder.embeddings.word_embeddings
            for encoder in model.encoders
            if on and not parametrize.is_parametrized(encoder.embeddings.word_embeddings)
        }
        self._spread: dict[nn.Embedding, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> "SparseGradients":
        for table in self._tables:
            table.sparse = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for table in self._tables:
            table.sparse = False

    def gather(self) -> None:
        """Sum what each row got, once for every place where it was read."""
        for table in self._tables:
            gradient = table.weight.grad
            if gradient is not None and gradient.is_sparse:  # not where it is read whole as well
                table.weight.grad = gradient.coalesce()

    def spread(self) -> None:
        """Make gathered gradients dense, as optimizers take them."""
        for table in self._tables:
            gradient = table.weight.grad
            if gradient is None or not gradient.is_sparse:
                continue
            if table in self._spread:
                dense, before = self._spread[table]
                dense.index_fill_(0, before, 0.0)
            else:
                dense = torch.zeros_like(table.weight)
            # NOTE: scaled since it was gathered, it no longer says that it is.
            rows = gradient._indices()[0]
            table.weight.grad = dense.index_copy_(0, rows, gradient._values())
            self._spread[table] = dense, rows
