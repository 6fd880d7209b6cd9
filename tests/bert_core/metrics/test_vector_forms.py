"""Vectors in fewer bytes."""

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from bert_core.metrics.vector_forms import forms_of, unit


@pytest.fixture
def sides() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    documents = unit(rng.normal(size=(50, 32)).astype(np.float32) * np.arange(1, 33))
    return documents.astype(np.float32), documents[:7] + np.float32(0.01)


def test_forms_come_in_order_and_none_twice(sides: tuple[np.ndarray, np.ndarray]) -> None:
    made = [make() for make in forms_of(*sides, ("int8", "binary"), (8, 16, 32, 64))]
    names = ["fp32", "int8", "binary", "16 dimensions", "8 dimensions"]
    assert [form.name for form in made] == names
    assert [form.bytes_per_vector for form in made] == [128, 32, 4, 64, 32]
    assert made[0].documents is sides[0]
    for form in made[3:]:
        size = int(form.name.split()[0])
        for ours, full in zip((form.documents, form.queries), sides, strict=True):
            cut = full[:, :size] / np.linalg.norm(full[:, :size], axis=1, keepdims=True)
            assert ours == pytest.approx(cut, abs=1e-6)


def test_8_bits_are_off_by_at_most_half_a_step(sides: tuple[np.ndarray, np.ndarray]) -> None:
    _, make = forms_of(*sides, ("int8",))
    form, (documents, queries) = make(), sides
    steps = (documents.max(0) - documents.min(0)) / 255
    assert (np.abs(form.documents - documents) <= steps / 2 * 1.001).all()
    assert all(len(np.unique(column)) > 30 for column in form.documents.T), "not far fewer values"
    assert form.queries is queries
    same = np.ones((3, 4), dtype=np.float32)
    assert forms_of(same, same, ("int8",))[1]().documents.tolist() == same.tolist()


def test_binary_ranks_as_the_hamming_distance_of_sentence_transformers_bits(
    sides: tuple[np.ndarray, np.ndarray],
) -> None:
    form = forms_of(*sides, ("binary",))[1]()
    bits = [np.unpackbits(quantize_embeddings(side, "ubinary"), axis=1) for side in sides]
    hamming = (bits[1][:, None] != bits[0][None]).sum(-1)
    assert (form.queries @ form.documents.T).tolist() == (32 - 2 * hamming).tolist()
