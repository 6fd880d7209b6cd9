"""Losses of vectors beside other implementations of them, and what they cost."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from bert_core.objectives import vector_losses
from bert_core.objectives.base import OWN_ROWS, Batch
from bert_core.objectives.embedding import Embedding
from bert_core.objectives.vector_losses import Compared, FalseNegatives

WIDTH = 12


def batch_of(choices: list[int], texts: list[int] | None = None) -> Batch:
    """The labels of rows with so many texts each, by default all different."""
    total = sum(choices)
    return {
        "choices": torch.tensor(choices),
        "texts": torch.tensor(texts) if texts else torch.arange(total),
        "similarities": torch.zeros(total),
    }


def vectors_of(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=rng, dtype=dtype).requires_grad_()


def gradient(loss: Tensor, vectors: Tensor) -> Tensor:
    [slopes] = torch.autograd.grad(loss, vectors)
    return slopes


@pytest.fixture(scope="module")
def losses() -> Any:
    """Those of sentence-transformers, whose import takes seconds."""
    from sentence_transformers.sentence_transformer import losses

    return losses


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.05, 0.2])
def test_the_contrastive_loss_is_that_of_sentence_transformers(
    negatives: int, temperature: float, losses: Any
) -> None:
    rows, texts = 7, 2 + negatives
    vectors = vectors_of(rows * texts)
    theirs = losses.MultipleNegativesRankingLoss(torch.nn.Identity(), scale=1 / temperature)
    columns = list(vectors.view(rows, texts, WIDTH).unbind(1))
    wanted = theirs.compute_loss_from_embeddings(columns, None)
    part = Embedding("contrastive", temperature).part(vectors, batch_of([texts] * rows))
    torch.testing.assert_close(part.sum / part.count, wanted)
    torch.testing.assert_close(gradient(part.sum / part.count, vectors), gradient(wanted, vectors))


class AsGiven(torch.nn.Module):
    """A model of sentence-transformers whose vectors are its inputs."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(features)

    def get_embedding_dimension(self) -> int:
        return WIDTH


def test_each_length_has_its_own_loss_as_in_sentence_transformers(losses: Any) -> None:
    rows, lengths = 6, [8, 3]
    vectors = vectors_of(2 * rows)
    model = AsGiven()
    inner = losses.MultipleNegativesRankingLoss(model)
    theirs = losses.MatryoshkaLoss(model, inner, matryoshka_dims=[WIDTH, *lengths])
    columns = [{"sentence_embedding": each} for each in vectors.view(rows, 2, WIDTH).unbind(1)]
    wanted = theirs(columns, torch.zeros(rows))
    part = Embedding(dimensions=lengths).part(vectors, batch_of([2] * rows))
    torch.testing.assert_close(part.sum / part.count, wanted)
    torch.testing.assert_close(gradient(part.sum / part.count, vectors), gradient(wanted, vectors))
    scored = batch_of([2] * rows) | {"similarities": torch.linspace(-1, 1, 2 * rows).double()}
    alone = [Embedding("cosine").part(vectors[:, :size], scored).sum for size in (WIDTH, 8, 3)]
    together = Embedding("cosine", dimensions=lengths).part(vectors, scored).sum
    torch.testing.assert_close(together, torch.stack(alone).sum())


@pytest.mark.parametrize("negatives", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.05])
@pytest.mark.parametrize(
    ("loss", "name"), [("kl", "DistillKLDivLoss"), ("margin_mse", "MarginMSELoss")]
)
def test_losses_against_a_teacher_are_those_of_sentence_transformers(
    loss: Any, name: str, temperature: float, negatives: int, losses: Any
) -> None:
    rows, texts = 5, 2 + negatives
    vectors, scores = vectors_of(rows * texts), vectors_of(rows * texts, seed=1).detach()[:, 0]

    def scaled(one: Tensor, other: Tensor) -> Tensor:
        return torch.cosine_similarity(one, other) / temperature

    theirs = getattr(losses, name)(AsGiven(), similarity_fct=scaled)
    columns = vectors.view(rows, texts, WIDTH).unbind(1)
    labels = scores.view(rows, texts)[:, 1:]
    wanted = theirs([{"sentence_embedding": each} for each in columns], labels)
    batch = batch_of([texts] * rows) | {"similarities": scores}
    part = Embedding(loss, temperature).part(vectors, batch)
    torch.testing.assert_close(part.sum / part.count, wanted)
    torch.testing.assert_close(gradient(part.sum / part.count, vectors), gradient(wanted, vectors))
    assert part.count == Embedding(loss).counts(batch)


