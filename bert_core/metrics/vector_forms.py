"""Vectors in fewer bytes: cut, in 8 bits, in one bit per number. Pure functions.

A form is scored as a vector database scores it: the documents are stored so, and a query stays in
fp32 unless the form needs the same of it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

Quantized = Literal["int8", "binary"]
FULL = "fp32"
LEVELS = 255
"""Steps of a number in 8 bits."""

Vectors = Float[np.ndarray, "_ size"]


@dataclass(frozen=True)
class Form:
    """Documents and queries in one form; the dot product of both is the score."""

    name: str
    bytes_per_vector: float
    documents: Vectors
    queries: Vectors


def unit(vectors: Float[np.ndarray, "*rows size"]) -> Float[np.ndarray, "*rows size"]:
    """Return the vectors scaled to length 1; all-zero vectors stay zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)


def in_8_bits(documents: Vectors, queries: Vectors) -> tuple[Vectors, Vectors]:
    """Return the documents as they are read back from 8 bits per number, and the queries
    unchanged.

    Each dimension has `LEVELS` equal steps between its least and its largest value among the
    documents, as in FAISS's `QT_8bit`.
    """
    least, most = documents.min(axis=0), documents.max(axis=0)
    step = np.maximum((most - least) / np.float32(LEVELS), np.float32(1e-12))
    codes = np.rint((documents - least) / step).astype(np.uint8)
    return (least + codes * step).astype(np.float32), queries


def in_one_bit(documents: Vectors, queries: Vectors) -> tuple[Vectors, Vectors]:
    """Return the signs of both, so that the product of two is their size less twice the Hamming
    distance of their bits; 0 counts as negative."""
    return tuple(np.where(side > 0, np.float32(1), np.float32(-1)) for side in (documents, queries))  # type: ignore[return-value]


_QUANTIZED: Mapping[Quantized, tuple[Callable[..., tuple[Vectors, Vectors]], float]] = {
    "int8": (in_8_bits, 1),
    "binary": (in_one_bit, 1 / 8),
}
"""Form → how both sides are changed, and its bytes per number."""


def forms_of(
    documents: Vectors,
    queries: Vectors,
    quantized: Sequence[Quantized] = (),
    dimensions: Collection[int] = (),
) -> list[Callable[[], Form]]:
    """Return how to make each form: the full vectors first, then the quantized ones, then those of
    fewer dimensions, longest first. Each is made when it is called, so that memory holds one.

    Args:
        documents: of length 1 each, as the queries.
        dimensions: lengths below that of the vectors; what is left is scaled to length 1 again.
    """
    size = documents.shape[1]

    def full() -> Form:
        return Form(FULL, 4 * size, documents, queries)

    def quantize(name: Quantized) -> Form:
        change, bytes_per_number = _QUANTIZED[name]
        return Form(name, size * bytes_per_number, *change(documents, queries))

    def cut(length: int) -> Form:
        sides = (unit(np.ascontiguousarray(side[:, :length])) for side in (documents, queries))
        return Form(f"{length} dimensions", 4 * length, *sides)

    lengths = sorted({length for length in dimensions if length < size}, reverse=True)
    return [
        full,
        *(lambda name=name: quantize(name) for name in quantized),
        *(lambda length=length: cut(length) for length in lengths),
    ]