@pytest.mark.parametrize("loss", ["kl", "margin_mse"])
def test_rows_may_have_different_numbers_of_negatives(loss: Any) -> None:
    vectors, scores = vectors_of(9), torch.arange(9.0, dtype=torch.float64)
    whole = batch_of([3, 4, 2]) | {"similarities": scores}
    part = Embedding(loss).part(vectors, whole)
    alone = [
        Embedding(loss).part(vectors[at], batch_of([size]) | {"similarities": scores[at]}).sum
        for at, size in ((slice(0, 3), 3), (slice(3, 7), 4), (slice(7, 9), 2))
    ]
    torch.testing.assert_close(part.sum, torch.stack(alone).sum())
    assert gradient(part.sum, vectors).isfinite().all()
    exact = Embedding(loss).soft_part(vectors, vectors.detach(), whole, 2.0)
    torch.testing.assert_close(exact.sum, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("teachers", [None, vectors_of(11, seed=1)])
def test_blocks_of_rows_and_shares_of_rows_add_up_to_the_loss(
    teachers: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, vectors = Embedding(), vectors_of(11)
    batch = batch_of([2, 3, 2, 4], [0, 1, 2, 3, 4, 2, 1, 0, 5, 6, 7])

    def loss(rows: list[int] | None = None) -> tuple[Tensor, int, int]:
        own = {} if rows is None else {OWN_ROWS: torch.tensor(rows)}
        if teachers is None:
            part = objective.part(vectors, batch | own)
        else:
            part = objective.soft_part(vectors, teachers.detach(), batch | own, 2.0)
        return part.sum, part.count, int(part.correct)  # type: ignore[arg-type]

    whole, count, correct = loss()
    shares = [loss([2]), loss([0, 3]), loss([1])]
    torch.testing.assert_close(torch.stack([each[0] for each in shares]).sum(), whole)
    assert [sum(each[place] for each in shares) for place in (1, 2)] == [count, correct]
    wanted = gradient(whole, vectors)
    for at_once in (1, 15):  # one row, two rows
        monkeypatch.setattr(vector_losses, "SCORES_AT_ONCE", at_once)
        in_blocks, *counted = loss()
        assert counted == [count, correct]
        torch.testing.assert_close(in_blocks, whole)
        torch.testing.assert_close(gradient(in_blocks, vectors), wanted)


def test_what_the_backward_pass_keeps_grows_with_the_batch_and_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vector_losses, "SCORES_AT_ONCE", 1 << 12)

    def kept(rows: int) -> int:
        saved: list[weakref.ref[Tensor]] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(weakref.ref(tensor))  # those of a block go with its graph
            return tensor

        vectors = vectors_of(2 * rows, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            part = Embedding().part(vectors, batch_of([2] * rows))
        alive = [tensor for ref in saved if (tensor := ref()) is not None]
        storages = [tensor.untyped_storage() for tensor in alive]
        kept_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        part.sum.backward()
        return sum(kept_bytes.values())

    assert 0 < kept(2048) < 1.2 * 4 * kept(512)
    assert kept(2048) < 2048 * 2048, "a byte per score"


def test_false_negatives_are_found_among_any_texts() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(30):
        choices = torch.randint(2, 5, (9,), generator=rng)
        numbers = torch.randint(0, 6, (int(choices.sum()),), generator=rng)
        texts = Compared.of(choices)
        mask = FalseNegatives.among(texts, numbers).mask(torch.arange(9))
        rows = [each.tolist() for each in numbers.split(choices.tolist())]
        others = [text for row in rows for text in row[1:]]
        for place, row in enumerate(rows):
            right = {row[0], *(other[1] for other in rows if other[0] == row[0])}
            wanted = [text in right for text in others]
            wanted[texts.targets[place]] = False
            assert mask[place].tolist() == wanted
